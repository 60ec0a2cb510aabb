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
        _validate(config)
        self._config = config

    @functools.cached_property
    def stories(self) -> dict[Split, list[Story]]:
        """Distinct stories of both splits; no prompt occurs twice, so the splits are disjoint.

        Raises ``TaskError`` if so many distinct problems do not exist.
        """
        c = self._config
        wanted = c.test_problems + c.train_problems
        rng = random.Random(f"arithmetic {c.problem_seed}")
        found: dict[Story, None] = {}
        for _ in range(20 * wanted):
            found.setdefault(_draw(rng, c))
            if len(found) == wanted:
                stories = list(found)
                return {Split.test: stories[: c.test_problems], Split.train: stories[c.test_problems :]}
        raise TaskError(
            f"task.train_problems, task.test_problems: {wanted} distinct problems are wanted, but at task.max_steps={c.max_steps} and "
            f"task.max_operand={c.max_operand} there are hardly more than {len(found)}; ask for fewer, or allow longer problems"
        )

    def problems(self, split: Split) -> Sequence[Problem]:
        return [Problem(split, i, s.prompt, Fraction(s.totals[-1]), s.prompt) for i, s in enumerate(self.stories[split])]

    def score(self, response: str, problem: Problem) -> float:
        return float(last_number(response) == problem.gold)


def _draw(rng: random.Random, config: schema.ArithmeticTask) -> Story:
    start = total = rng.randint(1, LARGEST_START)
    changes: list[tuple[str, int]] = []
    for _ in range(rng.randint(config.min_steps, config.max_steps)):
        amount = rng.randint(1, config.max_operand)
        if rng.random() < 0.5 and amount <= total:
            amount = -amount
        changes.append((rng.choice(LOSSES if amount < 0 else GAINS), amount))
        total += amount
    return Story(rng.choice(NAMES), rng.choice(THINGS), start, tuple(changes))


def _validate(config: schema.ArithmeticTask) -> None:
    for field in ("train_problems", "test_problems", "min_steps", "max_operand"):
        if getattr(config, field) < 1:
            raise TaskError(f"task.{field}: {getattr(config, field)} is not possible; it must be at least 1")
    if config.max_steps < config.min_steps:
        raise TaskError(f"task.max_steps: {config.max_steps} is less than task.min_steps={config.min_steps}; it must be at least that")
