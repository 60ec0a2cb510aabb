"""The local place, its slots and its progress, with workers that take no time."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from frozen_sweeps import alive, runs_of, until
from hypothesis import given
from hypothesis import strategies as st

from pth_exp import freeze, machine
from pth_exp.exits import HELD
from pth_exp.launchers import place
from pth_exp.launchers.local import LocalPlace
from pth_exp.launchers.place import Job, RunResult, conclude, exit_text
from pth_exp.launchers.progress import PlainProgress, Tail, duration
from pth_exp.launchers.slots import GIB, Running, Slots, held
from pth_exp.lifecycle import State, claim, history, note, state
from pth_exp.refusal import Refusal

WORKER = Path(__file__).with_name("instant_worker.py")


@pytest.fixture
def jobs(sweep: Path, monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    monkeypatch.setattr(place, "WORKER", (str(WORKER),))
    return [Job.of(freeze.load(run / "frozen.yaml")) for run in runs_of(sweep)]


def _told(job: Job, deed: str) -> Job:
    return dataclasses.replace(job, environment={"PTH_TEST_DEED": deed})


def test_a_job_says_what_was_frozen(jobs: list[Job]) -> None:
    first = jobs[0]
    assert (first.index, first.label, first.updates, first.threads, first.device) == (0, "grpo·seed=1", 12, 1, "auto")
    environment = dataclasses.replace(first, threads=3, environment={"MKL_NUM_THREADS": "2"}).process_environment("local")
    assert environment["OMP_NUM_THREADS"] == "3" and environment["MKL_NUM_THREADS"] == "2"
    assert environment["MALLOC_TRIM_THRESHOLD_"] == str(2**30) and environment["PTH_PLACE"] == "local"


def test_each_end_is_told_and_none_stops_the_others(jobs: list[Job], sweep: Path) -> None:
    deeds = ["kill", "complete", "raise"]
    shown = io.StringIO()
    results = LocalPlace(3, stream=shown).dispatch([_told(job, deed) for job, deed in zip(jobs, deeds, strict=True)])
    assert [result.state for result in results] == [State.LOST, State.COMPLETED, State.FAILED]
    assert "signal 9 (SIGKILL)" in results[0].message and "memory" in results[0].message
    assert results[2].message == "the cat ate it" and results[2].log_tail.splitlines()[-1] == "last words of grpo·seed=3"
    assert [state(job.run_dir)[0] for job in jobs] == [State.LOST, State.COMPLETED, State.FAILED]
    assert [row["state"] for row in history(jobs[0].run_dir)] == ["FROZEN", "QUEUED", "RUNNING", "LOST"]
    assert history(jobs[0].run_dir)[-1]["by"].startswith("launcher ")
    told = io.StringIO()
    assert conclude(results, sweep, told) == 1
    assert "[0] grpo·seed=1: LOST: its worker ended by signal 9" in told.getvalue()
    assert "    | last words of grpo·seed=3\n" in told.getvalue() and "seed=2" not in told.getvalue()
    assert "3 runs: 1 completed, 1 failed, 1 lost" in told.getvalue() and f"pth resume {sweep}" in told.getvalue()
    lines = shown.getvalue().splitlines()
    assert sum("started" in line for line in lines) == 3
    assert any(line.startswith("[1] grpo·seed=2  completed at update 12/12") for line in lines)


def test_a_sweep_whose_runs_all_complete_ends_with_zero(jobs: list[Job], sweep: Path) -> None:
    results = LocalPlace(stream=io.StringIO()).dispatch([_told(job, "complete") for job in jobs])
    assert conclude(results, sweep, io.StringIO()) == 0


def test_a_worker_that_never_took_its_run_failed(jobs: list[Job]) -> None:
    (result,) = LocalPlace(stream=io.StringIO()).dispatch([_told(jobs[0], "refuse")])
    assert (result.state, result.message) == (State.FAILED, "refused: not today")
    assert state(jobs[0].run_dir) == (State.FAILED, "refused: not today")


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("signal 15 (SIGTERM)", State.PREEMPTED),  # stopped by its launcher before it could hear that
        ("signal 9 (SIGKILL)", State.LOST),
        ("exit code 1", State.FAILED),
    ],
)
def test_a_worker_that_ended_before_it_began(jobs: list[Job], how: str, told: State) -> None:
    note(jobs[0].run_dir, State.QUEUED, "launcher")
    result = place.outcome(jobs[0], how)
    assert result.state is told and result.message.startswith(f"its worker ended by {how} before it began")
    assert state(jobs[0].run_dir) == (told, result.message)


def test_a_run_that_another_s_worker_has_is_told_as_running(jobs: list[Job]) -> None:
    lease = claim(jobs[0].run_dir, heartbeat_every=5.0, lost_after=60.0, place="elsewhere", job_id=None)
    result = place.outcome(jobs[0], exit_text(HELD))
    assert result.state is State.RUNNING and result.message.startswith("another worker has it: attempt 1 on ")
    lease.end(State.FAILED, "it had to be")
    assert state(jobs[0].run_dir) == (State.FAILED, "it had to be")


def test_a_run_whose_directory_cannot_be_written_fails_alone(jobs: list[Job]) -> None:
    (jobs[0].run_dir / "log.txt").mkdir()
    results = LocalPlace(1, stream=io.StringIO()).dispatch([_told(job, "complete") for job in jobs])
    assert [result.state for result in results] == [State.FAILED, State.COMPLETED, State.COMPLETED]
    assert "could not be started" in results[0].message


@pytest.mark.parametrize("slots", [1, 2])
def test_no_more_runs_at_a_time_than_slots(jobs: list[Job], slots: int) -> None:
    results = LocalPlace(slots, stream=io.StringIO()).dispatch([_told(job, "complete") for job in jobs])
    assert all(result.state is State.COMPLETED for result in results)
    times = []
    for job in jobs:
        rows = [row for row in history(job.run_dir) if row["state"] in ("RUNNING", "COMPLETED")]
        times += [(rows[0]["at"], 1), (rows[1]["at"], -1)]
    at_once, most = 0, 0
    for _, change in sorted(times):
        at_once += change
        most = max(most, at_once)
    assert most <= slots


def test_interrupts_stop_then_kill(jobs: list[Job]) -> None:
    """As Ctrl-C does: the first asks, and nothing more is started; the second kills what does not obey."""
    shown, pids = io.StringIO(), list[int]()

    def interrupt() -> None:
        for job in jobs[:2]:
            until((job.run_dir / "ready").exists)
            pids.append(int((job.run_dir / "ready").read_text()))
        os.kill(os.getpid(), signal.SIGINT)
        until((jobs[1].run_dir / "asked").exists)
        until(lambda: state(jobs[0].run_dir)[0] is State.PREEMPTED)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    before = signal.getsignal(signal.SIGINT)
    told = [_told(jobs[0], "wait"), _told(jobs[1], "defy"), _told(jobs[2], "complete")]
    results = LocalPlace(2, stream=shown).dispatch(told)
    thread.join()
    assert [result.state for result in results] == [State.PREEMPTED, State.LOST, State.QUEUED]
    assert state(jobs[2].run_dir)[0] is State.QUEUED
    assert "SIGINT: 2 runs to checkpoint" in shown.getvalue()
    assert re.search(r"SIGINT again: \d runs? killed", shown.getvalue())
    assert not alive(pids) and signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(("slots", "memory", "field"), [(0, None, "slots=0"), (None, -1.0, "memory_per_run_gb=-1.0")])
def test_impossible_room_is_refused(slots: int | None, memory: float | None, field: str) -> None:
    with pytest.raises(Refusal, match=field):
        LocalPlace(slots, memory)


# ---------------------------------------------------------------------------------------------------------------- slots


def _job(index: int, threads: int = 1, device: str = "auto") -> Job:
    return Job(index, f"run {index}", Path("r"), Path("r/frozen.yaml"), "0", threads=threads, device=device)


def _filled(slots: Slots, waiting: Sequence[Job], most: int = 50) -> list[Running]:
    """Start whatever there is room for, as the local place does."""
    left, running = list(waiting), list[Running]()
    while (job := slots.next(left, running)) is not None and len(running) < most:
        left.remove(job)
        running.append(Running(job, 1000 + job.index, slots.gpu_for(job, running)))
    return running


@pytest.fixture
def big_machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """A machine of 8 cores, 64 GiB and no GPU, whose numbers a test may change."""
    facts: dict[str, float] = {"cores": 8, "memory": 64 * GIB, "resident": 0, "gpus": 0}
    monkeypatch.setattr(machine, "cores", lambda: int(facts["cores"]))
    monkeypatch.setattr(machine, "available_memory", lambda: int(facts["memory"]))
    monkeypatch.setattr(machine, "held_memory", lambda pids: int(facts["resident"]))
    monkeypatch.setattr(machine, "visible_gpus", lambda: [f"GPU-{i}" for i in range(int(facts["gpus"]))])
    return facts


def test_a_run_takes_its_threads_of_the_cores(big_machine: dict[str, float]) -> None:
    assert len(_filled(Slots(None, None), [_job(i) for i in range(20)])) == 8
    assert len(_filled(Slots(None, None), [_job(i, threads=3) for i in range(20)])) == 2
    assert len(_filled(Slots(None, None), [_job(i, threads=99) for i in range(20)])) == 1
    assert len(_filled(Slots(12, None), [_job(i) for i in range(20)])) == 12


def test_one_run_a_gpu(big_machine: dict[str, float]) -> None:
    big_machine["gpus"] = 2
    assert [run.gpu for run in _filled(Slots(None, None), [_job(i) for i in range(9)])] == ["GPU-0", "GPU-1"]
    assert [run.gpu for run in _filled(Slots(4, None), [_job(i) for i in range(9)])] == ["GPU-0", "GPU-1"] * 2
    mixed = [_job(0, device="cuda:1"), _job(1, device="cuda:1"), _job(2, device="cuda"), _job(3, device="cpu")]
    assert [(run.job.index, run.gpu) for run in _filled(Slots(None, None), mixed)] == [(0, "GPU-1"), (2, "GPU-0"), (3, None)]


def test_nothing_runs_beside_a_verl_job_which_sees_all_gpus(big_machine: dict[str, float]) -> None:
    verl = [dataclasses.replace(_job(i), stack="verl") for i in range(3)]
    assert [(run.job.index, run.gpu) for run in _filled(Slots(None, None), verl)] == [(0, None)]
    mixed = [_job(9), *verl, _job(10)]
    assert [run.job.index for run in _filled(Slots(None, None), mixed)] == [9, 10], "those of the trainer go on meanwhile"
    assert [run.job.index for run in _filled(Slots(None, None), [*verl, *mixed])] == [0]


def test_a_stack_has_its_own_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.touch()
    assert _job(0).command()[0] == sys.executable
    assert dataclasses.replace(_job(0), stack="verl", python=str(python)).command()[0] == str(python)
    monkeypatch.setenv("PTH_VERL_PYTHON", str(tmp_path / "gone"))
    with pytest.raises(OSError, match=r"gone; install it with `make verl`"):
        dataclasses.replace(_job(0), stack="verl").command()


def test_a_run_without_its_interpreter_fails_and_says_how_to_get_it(jobs: list[Job], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PTH_VERL_PYTHON", "/nowhere/python")
    told = [dataclasses.replace(jobs[0], stack="verl"), _told(jobs[1], "complete")]
    results = LocalPlace(stream=io.StringIO()).dispatch(told)
    assert [result.state for result in results] == [State.FAILED, State.COMPLETED]
    assert "make verl" in results[0].message and "/nowhere/python" in results[0].message


def test_memory_bounds_the_runs(big_machine: dict[str, float]) -> None:
    jobs = [_job(i) for i in range(20)]
    assert len(_filled(Slots(None, 20 * GIB), jobs)) == 3  # 64 GiB hold three runs of 20
    assert len(_filled(Slots(None, 500 * GIB), jobs)) == 1  # one always runs
    slots = Slots(None, None)
    big_machine["resident"] = 30 * GIB
    slots.watch([Running(jobs[0], 1, None)])
    big_machine.update(memory=34 * GIB)  # the first run holds 30 of 64
    assert slots.next(jobs[1:], [Running(jobs[0], 1, None)]) is jobs[1]
    big_machine.update(memory=29 * GIB)
    assert slots.next(jobs[1:], [Running(jobs[0], 1, None)]) is None


def test_what_one_stack_holds_says_nothing_of_another(big_machine: dict[str, float]) -> None:
    slots, verl = Slots(None, None), dataclasses.replace(_job(0), stack="verl")
    big_machine["resident"] = 40 * GIB
    slots.watch([Running(verl, 1, None)])
    big_machine.update(resident=0, memory=9 * GIB)
    assert len(_filled(slots, [_job(i) for i in range(5)])) == 5
    assert "needs about 40.0 GiB" in str(slots.shortage(verl))


def test_a_verl_job_that_starts_short_of_memory_says_so_and_starts(big_machine: dict[str, float]) -> None:
    verl = dataclasses.replace(_job(0), stack="verl", memory=6 * GIB)
    big_machine["memory"] = 6 * GIB
    assert Slots(None, None).shortage(verl) is None
    big_machine["memory"] = 3.5 * GIB
    said = Slots(None, None).shortage(verl)
    assert said is not None and "needs about 6.0 GiB of memory, and 3.5 are available; it starts all the same" in said
    assert Slots(None, None).next([verl], []) is verl
    assert Slots(None, 2 * GIB).shortage(verl) is None, "memory_per_run_gb is the user's word"


def test_the_warning_is_shown_and_the_run_runs(
    jobs: list[Job], big_machine: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PTH_VERL_PYTHON", sys.executable)
    big_machine["memory"] = 3 * GIB
    shown = io.StringIO()
    told = dataclasses.replace(_told(jobs[0], "complete"), stack="verl", memory=6 * GIB)
    (result,) = LocalPlace(stream=shown).dispatch([told])
    assert result.state is State.COMPLETED
    assert "[0] grpo·seed=1  needs about 6.0 GiB of memory, and 3.0 are available" in shown.getvalue()


MIB = 1 << 20
FAMILY = """
import mmap, os, sys, time
shared = mmap.mmap(-1, int(sys.argv[2]) << 20)
shared[:] = b"x" * len(shared)
if os.fork() == 0:
    shared[:] = b"y" * len(shared)
    os.setsid()
    if os.fork() > 0:
        os._exit(0)  # the grandchild is nobody's child now, as Ray's processes are
taken = b"x" * (int(sys.argv[1]) << 20)  # each has its own
print(os.getpid(), flush=True)
sys.stdin.readline()
"""


def test_memory_is_that_of_all_processes_daemons_included_and_shared_pages_count_once() -> None:
    frozen = Path("r/frozen.yaml").absolute()
    environment = {**os.environ, "PTH_FROZEN": str(frozen)}
    command = [sys.executable, "-c", FAMILY, "60", "80"]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        pids = {int(process.stdout.readline()) for _ in range(2)}
        found, tree = machine.carrying("PTH_FROZEN", str(frozen)), machine.descendants(process.pid)
        alone = machine.held_memory({process.pid})
        together = held(Running(dataclasses.replace(_job(0), stack="verl"), process.pid, None))
        process.stdin.write("\n")
        process.stdin.close()
        (daemon,) = pids - {process.pid}
        os.kill(daemon, signal.SIGKILL)
    assert pids <= found and daemon not in tree
    assert alone >= 140 * MIB and alone + 60 * MIB <= together < alone + 130 * MIB, (alone, together)
    assert machine.held_memory({process.pid}) == 0, "gone"


# ------------------------------------------------------------------------------------------------------------- progress


def _row(update: int) -> bytes:
    return json.dumps({"update": update, "reward/trained": 0.5, "rollout_corr/kl": 0.00123}).encode() + b"\n"


def test_progress_is_read_from_whole_rows(tmp_path: Path) -> None:
    tail = Tail(dataclasses.replace(_job(0), run_dir=tmp_path, updates=10))
    assert not tail.read() and tail.text() == {"update": "0/10", "reward": "-", "KL": "-", "left": "-"}
    segment = tmp_path / "updates.0001.jsonl"
    segment.write_bytes(_row(0) + _row(1)[:7])
    assert tail.read() and tail.done == 1 and tail.seconds_left() is None
    assert not tail.read()
    with segment.open("ab") as file:
        file.write(_row(1)[7:])
    assert tail.read()
    assert tail.text() | {"left": ""} == {"update": "2/10", "reward": "0.500", "KL": "1.23e-03", "left": ""}
    assert tail.seconds_left() is not None
    (tmp_path / "updates.0002.jsonl").write_bytes(_row(1))  # a resumed run repeats an update
    assert tail.read() and tail.done == 2 and tail.seconds_left() is None


def test_plain_lines_come_at_every_tenth(tmp_path: Path) -> None:
    job = dataclasses.replace(_job(7), run_dir=tmp_path, updates=100)
    shown = io.StringIO()
    with PlainProgress(shown) as plain:
        plain.start(job)
        for update in range(100):
            with (tmp_path / "updates.0001.jsonl").open("ab") as file:
                file.write(_row(update))
            plain.refresh()
        plain.end(job, RunResult(7, job.label, State.COMPLETED, "", ""))
    lines = shown.getvalue().splitlines()
    assert len(lines) == 11
    assert [line.split()[4] for line in lines[1:-1]] == [f"{tenth}0/100" for tenth in range(1, 10)]


@given(st.integers(0, 10**6))
def test_a_duration_reads_back(seconds: int) -> None:
    text = duration(seconds)
    units = {"h": 3600, "m": 60, "s": 1}
    total, number = 0, ""
    for character in text:
        if character.isdigit():
            number += character
        else:
            total, number = total + int(number) * units[character], ""
    assert total == (seconds if seconds < 3600 else seconds // 60 * 60)


def test_notes_of_the_launcher_survive(sweep: Path) -> None:
    run = runs_of(sweep)[0]
    note(run, State.QUEUED, "launcher")
    assert [row["state"] for row in history(run)] == ["FROZEN", "QUEUED"]
