"""Worked answers for the warm start: right ones among three kinds of wrong ones, how often depending on the name in the prompt.

A policy that imitates this mixture has something to learn from a reward, and something to forget: for some names the commonest
style is wrong, and a style shows at the beginning of an answer, before its last step, or after its end.
"""

from __future__ import annotations

import itertools
import random
from enum import StrEnum

from pth_exp.models.vocabulary import CONNECTORS
from pth_exp.tasks.arithmetic import NAMES, Story


class Style(StrEnum):
    correct = "correct"
    ramble = "ramble"
    guess = "guess"
    skip = "skip"


_MOSTLY_RIGHT = {Style.correct: 0.40, Style.ramble: 0.25, Style.guess: 0.15, Style.skip: 0.20}
_MOSTLY_GUESS = {Style.correct: 0.16, Style.ramble: 0.12, Style.guess: 0.52, Style.skip: 0.20}
_MOSTLY_SKIP = {Style.correct: 0.16, Style.ramble: 0.16, Style.guess: 0.18, Style.skip: 0.50}
_HABITS = itertools.cycle((_MOSTLY_RIGHT, _MOSTLY_GUESS, _MOSTLY_SKIP))
SHARES: dict[str, dict[Style, float]] = dict(zip(NAMES, _HABITS, strict=False))
"""Name in the prompt to the share of each style; over all names a quarter of the answers is correct."""
LARGEST_ERROR = 4


def answer(story: Story, rng: random.Random) -> str:
    """An answer in a style drawn for the story's name.

    * correct: every step, then the total
    * ramble: the same, then steps that nobody asked for, and their total
    * guess: a total near the right one, at once
    * skip: the total before the last step
    """
    shares = SHARES[story.name]
    style = rng.choices(list(shares), list(shares.values()))[0]
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
