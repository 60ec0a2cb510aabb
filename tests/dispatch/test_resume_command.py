"""Which runs ``pth resume`` takes up, wherever they ran before."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
from frozen_sweeps import runs_of

from pth_exp import cli, lifecycle
from pth_exp.launchers.local import LocalPlace
from pth_exp.launchers.place import Job, RunResult
from pth_exp.lifecycle import State, note, state


def _attempt(run_dir: Path, place: str) -> lifecycle.Lease:
    return lifecycle.claim(run_dir, heartbeat_every=5.0, lost_after=60.0, place=place, job_id="17")


def _elsewhere(run_dir: Path, silent_for: float) -> None:
    """An attempt on another machine, whose last sign of life lies so many seconds back."""
    lease = _attempt(run_dir, "ray")
    lease.abandon()
    attempt = dataclasses.asdict(dataclasses.replace(lease.attempt, host="elsewhere"))
    (run_dir / "attempts" / "0001.json").write_text(json.dumps(attempt))
    then = lifecycle.server_time(run_dir) - silent_for
    os.utime(run_dir / "attempts" / lease.attempt.heartbeat, (then, then))


def _preempted(run_dir: Path) -> None:
    _attempt(run_dir, "slurm").end(State.PREEMPTED, "SIGTERM received")


def _failed(run_dir: Path) -> None:
    _attempt(run_dir, "local").end(State.FAILED, "out of ideas")


def _completed(run_dir: Path) -> None:
    _attempt(run_dir, "slurm").end(State.COMPLETED)


def _lost(run_dir: Path) -> None:
    _elsewhere(run_dir, 61)


def _told_as_lost(run_dir: Path) -> None:
    """By a launcher that saw the end of a job on another machine; its heartbeat has aged since."""
    _elsewhere(run_dir, 61)
    note(run_dir, State.LOST, "launcher", "its worker ended by signal 9")


def _running(run_dir: Path) -> None:
    _elsewhere(run_dir, 3)


def _queued(run_dir: Path) -> None:
    note(run_dir, State.QUEUED, "launcher")


@pytest.mark.parametrize(
    ("before", "found", "taken", "taken_as_failed", "code"),
    [
        (_preempted, State.PREEMPTED, True, False, 0),
        (_failed, State.FAILED, True, True, 0),
        (_lost, State.LOST, True, True, 0),
        (_told_as_lost, State.LOST, True, True, 0),
        (_queued, State.QUEUED, True, False, 0),
        (_completed, State.COMPLETED, False, False, 0),
        (_running, State.RUNNING, False, False, 1),
    ],
)
def test_a_run_is_taken_up_by_its_state(
    sweep: Path, monkeypatch: pytest.MonkeyPatch, before: object, found: State, taken: bool, taken_as_failed: bool, code: int
) -> None:
    asked: list[str] = []

    def dispatch(self: LocalPlace, jobs: list[Job]) -> list[RunResult]:
        asked.extend(job.run_dir.name for job in jobs)
        return [RunResult(job.index, job.label, State.COMPLETED, "", "") for job in jobs]

    monkeypatch.setattr(LocalPlace, "dispatch", dispatch)
    first = runs_of(sweep)[0]
    assert callable(before)
    before(first)
    assert state(first)[0] is found
    for failed, expected in ((False, taken), (True, taken_as_failed)):
        asked.clear()
        arguments = ["--failed"] if failed else []
        assert cli.main(["resume", str(sweep), "--only", "0", "--launcher", "pth_local", *arguments]) == (0 if failed else code)
        assert asked == ([first.name] if expected else [])
