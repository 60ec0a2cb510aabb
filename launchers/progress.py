"""Progress of running runs, read from their records: one live line a run in a terminal, plain lines when piped."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from pth_exp.launchers.place import Job, RunResult
from pth_exp.lifecycle import State
from pth_exp.report.text import duration

_TENTHS = 10


class Tail:
    """The newest row of a run's ``updates`` segments, read as it grows."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.row: dict[str, Any] | None = None
        self._path: Path | None = None
        self._offset = 0
        self._first: tuple[float, int] | None = None

    def read(self) -> bool:
        """Look for news; true when there are any."""
        segments = sorted(self.job.run_dir.glob("updates.[0-9]*.jsonl"))
        if not segments:
            return False
        if segments[-1] != self._path:
            self._path, self._offset, self._first = segments[-1], 0, None
        with self._path.open("rb") as file:
            file.seek(self._offset)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        if not whole:
            return False
        self._offset += len(whole)
        row: dict[str, Any] = json.loads(whole.splitlines()[-1])
        self.row = row
        if self._first is None:
            self._first = time.monotonic(), row["update"]
        return True

    @property
    def done(self) -> int:
        return 0 if self.row is None else int(self.row["update"]) + 1

    def seconds_left(self) -> float | None:
        """Estimated from this attempt's pace; ``None`` before its second row."""
        if self._first is None or self.row is None or self.job.updates is None or self.done - 1 == self._first[1]:
            return None
        started, first = self._first
        pace = (time.monotonic() - started) / (self.done - 1 - first)
        return pace * (self.job.updates - self.done)

    def text(self) -> dict[str, str]:
        """Column to text; a dash where nothing was measured."""
        row, left = self.row or {}, self.seconds_left()
        return {
            "update": f"{self.done}/{self.job.updates if self.job.updates is not None else '?'}",
            "reward": _number(row.get("reward/trained"), ".3f"),
            "KL": _number(row.get("rollout_corr/kl"), ".2e"),
            "left": "-" if left is None else duration(left),
        }


class PlainProgress:
    """One line when a run starts, at about every tenth of its updates, and when it ends."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._running: dict[int, Tail] = {}
        self._said: dict[int, int] = {}
        self._started: dict[int, float] = {}

    def __enter__(self) -> PlainProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.flush()

    def start(self, job: Job) -> None:
        self._running[job.index], self._said[job.index] = Tail(job), 0
        self._started[job.index] = time.monotonic()
        self._say(job, "started")

    def refresh(self) -> None:
        for index, tail in self._running.items():
            if not tail.read() or not tail.job.updates:
                continue
            tenth = tail.done * _TENTHS // tail.job.updates
            if self._said[index] < tenth < _TENTHS:
                self._said[index] = tenth
                self._say(tail.job, "  ".join(f"{name} {text}" for name, text in tail.text().items()))

    def end(self, job: Job, result: RunResult) -> None:
        tail = self._running.pop(job.index)
        tail.read()
        took = duration(time.monotonic() - self._started[job.index])
        why = "" if result.state is State.COMPLETED else f": {result.message}"
        self._say(job, f"{result.state.lower()} at update {tail.text()['update']} after {took}{why}")

    def message(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def _say(self, job: Job, text: str) -> None:
        self.message(f"[{job.index}] {job.label}  {text}")


class LiveProgress:
    """A table that redraws itself: the running runs, and how many wait and have ended. Ends are printed above it."""

    def __init__(self, jobs: Sequence[Job], stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._total = len(jobs)
        self._running: dict[int, Tail] = {}
        self._ended: dict[State, int] = {}
        self._console = Console(file=stream)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)

    def __enter__(self) -> LiveProgress:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def start(self, job: Job) -> None:
        self._running[job.index] = Tail(job)
        self.refresh()

    def refresh(self) -> None:
        for tail in self._running.values():
            tail.read()
        self._live.update(self._table(), refresh=True)

    def end(self, job: Job, result: RunResult) -> None:
        tail = self._running.pop(job.index)
        tail.read()
        self._ended[result.state] = self._ended.get(result.state, 0) + 1
        columns = "  ".join(f"{name} {text}" for name, text in tail.text().items() if name != "left")
        why = "" if result.state is State.COMPLETED else f": {result.message}"
        self.message(f"[{job.index}] {job.label}  {result.state.lower()}  {columns}{why}")
        self.refresh()

    def message(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _table(self) -> Any:
        from rich.table import Table
        from rich.text import Text

        waiting = self._total - len(self._running) - sum(self._ended.values())
        ended = "".join(f", {count} {state.lower()}" for state, count in self._ended.items())
        table = Table(box=None, title=f"{len(self._running)} running, {waiting} waiting{ended}", title_justify="left")
        for name in ("run", "update", "reward", "KL", "left"):
            table.add_column(name, justify="left" if name == "run" else "right", no_wrap=True)
        for tail in self._running.values():
            table.add_row(Text(f"[{tail.job.index}] {tail.job.label}"), *tail.text().values())
        return table


Progress = PlainProgress | LiveProgress


def progress(jobs: Sequence[Job], stream: TextIO) -> Progress:
    """Live lines where ``stream`` is a terminal, plain ones otherwise."""
    return LiveProgress(jobs, stream) if stream.isatty() else PlainProgress(stream)


def _number(value: Any, form: str) -> str:
    return "-" if value is None else format(float(value), form)
