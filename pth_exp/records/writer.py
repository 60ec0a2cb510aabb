"""Writing the records of one attempt of one run.

A row is one line, written by one ``os.write`` to a file opened for appending, so a process killed at any instant leaves whole
lines and at most one torn line at the end. A segment belongs to one attempt: resuming neither truncates nor shares one. A row
for which the disk has no room leaves nothing behind.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from pth_exp import disk
from pth_exp.records.fields import EXTRA, KINDS, segment_name
from pth_exp.runfiles import sync

Row = Mapping[str, Any]


class RecordError(Exception):
    """A record that cannot be written as asked; the message names the file or the column and the remedy."""


class RunRecorder:
    """Appends the rows of one attempt. Its writing methods raise `disk.DiskFull` when there is no room.

    Args:
        run_dir: the run's directory; it must exist.
        attempt: the attempt's number, which names its segments.
        still_mine: called before each write; it raises when another attempt has taken the run over.
        shown: called with a row's kind and the row once it is written.
    """

    def __init__(
        self,
        run_dir: Path,
        attempt: int,
        still_mine: Callable[[], None],
        shown: Callable[[str, Row], None] = lambda kind, row: None,
    ) -> None:
        self._run_dir = run_dir
        self._attempt = attempt
        self._still_mine = still_mine
        self._shown = shown
        self._segments: dict[str, int] = {}
        self._last: dict[str, int] = {}

    def update(self, row: Row) -> None:
        """One row of ``updates``. Write it after the update's ``batch`` row: it says that the update is done."""
        self._append("updates", row)

    def batch(self, row: Row) -> None:
        """One row of ``batches``."""
        self._append("batches", row)

    def evaluation(self, row: Row) -> None:
        """One row of ``evals``."""
        self._append("evals", row)

    def equation(self, row: Row) -> None:
        """One row of ``equations``; ``update`` is the number of updates that the attempt found done."""
        self._append("equations", row)

    def first_batches(self, batches: Sequence[Sequence[str]]) -> None:
        """The ordered prompt IDs of the first batches as drawn; written once.

        Raises RecordError when the file is there already and holds other IDs: a resumed run drew differently.
        """
        self._still_mine()
        path = self._run_dir / "first_batches.json"
        drawn = [list(batch) for batch in batches]
        text = "[\n" + ",\n".join(json.dumps(batch) for batch in drawn) + "\n]\n"
        temporary = self._write_beside(path, text)
        try:
            os.link(temporary, path)
        except FileExistsError:
            written = json.loads(path.read_text())
            if written != drawn:
                pairs = enumerate(zip_longest(written, drawn))
                parts = next(i for i, (before, now) in pairs if before != now)
                raise RecordError(
                    f"{path}: batch {parts} was drawn differently by an earlier attempt; the data order changed: freeze a new run"
                ) from None
        finally:
            temporary.unlink()

    def received(self, values: Mapping[str, Any], file: str = "received.yaml") -> None:
        """What the built objects hold, read back from them: dotted field of the config to value. The newest attempt's is kept."""
        self._still_mine()
        path = self._run_dir / file
        self._write_beside(path, yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True)).replace(path)

    def settle(self) -> None:
        """Force every row to the disk itself, so that no machine's crash takes rows which a checkpoint counts as written.

        Raises when another attempt has taken the run over.
        """
        for descriptor in self._segments.values():
            os.fsync(descriptor)
        sync(self._run_dir)
        self._still_mine()

    def close(self) -> None:
        """Closes the segments. Rows are safe without it."""
        for descriptor in self._segments.values():
            os.close(descriptor)
        self._segments.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _append(self, kind: str, row: Row) -> None:
        name = segment_name(kind, self._attempt)
        line = _line(kind, name, {**row, "attempt": self._attempt})
        if row["update"] <= self._last.get(kind, -1):
            raise RecordError(f"{name}: update {row['update']} after update {self._last[kind]}; rows are written once, in order")
        self._still_mine()
        if kind not in self._segments:
            self._segments[kind] = self._create(name)
        self._write(self._segments[kind], line, f"the row of update {row['update']} in {name}")
        self._last[kind] = row["update"]
        self._shown(kind, row)

    def _write(self, segment: int, line: bytes, what: str) -> None:
        """Raises `disk.DiskFull` when the disk has no room for the line; the part of it that had is cut off again."""
        before = os.fstat(segment).st_size
        left = memoryview(line)
        with disk.explained(self._run_dir, what):
            try:
                while left:  # a disk that fills up takes a part, and says why at the next write
                    left = left[os.write(segment, left) :]
            except OSError:
                os.ftruncate(segment, before)
                raise

    def _create(self, name: str) -> int:
        path = self._run_dir / name
        try:
            with disk.explained(path, name):
                return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            raise RecordError(f"{path} exists: attempt {self._attempt} was recorded before; claim the next attempt") from None

    def _write_beside(self, path: Path, text: str) -> Path:
        temporary = path.with_name(f".{path.name}.{self._attempt}.tmp")
        try:
            with disk.explained(temporary, path.name), temporary.open("w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        return temporary


def _line(kind: str, name: str, row: Row) -> bytes:
    columns = {column.name: None for column in KINDS[kind]}
    unknown = [key for key in row if key not in columns and not key.startswith(EXTRA)]
    if unknown:
        raise RecordError(f"{name}: no column {unknown[0]!r} in records/fields.py; add it there, or call it {EXTRA}{unknown[0]}")
    if type(row.get("update")) is not int or row["update"] < 0:
        raise RecordError(f"{name}: update is {row.get('update')!r}; every row has the number of its update, an int from 0")
    complete = {**columns, **row}
    try:
        try:
            text = json.dumps(complete, separators=(",", ":"), allow_nan=False)
        except ValueError:
            text = json.dumps(_spell_non_finite(complete), separators=(",", ":"), allow_nan=False)
    except TypeError:
        culprit, value = next((key, value) for key, value in complete.items() if not _is_plain(value))
        raise RecordError(f"{name}: column {culprit!r} holds a {type(value).__name__}; give plain Python values") from None
    return text.encode("ascii") + b"\n"


def _spell_non_finite(value: Any) -> Any:
    """JSON has no NaN: non-finite floats become the strings that the reader and DuckDB take for numbers."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: _spell_non_finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_spell_non_finite(item) for item in value]
    return value


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (str, int, float))
