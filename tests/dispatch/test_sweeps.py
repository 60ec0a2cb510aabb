"""Sweeps of real training through ``pth run`` and ``pth resume``: killed, interrupted, abandoned, and gone on with."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pexpect
import pytest
from frozen_sweeps import SMALL, SMALL_TASK, alive, all_reach, numbers, pid_of, pth, runs_of, until

from pth_exp.lifecycle import State, history, state
from pth_exp.records.reader import RunRecords

pytestmark = pytest.mark.slow

COMMAND = ["-P", "-m", "pth_exp.cli", "run", *SMALL, *SMALL_TASK, "validation.every=6", "validation.problems=8"]
ENDLESS = "updates=100000"


def _start(folder: Path, *overrides: str) -> subprocess.Popen[str]:
    """``pth run`` in the background, in a session of its own."""
    return subprocess.Popen(
        [sys.executable, *COMMAND, *overrides],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _sweep(folder: Path) -> Path:
    latest = folder / "multirun_outputs" / "latest"
    until(lambda: (latest / "index.json").exists(), seconds=60)
    return latest.resolve()


def test_a_killed_run_stops_no_other_and_resumes_to_the_same_numbers(tmp_path: Path) -> None:
    overrides = ["arm=san", "updates=24", "refresh_interval=4", "replay_age=3"]
    launcher = _start(tmp_path, *overrides, "seed=1,2", "hydra.launcher.slots=2")
    victim, other = runs_of(_sweep(tmp_path))
    until(all_reach([victim], 8))
    os.kill(pid_of(victim), signal.SIGKILL)
    out, err = launcher.communicate()
    assert launcher.returncode == 1, err
    assert [state(run)[0] for run in (victim, other)] == [State.LOST, State.COMPLETED]
    assert "LOST: its worker ended by signal 9 (SIGKILL)" in err and "1 completed, 1 lost" in err
    assert "[1] san·seed=2  completed at update 24/24" in out

    resumed = pth("resume", "--failed", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr + resumed.stdout
    assert "seed=2" not in resumed.stdout  # the completed run is left alone
    assert [row["state"] for row in history(victim)] == [
        "FROZEN",
        "QUEUED",
        "RUNNING",
        "LOST",
        "QUEUED",
        "LOST",
        "RUNNING",
        "COMPLETED",
    ]
    records = RunRecords.load(victim)
    assert [row["update"] for row in records.updates] == list(range(24))
    assert {row["attempt"] for row in records.updates} == {1, 2}
    assert {problem.kind for problem in records.problems} <= {"torn"}

    whole = pth("run", *COMMAND[4:], *overrides, "seed=1", cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    (uninterrupted,) = runs_of(_sweep(tmp_path))
    assert numbers(victim) == numbers(uninterrupted)

    again = pth("resume", victim.parent, cwd=tmp_path)
    assert again.returncode == 0 and again.stdout.startswith("nothing to resume in ")


def test_control_c_in_a_terminal_stops_at_an_update_and_resumes(tmp_path: Path) -> None:
    command = [*COMMAND, "arm=grpo", "seed=1,2,3", ENDLESS, "hydra.launcher.slots=2"]
    terminal = pexpect.spawn(sys.executable, command, cwd=str(tmp_path), encoding="utf-8", dimensions=(40, 140), timeout=240)
    terminal.expect("2 running, 1 waiting")
    first, second, third = runs_of(_sweep(tmp_path))
    until(all_reach([first, second], 9))
    workers = [pid_of(first), pid_of(second)]
    terminal.sendintr()
    terminal.expect("SIGINT: 2 runs to checkpoint at the next update")
    terminal.expect("3 runs: 1 queued, 2 preempted")
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 1
    assert not alive(workers)
    assert [state(run)[0] for run in (first, second, third)] == [State.PREEMPTED, State.PREEMPTED, State.QUEUED]
    for run in (first, second):
        records = RunRecords.load(run)
        assert not records.problems and records.first_batches and len(records.updates) >= 9
        assert list((run / "checkpoint").glob(f"update-{len(records.updates):08d}-*"))
    told = json.loads(pth("status", "--json", cwd=tmp_path).stdout)
    assert [run["state"] for run in told["runs"]] == ["PREEMPTED", "PREEMPTED", "QUEUED"]
    assert told["runs"][0]["update"] + 1 == len(RunRecords.load(first).updates)


def test_no_worker_outlives_a_killed_launcher(tmp_path: Path) -> None:
    launcher = _start(tmp_path, "arm=grpo", "seed=1", ENDLESS)
    (run,) = runs_of(_sweep(tmp_path))
    until(all_reach([run], 2))
    worker = pid_of(run)
    launcher.kill()
    launcher.wait()
    until(lambda: not alive([worker]))
    assert state(run) == (State.PREEMPTED, f"the launcher, pid {launcher.pid}, is gone")
    assert not RunRecords.load(run).problems


def test_what_cannot_be_resumed_is_named(sweep: Path, tmp_path: Path) -> None:
    unknown = pth("resume", sweep, "--only", "nobody", cwd=tmp_path)
    assert unknown.returncode == 2 and "--only nobody: no run of this sweep" in unknown.stderr and "grpo·seed=3" in unknown.stderr
    nowhere = pth("resume", tmp_path / "nowhere", cwd=tmp_path)
    assert nowhere.returncode == 2 and "no sweep here" in nowhere.stderr
    first = runs_of(sweep)[0]
    was = (first / "frozen.sha256").read_text().strip()
    (first / "frozen.yaml").write_text((first / "frozen.yaml").read_text().replace("updates: 12", "updates: 13"))
    edited = pth("resume", sweep, "--only", "0", cwd=tmp_path)
    assert edited.returncode == 1 and f"was frozen with sha256 {was}, now has " in edited.stderr
    assert "Traceback" not in unknown.stderr + nowhere.stderr + edited.stderr
