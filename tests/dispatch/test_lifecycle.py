"""States and the lease: one owner at a time, whatever is killed, suspended or raced."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import re
import signal
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pth_exp import lifecycle, machine
from pth_exp.lifecycle import AlreadyCompleted, LeaseHeld, LeaseLost, State, claim, note, state, status
from pth_exp.records.reader import RunRecords
from pth_exp.records.writer import RunRecorder

FORK: Any = multiprocessing.get_context("fork")
NEVER = 3600.0


def _take(run_dir: Path, lost_after: float = NEVER) -> lifecycle.Lease:
    return claim(run_dir, heartbeat_every=min(0.05, lost_after / 5), lost_after=lost_after, place="local", job_id=None)


def _until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "condition did not come true"
        time.sleep(0.01)


def _owner(run_dir: Path, lost_after: float, line: Connection, start: Any) -> None:
    """A process that claims the run and then writes a row for each update it is told."""
    if start is not None:
        start.wait()
    try:
        lease = _take(run_dir, lost_after)
    except lifecycle.LifecycleError as refusal:
        line.send((type(refusal).__name__, str(refusal)))
        return
    line.send(("claimed", lease.attempt.attempt))
    recorder = RunRecorder(run_dir, lease.attempt.attempt, lease.check)
    while (order := line.recv()) is not None:
        try:
            if isinstance(order, State):
                lease.end(order)
            else:
                recorder.update({"update": order})
            line.send(("done", order))
        except LeaseLost as lost:
            line.send(("LeaseLost", str(lost)))


class Owner:
    def __init__(self, run_dir: Path, lost_after: float = NEVER, start: Any = None) -> None:
        self.line, theirs = FORK.Pipe()
        self.process: BaseProcess = FORK.Process(target=_owner, args=(run_dir, lost_after, theirs, start))
        self.process.start()
        theirs.close()

    def answer(self) -> tuple[str, Any]:
        assert self.line.poll(20)
        answer: tuple[str, Any] = self.line.recv()
        return answer

    def ask(self, order: Any) -> tuple[str, Any]:
        self.line.send(order)
        return self.answer()

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


@pytest.fixture
def owner() -> Iterator[Callable[..., Owner]]:
    started: list[Owner] = []

    def start(*args: Any) -> Owner:
        started.append(Owner(*args))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.join()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "frozen.yaml").write_text("config: {}\nrun: {label: a}\n")
    return tmp_path


def test_states_follow_each_other_and_say_who(run_dir: Path) -> None:
    assert state(run_dir)[0] == State.FROZEN
    note(run_dir, State.FROZEN, "launcher")
    note(run_dir, State.QUEUED, "launcher")
    assert state(run_dir)[0] == State.QUEUED
    lease = _take(run_dir)
    assert state(run_dir)[0] == State.RUNNING
    lease.end(State.FAILED, "learner/loss is NaN at update 3")
    assert state(run_dir) == (State.FAILED, "learner/loss is NaN at update 3")
    note(run_dir, State.QUEUED, "launcher")
    assert state(run_dir)[0] == State.QUEUED
    lease = _take(run_dir)
    lease.describe({"config_id": "abc"})
    lease.end(State.COMPLETED)
    note(run_dir, State.QUEUED, "launcher")  # cannot hide that it is done
    assert state(run_dir)[0] == State.COMPLETED
    rows = lifecycle.history(run_dir)
    assert [row["state"] for row in rows] == ["FROZEN", "QUEUED", "RUNNING", "FAILED", "QUEUED", "RUNNING", "COMPLETED", "QUEUED"]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", row["at"]) for row in rows)
    assert all(f"@{machine.host()}, pid {os.getpid()}" in row["by"] for row in rows)
    manifest = json.loads((run_dir / "manifest.json").read_text())
    assert manifest["config_id"] == "abc" and manifest["place"] == "local"
    assert [row["state"] for row in manifest["states"]] == [row["state"] for row in rows[:-1]]
    assert [attempt["attempt"] for attempt in manifest["attempts"]] == [1, 2]


def test_a_completed_run_is_refused(run_dir: Path) -> None:
    _take(run_dir).end(State.COMPLETED)
    with pytest.raises(AlreadyCompleted, match=r"completed by attempt 1 on .*, pid \d+ at 20"):
        _take(run_dir)
    assert sorted(p.name for p in (run_dir / "attempts").iterdir()) == ["0001.json"]


def test_a_living_owner_is_not_disturbed(run_dir: Path, owner: Callable[..., Owner]) -> None:
    first = owner(run_dir)
    assert first.answer() == ("claimed", 1)
    who = rf"attempt 1 on {re.escape(machine.host())}, pid {first.process.pid}"
    with pytest.raises(LeaseHeld, match=rf"run by {who}; its heartbeat is \d+\.\d s old"):
        _take(run_dir)
    assert first.ask(0) == ("done", 0)


@pytest.mark.parametrize("reaped", [False, True])
def test_a_killed_owner_is_taken_over_at_once(run_dir: Path, owner: Callable[..., Owner], reaped: bool) -> None:
    first = owner(run_dir)
    assert first.answer() == ("claimed", 1)
    first.signal(signal.SIGKILL)
    if reaped:
        first.process.join()
    _until(lambda: state(run_dir)[0] == State.LOST)
    assert "its process is gone" in state(run_dir)[1]
    lease = _take(run_dir)
    assert lease.attempt.attempt == 2
    assert lease.took_over == f"took over from attempt 1 on {machine.host()}, pid {first.process.pid}: its process is gone"
    assert [row["state"] for row in lifecycle.history(run_dir)] == ["RUNNING", "LOST", "RUNNING"]
    lease.end(State.PREEMPTED)


def test_a_suspended_owner_is_taken_over_and_writes_nothing_more(run_dir: Path, owner: Callable[..., Owner]) -> None:
    first = owner(run_dir, 0.5)
    assert first.answer() == ("claimed", 1)
    assert first.ask(0) == ("done", 0)
    first.signal(signal.SIGSTOP)
    with pytest.raises(LeaseHeld):
        _take(run_dir, 0.5)
    _until(lambda: state(run_dir)[0] == State.LOST)
    second = _take(run_dir, 0.5)
    assert second.took_over is not None and re.search(r"heartbeat is \d+\.\d s old, more than 0.5 s", second.took_over)
    with RunRecorder(run_dir, 2, second.check) as recorder:
        recorder.update({"update": 1})
        before = {p: p.read_bytes() for p in run_dir.rglob("*") if p.is_file()}
        first.signal(signal.SIGCONT)
        kind, message = first.ask(1)
        assert kind == "LeaseLost" and f"taken over by attempt 2 on {machine.host()}, pid {os.getpid()}" in message
        assert first.ask(State.COMPLETED)[0] == "LeaseLost"
        assert {p: p.read_bytes() for p in run_dir.rglob("*") if p.is_file()} == before
        recorder.update({"update": 2})
    second.end(State.COMPLETED)
    records = RunRecords.load(run_dir)
    assert [(row["update"], row["attempt"]) for row in records.updates] == [(0, 1), (1, 2), (2, 2)]
    assert state(run_dir)[0] == State.COMPLETED


def test_an_owner_elsewhere_is_judged_by_its_heartbeat_alone(run_dir: Path) -> None:
    lease = _take(run_dir, 60.0)
    lease.abandon()
    path = run_dir / "attempts" / "0001.json"
    path.write_text(json.dumps(dataclasses.asdict(dataclasses.replace(lease.attempt, host="elsewhere", pid=2**22 + 1))))
    assert state(run_dir)[0] == State.RUNNING  # its pid means nothing here
    old = lifecycle.server_time(run_dir) - 61
    os.utime(run_dir / "attempts" / lease.attempt.heartbeat, (old, old))
    assert state(run_dir)[0] == State.LOST
    second = _take(run_dir, 60.0)
    with pytest.raises(LeaseLost):
        lease.check()
    second.end(State.PREEMPTED)


def test_an_owner_that_completed_while_it_was_taken_over_stays_completed(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = _take(run_dir, 60.0)
    slow.abandon()
    old = lifecycle.server_time(run_dir) - 61
    os.utime(run_dir / "attempts" / slow.attempt.heartbeat, (old, old))
    link = os.link

    def link_after_the_owner_woke(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "link", link)
        slow.end(State.COMPLETED)
        link(source, target)

    monkeypatch.setattr(os, "link", link_after_the_owner_woke)
    with pytest.raises(AlreadyCompleted, match="just before"):
        _take(run_dir, 60.0)
    assert state(run_dir)[0] == State.COMPLETED


def test_a_link_whose_answer_got_lost_is_still_ours(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def lossy(source: Path, target: Path) -> None:
        link(source, target)
        raise FileExistsError(17, "File exists")

    monkeypatch.setattr(os, "link", lossy)
    lease = _take(run_dir)
    lease.check()
    lease.end(State.PREEMPTED)


def test_a_removed_directory_is_a_lost_lease(run_dir: Path) -> None:
    lease = _take(run_dir)
    (run_dir / "attempts" / lease.attempt.heartbeat).unlink()
    with pytest.raises(LeaseLost, match="was the run's directory removed"):
        lease.check()
    lease.abandon()


def test_every_file_is_readable_by_others(run_dir: Path) -> None:
    before = os.umask(0o022)
    try:
        note(run_dir, State.QUEUED, "launcher")
        lease = _take(run_dir)
        modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in run_dir.rglob("*") if p.is_file()}
        lease.end(State.COMPLETED)
    finally:
        os.umask(before)
    assert set(modes) >= {"0001.json", "states.0000.jsonl", "states.0001.jsonl", "manifest.json", lease.attempt.heartbeat}
    assert set(modes.values()) == {0o644}


def test_a_torn_state_is_passed_over(run_dir: Path) -> None:
    note(run_dir, State.QUEUED, "launcher")
    with (run_dir / "states.0000.jsonl").open("ab") as file:
        file.write(b'{"state": "LO')
    assert state(run_dir)[0] == State.QUEUED
    note(run_dir, State.LOST, "launcher", "killed by signal 9")
    assert state(run_dir) == (State.LOST, "killed by signal 9")


def _beat_at(run_dir: Path, attempt: lifecycle.Attempt, seconds_ago: float) -> None:
    then = lifecycle.server_time(run_dir) - seconds_ago
    os.utime(run_dir / "attempts" / attempt.heartbeat, (then, then))


def test_what_was_noted_while_an_attempt_ran_does_not_hide_how_it_ended(run_dir: Path, owner: Callable[..., Owner]) -> None:
    """A second launcher queues a run that another's worker has just claimed."""
    lease = _take(run_dir)
    note(run_dir, State.QUEUED, "launcher")
    lease.end(State.FAILED, "out of ideas")
    assert state(run_dir) == (State.FAILED, "out of ideas")
    assert [row["state"] for row in lifecycle.history(run_dir)] == ["RUNNING", "QUEUED", "FAILED"]
    second = owner(run_dir)
    assert second.answer() == ("claimed", 2)
    note(run_dir, State.QUEUED, "launcher")
    second.signal(signal.SIGKILL)
    _until(lambda: state(run_dir)[0] is not State.RUNNING)
    assert state(run_dir)[0] is State.LOST
    note(run_dir, State.QUEUED, "launcher")
    assert state(run_dir)[0] is State.QUEUED


def test_a_launcher_s_word_that_a_worker_elsewhere_died_holds_once_its_heartbeat_has_aged(run_dir: Path) -> None:
    lease = _take(run_dir, 60.0)
    lease.abandon()
    path = run_dir / "attempts" / "0001.json"
    path.write_text(json.dumps(dataclasses.asdict(dataclasses.replace(lease.attempt, host="elsewhere"))))
    note(run_dir, State.LOST, "launcher", "its worker ended by signal 9")
    assert state(run_dir)[0] is State.RUNNING
    _beat_at(run_dir, lease.attempt, 61)
    assert state(run_dir) == (State.LOST, "its worker ended by signal 9")


@pytest.mark.parametrize("content", [b"", b'{"attempt": 1, "ho', b"[]", None])
def test_an_attempt_s_file_that_a_crash_has_emptied_is_judged_by_its_heartbeat(run_dir: Path, content: bytes | None) -> None:
    lease = _take(run_dir)
    path = run_dir / "attempts" / "0001.json"
    if content is None:
        path.unlink()
        named = "0001.json is gone"
    else:
        path.write_bytes(content)
        named = "0001.json is (empty|damaged)"
        assert state(run_dir)[0] is State.RUNNING
    with pytest.raises(LeaseHeld, match=named):
        _take(run_dir)
    lease.abandon()
    _beat_at(run_dir, lease.attempt, 601)
    second = _take(run_dir)
    assert second.attempt.attempt == 2 and re.search(f"took over from attempt 1 .*{named}", second.took_over or "")
    with pytest.raises(LeaseLost):
        lease.check()
    second.describe({})
    second.end(State.COMPLETED)
    assert state(run_dir)[0] is State.COMPLETED


def test_what_rivals_left_that_were_killed_in_a_claim_goes_with_the_end(run_dir: Path) -> None:
    lease = _take(run_dir)
    attempts = run_dir / "attempts"
    for name in ("0001.0a1b2c3d.heartbeat", ".0001.0a1b2c3d.heartbeat.json", "0002.0a1b2c3d.heartbeat"):
        (attempts / name).touch()
    lease.end(State.PREEMPTED)
    assert sorted(path.name for path in attempts.iterdir()) == ["0001.json", "0002.0a1b2c3d.heartbeat"]


def test_a_process_that_the_kernel_hides_is_not_taken_for_dead(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """hidepid: another user's /proc/PID is not there, and a signal to it is not permitted."""
    lease = _take(run_dir)

    def refused(pid: int, number: int) -> None:
        raise PermissionError

    monkeypatch.setattr(machine, "process_start", lambda pid: None)
    assert state(run_dir)[0] is State.LOST
    monkeypatch.setattr(os, "kill", refused)
    assert state(run_dir)[0] is State.RUNNING
    lease.abandon()


@pytest.mark.slow
def test_of_many_rivals_exactly_one_wins_each_time(run_dir: Path, owner: Callable[..., Owner]) -> None:
    """100 races of 5 processes for one directory, the winner of each ended, killed or suspended at random before the next."""
    for race in range(1, 101):
        start = FORK.Barrier(5)
        rivals = [owner(run_dir, 0.4, start) for _ in range(5)]
        answers = [rival.answer() for rival in rivals]
        winners = [rival for rival, (kind, _) in zip(rivals, answers, strict=True) if kind == "claimed"]
        assert len(winners) == 1 and ("claimed", race) in answers
        assert {kind for kind, _ in answers} == {"claimed", "LeaseHeld"}
        assert winners[0].ask(race) == ("done", race)
        if race % 3 == 0:
            winners[0].signal(signal.SIGKILL)
        elif race % 10 == 1:
            winners[0].signal(signal.SIGSTOP)
        else:
            assert winners[0].ask(State.PREEMPTED)[0] == "done"
        _until(lambda: state(run_dir)[0] in (State.LOST, State.PREEMPTED))
        for rival in rivals:
            if race % 10 != 1 or rival is not winners[0]:
                rival.process.kill()
                rival.process.join()
    records = RunRecords.load(run_dir)
    assert [(row["update"], row["attempt"]) for row in records.updates] == [(race, race) for race in range(1, 101)]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from([State.PREEMPTED, State.FAILED, State.COMPLETED]), max_size=6))
def test_attempts_are_numbered_without_gap_until_one_completes(ends: list[State]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_dir, expected = Path(folder), 0
        for end in ends:
            if State.COMPLETED in ends[:expected]:
                with pytest.raises(AlreadyCompleted):
                    _take(run_dir)
                continue
            lease = _take(run_dir)
            expected += 1
            assert lease.attempt.attempt == expected and status(run_dir).attempt == lease.attempt
            lease.end(end)
            assert state(run_dir)[0] == end
        assert lifecycle.newest_attempt(run_dir) == expected
