"""Frozen sweeps made by ``pth run`` itself, and ways to watch the processes that run them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pth_exp import cli
from pth_exp.launchers.local import LocalPlace
from pth_exp.records.reader import RunRecords

SMALL = ["prompts_per_update=4", "responses_per_prompt=2", "max_response_tokens=8", "stack.checkpoint_every=3"]
SMALL_TASK = ["task.train_problems=64", "task.test_problems=16"]


def freeze_sweep(folder: Path, *overrides: str) -> Path:
    """What ``pth run`` freezes, with a place that starts nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(LocalPlace, "dispatch", lambda self, runs: [])
        cli.main(["run", *SMALL, "validation.every=null", *overrides])
    return (folder / "multirun_outputs" / "latest").resolve()


def runs_of(sweep: Path) -> list[Path]:
    return [sweep / entry["dir"] for entry in json.loads((sweep / "index.json").read_text())["runs"]]


def pth(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pth_exp.cli", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def until(condition: Callable[[], bool], seconds: float = 240.0) -> None:
    """Wait for what other processes do; ``seconds`` only bounds a failing test."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.01)


def alive(pids: Iterable[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def pid_of(run_dir: Path, attempt: int = 1) -> int:
    return int(json.loads((run_dir / "attempts" / f"{attempt:04d}.json").read_text())["pid"])


def updates_done(run_dir: Path) -> int:
    """Whole rows in all segments of a run."""
    return sum(path.read_bytes().count(b"\n") for path in run_dir.glob("updates.*.jsonl"))


def all_reach(runs: Sequence[Path], updates: int) -> Callable[[], bool]:
    return lambda: all(updates_done(run) >= updates for run in runs)


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """A row without how long it took and which attempt wrote it."""
    return {key: value for key, value in row.items() if key != "attempt" and not key.startswith("timing_s/")}


def numbers(run: Path) -> dict[str, Any]:
    """Everything a run recorded but how long it took and which attempt wrote it."""
    records = RunRecords.load(run)
    weights = sorted(path.name for path in (run / "checkpoint").glob("update-*"))[-1]  # the name holds the sha256 of the state
    return {
        "updates": [*map(plain, records.updates)],
        "batches": [*map(plain, records.batches)],
        "evaluations": [*map(plain, records.evaluations)],
        "first batches": records.first_batches,
        "last checkpoint": weights,
    }
