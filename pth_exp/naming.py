"""Many runs, and many values, named in few words: ``san·seed=0..99``, ``1e-05, 0.0001``, ``all but grpo (900 runs)``.

A run's label says what sets it apart, ``arm·field=value·...`` (`pth_exp.design.labels`), so sets of runs are named by the values
that they take.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

SEPARATOR = "·"
FEW = 6
"""Values, or sets of runs, that stand in a line before the rest is counted."""

Coordinates = Mapping[str, str]


def shown(value: Any) -> str:
    """A value as it is written on the command line."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def values(these: Iterable[Any], most: int = FEW) -> str:
    """Distinct values: integers as ranges (``0..41, 43``), other numbers in order, texts as they come.

    Of more than ``most`` ranges and values the first ones and the last, and how many there are.
    """
    distinct = list(dict.fromkeys(map(shown, these)))
    counted = f" ({len(distinct)} values)" if len(distinct) > most else ""
    return _in_few(distinct, most) + counted


def _in_few(distinct: list[str], most: int = FEW) -> str:
    numbers = [(float(text), text) for text in distinct if _is_number(text)]
    if len(numbers) == len(distinct):
        distinct = [text for _, text in sorted(numbers)]
    pieces = list(_ranges(distinct))
    if len(pieces) > most:
        pieces = [*pieces[: most - 2], f"... {pieces[-1]}"]
    return ", ".join(pieces)


def _is_number(text: str) -> bool:
    try:
        return float(text) == float(text)
    except ValueError:
        return False


def _ranges(texts: Sequence[str]) -> Iterator[str]:
    """Three or more successive integers as one range."""
    start = 0
    while start < len(texts):
        end = start + 1
        while end < len(texts) and _follows(texts[end - 1], texts[end]):
            end += 1
        if end - start > 2:
            yield f"{texts[start]}..{texts[end - 1]}"
        else:
            yield from texts[start:end]
        start = end


def _follows(one: str, other: str) -> bool:
    return one.isdecimal() and other.isdecimal() and int(other) == int(one) + 1


@dataclass(frozen=True, slots=True)
class Grid:
    """Runs that are all combinations of some fields' values."""

    fields: dict[str, list[str]]
    runs: int


class Runs:
    """Names for subsets of the runs called ``labels``."""

    def __init__(self, labels: Sequence[str]) -> None:
        self._coordinates = {label: _coordinates(label) for label in labels}
        self._having: dict[tuple[str, str], set[str]] = {}
        for label, coordinates in self._coordinates.items():
            for item in coordinates.items():
                self._having.setdefault(item, set()).add(label)

    def named(self, some: Iterable[str], most: int = FEW) -> str:
        """``some`` of the runs in few words; up to three by their labels."""
        these = list(dict.fromkeys(some))
        total = len(self._coordinates)
        if len(these) == total > 1:
            return f"all {total} runs"
        if len(these) <= 3:
            return ", ".join(these)
        grids = list(_grids([self._coordinates[label] for label in these]))
        if len(grids) > 1 and 2 * len(these) > total:
            chosen = set(these)
            others = [label for label in self._coordinates if label not in chosen]
            if len(others) <= 3 or len(list(_grids([self._coordinates[label] for label in others]))) == 1:
                return f"all but {self.named(others)}, {len(these)} runs"
        parts = [self._grid(grid) for grid in grids[:most]]
        left = sum(grid.runs for grid in grids[most:])
        return "; ".join([*parts, *([f"and {left} more runs"] if left else [])])

    def has(self, some: Iterable[str]) -> bool:
        """Whether all of ``some`` are among the runs."""
        return all(label in self._coordinates for label in some)

    def say(self, field: str, of: Mapping[str, str]) -> bool:
        """Whether the labels say already which run has which value of ``field``."""
        name = "" if field == "arm.name" else field.removesuffix(".name")
        return all(self._coordinates[label].get(name) == value for label, value in of.items())

    def _grid(self, grid: Grid) -> str:
        fields = self.telling(grid)
        text = SEPARATOR.join(f"{name}={_in_few(these)}" if name else _in_few(these) for name, these in fields.items())
        return text if grid.runs == 1 else f"{text} ({grid.runs} runs)"

    def telling(self, grid: Grid) -> dict[str, list[str]]:
        """The fields of a grid that tell it from the other runs, with their values."""
        fields = dict(grid.fields)
        for name in reversed(grid.fields):
            fewer = {field: these for field, these in fields.items() if field != name}
            if fewer and len(self._matching(fewer)) == grid.runs:
                fields = fewer
        return fields

    def _matching(self, fields: Mapping[str, Sequence[str]]) -> set[str]:
        having = [set[str]().union(*(self._having[name, value] for value in these)) for name, these in fields.items()]
        return set.intersection(*having)


def _coordinates(label: str) -> Coordinates:
    """Field to value, as a label has them; its arm has the field "", and a part without a field its place."""
    found: dict[str, str] = {}
    for place, part in enumerate(label.split(SEPARATOR)):
        name, equals, value = part.partition("=")
        found[name if equals else str(place) if place else ""] = value if equals else part
    return found


def _grids(rows: Sequence[Coordinates]) -> Iterator[Grid]:
    """Some grids that make up the rows."""
    by_fields: dict[tuple[str, ...], list[Coordinates]] = {}
    for row in rows:
        by_fields.setdefault(tuple(row), []).append(row)
    for fields, alike in by_fields.items():
        yield from _split(fields, alike)


def _split(fields: Sequence[str], rows: Sequence[Coordinates]) -> Iterator[Grid]:
    """Rows with the same ``fields``, divided by the values of one of them until grids are left."""
    taken = {field: list(dict.fromkeys(row[field] for row in rows)) for field in fields}
    if prod(map(len, taken.values())) != len(rows):
        for field in sorted(fields, key=lambda f: len(taken[f])):
            parts = _by_what_goes_with(field, rows)
            if len(parts) > 1:
                for part in parts:
                    yield from _split(fields, part)
                return
    yield Grid(taken, len(rows))


def _by_what_goes_with(field: str, rows: Sequence[Coordinates]) -> list[list[Coordinates]]:
    """Rows together whose values of ``field`` occur with the same values of the other fields."""
    having: dict[str, list[Coordinates]] = {}
    for row in rows:
        having.setdefault(row[field], []).append(row)
    parts: dict[frozenset[tuple[tuple[str, str], ...]], list[Coordinates]] = {}
    for group in having.values():
        others = frozenset(tuple(item for item in row.items() if item[0] != field) for row in group)
        parts.setdefault(others, []).extend(group)
    return list(parts.values())
