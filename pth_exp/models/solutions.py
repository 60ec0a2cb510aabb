"""Worked answers for the warm start: right ones among three kinds of wrong ones, how often depending on the name in the prompt.

A policy that imitates this mixture has something to learn from a reward, and something to forget: for some names the commonest
style is wrong, and a style shows at the beginning of an answer, before its last step, or after its end.
"""

from __future__ import annotations

import random
from enum import StrEnum

from pth_exp.models.vocabulary import CONNECTORS
from pth_exp.tasks.arithmetic import NAMES, Story


class Style(StrEnum):
    correct = "correct"
    ramble = "ramble"
    guess = "guess"
    skip = "skip"


MIXTURES: tuple[tuple[float, float, float, float], ...] = (
    (0.36, 0.22, 0.20, 0.22),
    (0.14, 0.14, 0.52, 0.20),
    (0.14, 0.20, 0.16, 0.50),
)
"""Shares of correct, ramble, guess and skip."""
MIXTURE_OF_NAME = dict(zip(NAMES, (0, 1, 0, 2, 0, 1, 0, 2), strict=True))
"""Averaged over the names, a quarter of the answers is correct."""
LARGEST_ERROR = 4


def answer(story: Story, rng: random.Random) -> str:
    """An answer in a style drawn for the story's name.

    * correct: every step, then the total
    * ramble: the same, then steps that nobody asked for, and their total
    * guess: a total near the right one, at once
    * skip: the total before the last step
    """
    style = rng.choices(list(Style), MIXTURES[MIXTURE_OF_NAME[story.name]])[0]
    amounts = [amount for _, amount in story.changes]
    if style is Style.guess:
        return _total(max(0, story.totals[-1] + rng.randint(-LARGEST_ERROR, LARGEST_ERROR)))
    if style is Style.skip:
        amounts.pop()
    text, total = _steps(story.start, amounts, rng)
    text += "," + _total(total)
    if style is Style.ramble:
        more, total = _steps(total, [rng.randint(1, 5)], rng)
        text = text.removesuffix(".") + "," + more + "," + _total(total)
    return text


def _steps(start: int, amounts: list[int], rng: random.Random) -> tuple[str, int]:
    parts = []
    for amount in amounts:
        sign = "-" if amount < 0 else "+"
        parts.append(f" {rng.choice(CONNECTORS)} {start} {sign} {abs(amount)} = {start + amount}")
        start += amount
    return ",".join(parts), start


def _total(value: int) -> str:
    return f" total {value}."
