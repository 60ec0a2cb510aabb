"""Workers that are suspended and woken, killed at any instant, and rivals for one directory: nothing is lost or doubled.

``kills.py`` and ``races.py`` are the whole of it; here they run for a short time.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from frozen_sweeps import SMALL, SMALL_TASK, all_reach, pid_of, pth, runs_of, until

from pth_exp.lifecycle import State, history, state
from pth_exp.records.reader import RunRecords

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
SHORT_LEASE = ["lease.heartbeat_every=0.2", "lease.lost_after=2"]


def test_a_worker_that_wakes_after_its_run_was_taken_over_changes_nothing(tmp_path: Path) -> None:
    command = [
        *SMALL,
        *SMALL_TASK,
        *SHORT_LEASE,
        "arm=san",
        "seed=1",
        "updates=18",
        "validation.every=6",
        "validation.problems=8",
    ]
    launcher = subprocess.Popen([sys.executable, "-P", "-m", "pth_exp.cli", "run", *command], cwd=tmp_path)
    latest = tmp_path / "multirun_outputs" / "latest"
    until(lambda: (latest / "index.json").exists())
    (run,) = runs_of(latest.resolve())
    until(all_reach([run], 4))
    first = pid_of(run)
    os.kill(first, signal.SIGSTOP)
    try:
        until(lambda: state(run)[0] is State.LOST)
        resumed = pth("resume", cwd=tmp_path)
        assert resumed.returncode == 0, resumed.stdout + resumed.stderr
        assert (
            f"took over from attempt 1 on {os.uname().nodename}, pid {first}: its heartbeat is" in (run / "log.txt").read_text()
        )
        before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "log.txt"}
    finally:
        os.kill(first, signal.SIGCONT)
    assert launcher.wait() == 0, "its run is completed, by whomever"
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "log.txt"} == before
    assert "attempt 1 was taken over by attempt 2" in (run / "log.txt").read_text()
    records = RunRecords.load(run)
    assert [row["update"] for row in records.updates] == list(range(18)) and not records.problems
    assert [row["state"] for row in history(run)] == ["FROZEN", "QUEUED", "RUNNING", "QUEUED", "LOST", "RUNNING", "COMPLETED"]


def _script(name: str, *arguments: str) -> str:
    command = [sys.executable, str(HERE / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_sweep_killed_at_random_instants_ends_as_if_it_had_been_left_alone(tmp_path: Path) -> None:
    said = _script("kills.py", "--kills", "8", "--forks-only", "--folder", str(tmp_path / "kills"))
    assert "\n8 kills (" in said and said.endswith("no row is lost or repeated\n"), said


def test_of_two_launchers_and_two_workers_one_wins_each_time() -> None:
    assert _script("races.py", "--races", "4").startswith("4 races of two launchers")
