"""A run's numbers as trackers take them: one row a step, in order, each once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pth_exp.records.fields import segment_name

Numbers = dict[str, float]

_NOT_NUMBERS = ("update", "attempt")
_SPELLED = ("NaN", "Infinity", "-Infinity")


class History:
    """The rows of ``updates`` and ``evals``, joined by their ``update``: the step at which a validation stands is the number of
    updates that it had seen.

    Args:
        run_dir: the run's directory.
        attempt: the attempt whose segments are being written; those of earlier attempts come first, as far as it did not start
            again before their end.
    """

    def __init__(self, run_dir: Path, attempt: int) -> None:
        self._updates, self._evaluations = (_Segment(run_dir / segment_name(kind, attempt)) for kind in ("updates", "evals"))
        self._rows: dict[int, Numbers] = {}
        self._validations: dict[int, Numbers] = {}
        for earlier in range(1, attempt):
            self._rows.update(_Segment(run_dir / segment_name("updates", earlier)).rows())
            self._validations.update(_Segment(run_dir / segment_name("evals", earlier)).rows())
        self._begun = False
        self._last = -1

    def steps(self, ended: bool) -> Iterator[tuple[int, Numbers]]:
        """What is new since the last call and complete; all that is left when the attempt has ``ended``."""
        updates = list(self._updates.rows())  # before the evaluations: a validation is written before the update of its step
        validations = list(self._evaluations.rows())
        if updates and not self._begun:  # what earlier attempts did from here on is done again
            self._begun, start = True, updates[0][0]
            self._rows = {step: row for step, row in self._rows.items() if step < start}
            self._validations = {step: row for step, row in self._validations.items() if step <= start}
        self._rows.update(updates)
        self._validations.update(validations)
        if not self._begun and not ended:
            return
        steps = {*self._rows, *self._validations} if ended else {*self._rows}
        for step in sorted(step for step in steps if step > self._last):
            self._last = step
            yield step, {**self._rows.get(step, {}), **self._validations.get(step, {})}


class _Segment:
    """The whole lines of a file that grows, each once."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def rows(self) -> Iterator[tuple[int, Numbers]]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                lines = file.read().rpartition(b"\n")[0]
        except FileNotFoundError:
            return
        self._offset += len(lines) + 1 if lines else 0
        for line in lines.splitlines():
            row = _row(line)
            if row is not None:
                yield row["update"], {name: number for name, value in row.items() if (number := _number(name, value)) is not None}


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and type(row.get("update")) is int else None


def _number(name: str, value: Any) -> float | None:
    if name in _NOT_NUMBERS:
        return None
    if value in _SPELLED:
        return float(value)
    return value if isinstance(value, (int, float)) else None
