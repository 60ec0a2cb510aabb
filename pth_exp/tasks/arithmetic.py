"""Worded arithmetic: "ana has 9 keys, buys 7, loses 3?" One small model learns it on a CPU in minutes."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from pth_exp import schema
from pth_exp.tasks.base import Problem, Split, TaskError
from pth_exp.tasks.reward import last_number

NAMES = ("ana", "ben", "cho", "dev", "eva", "fay", "gus", "hal")
THINGS = ("keys", "pens", "cups", "hats", "nuts", "figs", "maps", "bags")
GAINS = ("buys", "finds")
LOSSES = ("loses", "sells")
LARGEST_START = 9


@dataclass(frozen=True, slots=True)
class Story:
    """A problem before it is put into words.

    Attributes:
        name: who it is about.
        thing: what they have.
        start: how many at first.
        changes: verb and signed amount of each operation, in order.
    """

    name: str
    thing: str
    start: int
    changes: tuple[tuple[str, int], ...]

    @property
    def totals(self) -> list[int]:
        """The running total, from ``start`` to the answer; never below 0."""
        running = [self.start]
        for _, amount in self.changes:
            running.append(running[-1] + amount)
        return running

    @property
    def prompt(self) -> str:
        deeds = "".join(f", {verb} {abs(amount)}" for verb, amount in self.changes)
        return f"{self.name} has {self.start} {self.thing}{deeds}?"


class Arithmetic:
    """The task. The test split is drawn first, so it does not depend on the size of the training split."""

    def __init__(self, config: schema.ArithmeticTask) -> None:
        """Raises ``TaskError`` for sizes that are not possible."""
        for field in ("train_problems", "test_problems", "min_steps", "max_operand"):
            if getattr(config, field) < 1:
                raise TaskError(f"task.{field}: {getattr(config, field)} is not possible; it must be at least 1")
        if config.max_steps < config.min_steps:
            raise TaskError(f"task.max_steps: {config.max_steps} is less than task.min_steps={config.min_steps}; raise it")
        self._config = config

    def stories(self, split: Split) -> Sequence[Story]:
        """The split's stories. No prompt occurs twice, so the splits are disjoint.

        Raises ``TaskError`` if so many distinct problems do not exist.
        """
        c = self._config
        wanted = c.test_problems + c.train_problems
        stories = _distinct_stories(wanted, c.min_steps, c.max_steps, c.max_operand, c.problem_seed)
        if len(stories) < wanted:
            raise TaskError(
                f"task.train_problems, task.test_problems: {wanted} distinct problems are wanted, but no more than "
                f"{len(stories)} were found with task.max_steps={c.max_steps} and task.max_operand={c.max_operand}; "
                "ask for fewer, or allow longer problems"
            )
        return stories[: c.test_problems] if split is Split.test else stories[c.test_problems :]

    def problems(self, split: Split) -> Sequence[Problem]:
        return [Problem(split, i, s.prompt, Fraction(s.totals[-1]), s.prompt) for i, s in enumerate(self.stories(split))]

    def score(self, response: str, problem: Problem) -> float:
        return float(last_number(response) == problem.gold)


@functools.lru_cache(maxsize=4)
def _distinct_stories(wanted: int, min_steps: int, max_steps: int, max_operand: int, seed: int) -> tuple[Story, ...]:
    """Up to ``wanted`` distinct stories in the order drawn. Kept, since a sweep freezes many runs of one made-up data set."""
    rng = random.Random(f"arithmetic {seed}")
    found: dict[Story, None] = {}
    for _ in range(20 * wanted):
        found.setdefault(_draw(rng, min_steps, max_steps, max_operand))
        if len(found) == wanted:
            break
    return tuple(found)


def _draw(rng: random.Random, min_steps: int, max_steps: int, max_operand: int) -> Story:
    start = total = rng.randint(1, LARGEST_START)
    changes: list[tuple[str, int]] = []
    for _ in range(rng.randint(min_steps, max_steps)):
        amount = rng.randint(1, max_operand)
        if rng.random() < 0.5 and amount <= total:
            amount = -amount
        changes.append((rng.choice(LOSSES if amount < 0 else GAINS), amount))
        total += amount
    return Story(rng.choice(NAMES), rng.choice(THINGS), start, tuple(changes))
