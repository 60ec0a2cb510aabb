"""Which of the methods that a run names differ, on the batches that it trained on: its arm beside its shadow arms."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from pth_exp.checks.result import short
from pth_exp.records.reader import RunRecords
from pth_exp.report.text import Painter, paragraph, table

ONE_METHOD: Final = 5e-11
"""Two arms are one method when the cosine stays within this of 1: unit gradients then differ by less than 1e-5."""

ONE_SCALE: Final = 1e-5
"""Their sizes differ by one number when the norm ratio varies by no more than this part of itself."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two arms in one run.

    Attributes:
        updates: on how many both had a gradient.
        cosine: least, median and largest.
        norm_ratio: ||a|| / ||b||, likewise.
        one_method: the cosine is 1 to rounding on every one of these updates.
        scale: what ||a|| / ||b|| then always is, None where it varies.
    """

    run: str
    a: str
    b: str
    updates: int
    cosine: tuple[float, float, float]
    norm_ratio: tuple[float, float, float]
    one_method: bool
    scale: float | None


def pairs(run: RunRecords) -> list[Pair]:
    """The pairs that a run measured, in the order of its names."""
    measured: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in run.updates:
        for pair in row.get("shadow/pairs") or ():
            values = measured.setdefault((pair["a"], pair["b"]), [])
            if pair["cosine"] is not None:
                values.append((pair["cosine"], pair["norm_ratio"]))
    return [_pair(run.label, a, b, values) for (a, b), values in measured.items() if values]


def _pair(run: str, a: str, b: str, values: Sequence[tuple[float, float]]) -> Pair:
    cosines, ratios = ([value[i] for value in values] for i in (0, 1))
    one = all(abs(1 - cosine) <= ONE_METHOD for cosine in cosines)
    middle = median(ratios)
    constant = one and max(ratios) - min(ratios) <= ONE_SCALE * middle
    return Pair(run, a, b, len(values), _range(cosines), _range(ratios), one, middle if constant else None)


def _range(values: Sequence[float]) -> tuple[float, float, float]:
    if any(math.isnan(value) for value in values):
        return math.nan, math.nan, math.nan
    return min(values), median(values), max(values)


def text(found: Sequence[Pair], paint: Painter) -> Iterator[str]:
    """What the pairs say; nothing without any."""
    if not found:
        return
    yield ""
    yield paint("bold", "Shadow arms: token coefficients of two arms on the same batches")
    for run in dict.fromkeys(pair.run for pair in found):
        yield f"  {paint('bold', run)}"
        own = [pair for pair in found if pair.run == run]
        rows = [["arms", "cosine, least and median", "norm ratio", "updates"]]
        for pair in own:
            low, middle, high = pair.norm_ratio
            ratio = short(middle) if pair.scale is not None else f"{short(low)} to {short(high)}"
            rows.append([f"{pair.a}, {pair.b}", f"{pair.cosine[0]:.6f} {pair.cosine[1]:.6f}", ratio, str(pair.updates)])
        yield from ("  ".join(row).rstrip() for row in table(rows, indent=6))
        for pair in own:
            if pair.one_method:
                yield from paragraph(_sentence(pair), 6, paint.width)


def _sentence(pair: Pair) -> str:
    size = "by a scale that varies between updates"
    if pair.scale is not None:
        equal = abs(pair.scale - 1) <= ONE_SCALE
        size = "in nothing" if equal else f"by one scale: {pair.a} is {short(pair.scale)} times {pair.b}"
    return (
        f"{pair.a} and {pair.b} are one method on these batches: the cosine is 1, to rounding, on every update measured "
        f"({pair.updates}). They differ {size}."
    )
