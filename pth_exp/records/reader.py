"""Reading the records of runs and sweeps, of finished and of running ones."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import yaml

from pth_exp import sections

Row = dict[str, Any]

_SPELLED = re.compile(b"NaN|Infinity")
_NON_FINITE = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


class NothingToRead(Exception):
    """There is nothing to read where the user pointed; the message names the path and the remedy."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong with the files: ``kind`` is torn, unreadable, foreign, duplicate, gap or missing."""

    kind: str
    file: str
    message: str
    offset: int | None = None

    def __str__(self) -> str:
        place = self.file if self.offset is None else f"{self.file} at byte {self.offset}"
        return f"{place}: {self.message}"


@dataclass(slots=True)
class RunRecords:
    """One run's directory.

    ``updates``, ``batches``, ``evaluations`` and ``equations`` hold the newest attempt's row of each update, sorted by update.
    ``frozen`` is the frozen file's mapping; ``manifest``, ``received`` and ``first_batches`` are None until written.
    """

    path: Path
    frozen: dict[str, Any]
    manifest: dict[str, Any] | None = None
    received: dict[str, Any] | None = None
    first_batches: list[list[str]] | None = None
    updates: list[Row] = field(default_factory=list)
    batches: list[Row] = field(default_factory=list)
    evaluations: list[Row] = field(default_factory=list)
    equations: list[Row] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    @property
    def config(self) -> dict[str, Any]:
        return self.frozen["config"]  # type: ignore[no-any-return]

    @property
    def label(self) -> str:
        return str(self.frozen["run"]["label"])

    @classmethod
    def load(cls, run_dir: Path, rows: bool = True) -> Self:
        """``rows=False`` reads what a run was to do and what it drew first, the frozen file and the first batches, alone.

        Raises NothingToRead when the directory has no readable ``frozen.yaml``.
        """
        run = cls(run_dir, read_frozen(run_dir))
        run.first_batches = run._content("first_batches.json", json.loads, list)
        if not rows:
            return run
        run.manifest = run._content("manifest.json", json.loads, dict)
        run.received = run.mapping("received.yaml")
        run.updates = run._rows("updates")
        run.batches = run._rows("batches")
        run.evaluations = run._rows("evals")
        run.equations = run._rows("equations")
        run._find_gaps()
        return run

    def mapping(self, name: str) -> dict[str, Any] | None:
        """What a YAML file of the run's directory holds; None without the file, or when it holds no mapping."""
        found: dict[str, Any] | None = self._content(name, sections.load, dict)
        return found

    def column(self, name: str) -> list[Any]:
        """One column of ``updates``, None where not measured."""
        return [row.get(name) for row in self.updates]

    def _content(self, name: str, parse: Callable[[bytes], Any], kind: type) -> Any:
        """What a file holds; None without the file, and, with a problem noted, when it does not hold a ``kind``."""
        path = self.path / name
        if not path.is_file():
            return None
        try:
            content = parse(path.read_bytes())
        except (ValueError, yaml.YAMLError) as error:
            self.problems.append(Problem("unreadable", name, " ".join(str(error).split())))
            return None
        if not isinstance(content, kind):
            self.problems.append(Problem("unreadable", name, f"holds a {type(content).__name__}, not a {kind.__name__}"))
            return None
        return content

    def _rows(self, kind: str) -> list[Row]:
        """The rows of all segments; a later attempt's row replaces an earlier one's."""
        newest: dict[int, Row] = {}
        for path in sorted(self.path.glob(f"{kind}.[0-9]*.jsonl")):
            attempt = int(path.name.split(".")[1])
            seen: set[int] = set()
            for offset, row in self._lines(path):
                key = row.get("update")
                if type(key) is not int:
                    self.problems.append(Problem("unreadable", path.name, "a row without the number of its update", offset))
                    continue
                if row.get("attempt") != attempt:
                    self.problems.append(Problem("foreign", path.name, f"a row of attempt {row.get('attempt')}", offset))
                if key in seen:
                    self.problems.append(Problem("duplicate", path.name, f"update {key} once more; the last is taken", offset))
                seen.add(key)
                newest[key] = row
        return [newest[key] for key in sorted(newest)]

    def _lines(self, path: Path) -> Iterable[tuple[int, Row]]:
        offset, data = 0, path.read_bytes()
        for line in data.split(b"\n"):
            last = offset + len(line) == len(data)
            if line or not last:
                try:
                    row = json.loads(line)
                    if _SPELLED.search(line):
                        row = _finite(row)
                except ValueError:
                    row = None
                if isinstance(row, dict):
                    yield offset, row
                else:
                    kind, message = ("unreadable", "not a row")
                    if last:
                        kind, message = ("torn", "the last line is torn: its row was being written")
                    self.problems.append(Problem(kind, path.name, message, offset))
            offset += len(line) + 1

    def _find_gaps(self) -> None:
        for kind, rows in (("updates", self.updates), ("batches", self.batches)):
            keys = {row["update"] for row in rows}
            # a batch's row is written before its update's: a run killed in between has one row more of them
            end = max((row["update"] for row in self.updates), default=-1)
            missing = [u for u in range(end + 1) if u not in keys]
            if missing:
                self.problems.append(Problem("gap", f"{kind}.*.jsonl", f"no row of update {spans(missing)}"))


@dataclass(slots=True)
class Sweep:
    """A sweep's directory: its index and the records of its runs, in the index's order."""

    path: Path
    index: dict[str, Any]
    runs: list[RunRecords]
    problems: list[Problem] = field(default_factory=list)

    @classmethod
    def load(cls, path: Path | None = None, rows: bool = True) -> Self:
        """Reads a sweep's directory, an experiment's (its latest sweep), or, for None, the latest of ``multirun_outputs``.

        ``rows`` as in `RunRecords.load`.

        Raises NothingToRead when there is no sweep.
        """
        directory = find_sweep(path)
        index = read_index(directory)
        sweep = cls(directory, index, [])
        for entry in index["runs"]:
            try:
                sweep.runs.append(RunRecords.load(directory / entry["dir"], rows))
            except NothingToRead as error:
                sweep.problems.append(Problem("missing", entry["dir"], f"{entry['label']}: {error}"))
        return sweep


def find_sweep(path: Path | None) -> Path:
    """The directory with ``index.json`` that ``path`` means; raises NothingToRead naming the remedy."""
    start = path or Path("multirun_outputs")
    for candidate in (start, start / "latest"):
        if (candidate / "index.json").is_file():
            return candidate.resolve()
    if (start / "frozen.yaml").is_file():
        raise NothingToRead(f"{start} is one run; give its sweep: {start.parent}")
    raise NothingToRead(f"{start}: no sweep here (no index.json, no latest); give a sweep's directory, or start one with pth run")


def read_index(sweep: Path) -> dict[str, Any]:
    """A sweep's ``index.json``; raises NothingToRead when it is not one."""
    path = sweep / "index.json"
    try:
        index = json.loads(path.read_bytes())
    except ValueError as error:
        raise NothingToRead(f"{path} is not JSON: {error}; was the sweep's launch killed, or the disk full?") from None
    if not (isinstance(index, dict) and "runs" in index):
        raise NothingToRead(f"{path} is not the index of a sweep: it holds no runs")
    return index


def read_frozen(run_dir: Path) -> dict[str, Any]:
    """A run's frozen file as a mapping, not verified; raises NothingToRead when it is not there or is none."""
    path = run_dir / "frozen.yaml"
    if not path.is_file():
        raise NothingToRead(f"{run_dir} has no frozen.yaml; give the directory of a run")
    content = read_yaml(path)
    if not (isinstance(content, dict) and {"run", "config"} <= set(content)):
        raise NothingToRead(f"{path} is not a frozen run: it holds no run and config")
    return content


def read_yaml(path: Path) -> Any:
    """A YAML file's content; raises NothingToRead naming the file when it does not parse."""
    try:
        return sections.load(path.read_bytes())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise NothingToRead(f"{path} is not YAML: {' '.join(str(error).split())}") from None


def spans(numbers: Iterable[int]) -> str:
    """Sorted numbers as ``3, 5-8``."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _finite(value: Any) -> Any:
    """Turns the spelled non-finite numbers back into floats."""
    if isinstance(value, str):
        return _NON_FINITE.get(value, value)
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return value
