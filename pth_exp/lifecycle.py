"""A run's life: its states, and the lease that lets one worker at a time write its records.

Everything is plain files in the run's directory and works on a shared file system without locks:

* ``attempts/NNNN.json`` says who runs attempt N. It is created by hard-linking a finished file to that name, which a file
  server does for exactly one of several rivals. N is a fencing token: a higher one has taken the run over.
* ``attempts/NNNN.<hex>.heartbeat`` is touched by the owner of attempt N. Who takes a run over removes the heartbeat of the
  attempt before; an owner touches its heartbeat before each write, and so learns from the file server itself, not from a
  cache, that it lost the run.
* ``attempts/NNNN.facts.json`` is what attempt N said of its libraries and its machine.
* ``attempts/JOB.stop`` asks the worker of job JOB to stop at its next update.
* ``states.NNNN.jsonl`` holds the states attempt N went through; ``states.0000.jsonl`` those set from outside, by a launcher.

An owner that is suspended between its check and its write can still append one row after a takeover. That row lands in the
old attempt's own file, where readers prefer the newer attempt's row of the same update; no file is ever written by two
attempts, except ``manifest.json``, which repeats what the other files say and from which nothing is decided.

A note from outside (``states.0000.jsonl``) is appended by whoever launches or refuses the run, perhaps from two machines at once,
which a file server may let collide: a note is for people, and nothing that a run writes rests on one.

A heartbeat's age is taken against a file just touched in the same directory: both times are the file server's, so the clocks
of machines do not matter.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import re
import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from pth_exp import changes, machine
from pth_exp.runfiles import append_row, create, read_rows, server_time, stamp, sync, write_json

_ATTEMPT_FILE = re.compile(r"(\d{4,})\.json")
_GONE = (errno.ENOENT, errno.ESTALE)
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_LEFT_BY_A_KILL = re.compile(r"\.?(\d{4,})\.[0-9a-f]{8}\.heartbeat(\.json)?")
_LOST_AFTER = 600.0
"""Seconds; of an owner whose attempt's file cannot be read, so that nobody knows what it asked for."""


class State(StrEnum):
    FROZEN = "FROZEN"
    QUEUED = "QUEUED"
    RUNNING = "RUNNING"
    PREEMPTED = "PREEMPTED"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    LOST = "LOST"


ENDED = frozenset({State.PREEMPTED, State.COMPLETED, State.FAILED})
"""States in which an attempt gives its lease back."""


class LifecycleError(RuntimeError):
    """The run's directory does not allow what was asked."""


class LeaseHeld(LifecycleError):
    """Another worker runs this run now."""


class AlreadyCompleted(LifecycleError):
    """The run is done and is never run again."""


class LeaseLost(LifecycleError):
    """A newer attempt has taken the run over; this one must not write any more."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """Who runs an attempt, as ``attempts/NNNN.json`` says. Times are seconds."""

    attempt: int
    host: str
    pid: int
    process_space: str | None
    process_start: int | None
    place: str
    job_id: str | None
    by: str
    claimed_at: str
    heartbeat: str
    heartbeat_every: float
    lost_after: float

    @classmethod
    def unreadable(cls, attempts: Path, number: int, why: str) -> Attempt:
        """The owner of an attempt whose file a server's crash has emptied or taken: unknown but for its heartbeat."""
        beating = sorted(attempts.glob(f"{number:04d}.*.heartbeat"), key=lambda path: path.stat().st_mtime)
        heartbeat = beating[-1].name if beating else f"{number:04d}.heartbeat"
        who = f"a machine that is not known ({number:04d}.json {why})"
        known_since = stamp("reader")["at"]
        return cls(number, who, 0, None, None, "", None, "unknown", known_since, heartbeat, _LOST_AFTER / 10, _LOST_AFTER)

    def owner(self) -> str:
        job = f", job {self.job_id}" if self.job_id else ""
        return f"attempt {self.attempt} on {self.host}, pid {self.pid}{job}"

    def owner_is_gone(self) -> bool:
        """True when the owner ran on this machine and its process no longer does."""
        here = machine.process_space()
        if here is None or self.process_start is None or (self.host, self.process_space) != (machine.host(), here):
            return False
        return machine.is_gone(self.pid, self.process_start)


@dataclass(frozen=True, slots=True)
class Status:
    """Where a run stands.

    Attributes:
        state: its state; RUNNING only while the heartbeat is fresh, LOST when it is not.
        detail: one sentence for people: who, since when, why.
        attempt: the newest attempt, ``None`` before the first.
        since: when the state was set, UTC.
        heartbeat_age: seconds since the heartbeat; ``None`` without one.
        job_id: of the newest attempt's job, or of one that is to begin the next; ``None`` where a place has none.
        by: who set the state; ``None`` for one that nobody did: a loss is seen, and so is a run that was only frozen.
    """

    state: State
    detail: str
    attempt: Attempt | None
    since: str | None
    heartbeat_age: float | None
    job_id: str | None = None
    by: str | None = None


def status(run_dir: Path, now: float | None = None) -> Status:
    """Read a run's state; writes nothing that stays.

    ``now`` is the file server's time (`server_time`), for callers that read many runs of one sweep.
    """
    found = _status(run_dir, now)
    changed = changes.summary(run_dir)
    return found if changed is None else dataclasses.replace(found, detail=f"{found.detail}; {changed}")


def _status(run_dir: Path, now: float | None) -> Status:
    number = newest_attempt(run_dir)
    notes = [row for row in read_rows(_states_file(run_dir, 0)) if row.get("after", 0) == number]
    if number == 0:
        if not notes:
            return Status(State.FROZEN, "frozen, never queued", None, None, None)
        return _noted(notes[-1], None)
    attempt = read_attempt(run_dir, number)
    end, age, lost = _standing(run_dir, attempt, now)
    if end is None and lost is None:
        detail = f"{attempt.owner()}, heartbeat {age:.0f} s ago"
        return Status(State.RUNNING, detail, attempt, attempt.claimed_at, age, attempt.job_id, attempt.by)
    if end is not None and end["state"] == State.COMPLETED:
        notes = []
    elif end is not None:  # what was noted before the attempt ended is out of date
        notes = [row for row in notes if row.get("found", end["state"]) in ENDED]
    else:  # and so is what was noted while it ran, but for a launcher's word that it did no more
        notes = [row for row in notes if row.get("found") != State.RUNNING or row["state"] == State.LOST]
    if notes:
        return _noted(notes[-1], attempt)
    if end is not None:
        detail = end.get("reason") or attempt.owner()
        return Status(State(end["state"]), detail, attempt, end["at"], None, attempt.job_id, end["by"])
    return Status(State.LOST, f"{attempt.owner()}: {lost}", attempt, attempt.claimed_at, age, attempt.job_id)


def state(run_dir: Path) -> tuple[State, str]:
    """A run's state and one sentence about it."""
    found = status(run_dir)
    return found.state, found.detail


def note(run_dir: Path, state: State, role: str, reason: str = "", job_id: str | None = None, after: int | None = None) -> None:
    """Set a state from outside an attempt: a launcher's FROZEN, QUEUED, or LOST, a worker's refusal.

    It holds until the next attempt is claimed, and never hides a running or completed one. ``job_id`` is the job that a
    launcher's QUEUED has submitted; ``after`` the newest attempt before it did, where the job may have begun since.
    """
    number = newest_attempt(run_dir) if after is None else after
    row = _row(state, role, reason) | {"after": number}
    if number:
        end, _, lost = _standing(run_dir, read_attempt(run_dir, number), None)
        row["found"] = end["state"] if end else State.LOST if lost else State.RUNNING
    append_row(_states_file(run_dir, 0), row | ({"job_id": job_id} if job_id else {}))


def history(run_dir: Path) -> list[dict[str, Any]]:
    """Every state the run went through, in order, with when and by whom."""
    notes = read_rows(_states_file(run_dir, 0))
    rows = [((row.get("after", 0), 1 if row.get("found") in (State.RUNNING, State.LOST) else 3), row) for row in notes]
    for number in range(1, newest_attempt(run_dir) + 1):
        rows += [((number, 2 if row["state"] in ENDED else 0), row) for row in read_rows(_states_file(run_dir, number))]
    return [row for _, row in sorted(rows, key=lambda item: item[0])]


def claim(run_dir: Path, heartbeat_every: float, lost_after: float, place: str, job_id: str | None) -> Lease:
    """Claim the run's next attempt and start its heartbeat.

    Raises:
        AlreadyCompleted: the run is done.
        LeaseHeld: another worker holds the lease and is alive, or won the race for this attempt.
        LifecycleError: the file system cannot create hard links.
    """
    if not 0 < heartbeat_every < lost_after:
        raise LifecycleError(f"lease.heartbeat_every={heartbeat_every} must lie above 0 and below lease.lost_after={lost_after}")
    (run_dir / "attempts").mkdir(exist_ok=True)
    previous, message = _predecessor(run_dir, newest_attempt(run_dir, _newest_recorded(run_dir)))
    number = previous.attempt + 1 if previous else 1
    stamped = stamp("worker")
    mine = Attempt(
        attempt=number,
        host=machine.host(),
        pid=os.getpid(),
        process_space=machine.process_space(),
        process_start=machine.process_start(os.getpid()),
        place=place,
        job_id=job_id,
        by=stamped["by"],
        claimed_at=stamped["at"],
        heartbeat=f"{number:04d}.{secrets.token_hex(4)}.heartbeat",
        heartbeat_every=heartbeat_every,
        lost_after=lost_after,
    )
    heartbeat = run_dir / "attempts" / mine.heartbeat
    create(heartbeat, b"")
    if not _link(_attempt_file(run_dir, number), mine):
        heartbeat.unlink(missing_ok=True)
        _predecessor(run_dir, number)  # says who won
        raise LeaseHeld(f"{run_dir}: another worker claimed attempt {number} at the same moment")
    if previous is not None:
        (run_dir / "attempts" / previous.heartbeat).unlink(missing_ok=True)  # fences the old owner off, should it still live
        end = _last_row(run_dir, previous.attempt)
        if end.get("state") == State.COMPLETED:  # it was slow, not dead, and finished before it was fenced off
            Lease(run_dir, mine, None).end(State.COMPLETED, f"by attempt {previous.attempt}, at {end['at']}")
            raise AlreadyCompleted(
                f"{run_dir} was completed by {previous.owner()} at {end['at']}, just before it could be taken over"
            )
    return Lease(run_dir, mine, message)


def ask_to_stop(run_dir: Path, job_id: str, reason: str) -> None:
    """Ask the worker of a job to stop at its next update, by a file; for a place that cannot signal it.

    The worker may be asked before it has claimed the run. Nobody else ever has the job's id, so the file needs no removal.
    """
    (run_dir / "attempts").mkdir(exist_ok=True)
    with contextlib.suppress(FileExistsError):
        create(_stop_file(run_dir, job_id), reason.encode())


class Lease:
    """The right to write a run's records, held by one attempt until it ends or is taken over.

    Attributes:
        run_dir: the run's directory.
        attempt: who holds the lease.
        took_over: what was taken over, for people; ``None`` when nothing was.
    """

    def __init__(self, run_dir: Path, attempt: Attempt, took_over: str | None) -> None:
        self.run_dir, self.attempt, self.took_over = run_dir, attempt, took_over
        self._heartbeat = run_dir / "attempts" / attempt.heartbeat
        self._facts: dict[str, Any] = {}
        self._closed = threading.Event()
        if took_over is not None:
            self._record(State.LOST, f"attempt {attempt.attempt - 1} of this run: {took_over}")
        self._record(State.RUNNING, took_over or "")
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Touch the heartbeat; call before each write. Raises ``LeaseLost`` when a newer attempt exists."""
        newer = self.attempt.attempt + 1
        try:
            os.utime(self._heartbeat)
            if not _attempt_file(self.run_dir, newer).exists():
                return
        except OSError as error:
            if error.errno not in _GONE:
                raise
        newest = newest_attempt(self.run_dir)
        if newest < newer and not _attempt_file(self.run_dir, newer).exists():  # neither a listing nor a look has it
            raise LeaseLost(
                f"{self.run_dir}: the heartbeat file {self._heartbeat.name} is gone; was the run's directory removed?"
            )
        who = read_attempt(self.run_dir, max(newest, newer)).owner()
        raise LeaseLost(f"{self.run_dir}: attempt {self.attempt.attempt} was taken over by {who}; it writes nothing more")

    def stop_asked(self) -> str | None:
        """Why this attempt is to stop, if its place has asked it to by `ask_to_stop`."""
        if self.attempt.job_id is None:
            return None
        try:
            return _stop_file(self.run_dir, self.attempt.job_id).read_text() or None
        except OSError:
            return None

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Add facts to ``manifest.json`` and to what is kept of this attempt."""
        self._facts |= facts
        self.check()
        write_json(_facts_file(self.run_dir, self.attempt.attempt), self._facts)
        self._write_manifest(history(self.run_dir))

    def remark(self, text: str) -> None:
        """Add a sentence to the states that the run goes through."""
        self._record(State.RUNNING, text)

    def facts_before(self) -> dict[str, Any]:
        """What the newest attempt before this one said of itself; empty where none did."""
        for number in range(self.attempt.attempt - 1, 0, -1):
            with contextlib.suppress(OSError, ValueError):
                facts: dict[str, Any] = json.loads(_facts_file(self.run_dir, number).read_bytes())
                return facts
        return {}

    def end(self, state: State, reason: str = "") -> None:
        """Set the attempt's last state (COMPLETED, FAILED or PREEMPTED) and give the lease back."""
        if state not in ENDED:
            raise ValueError(f"an attempt does not end as {state}")
        self._record(state, reason)
        self._closed.set()
        self._thread.join()
        for path in (self.run_dir / "attempts").iterdir():  # its own heartbeat, and what rivals left that were killed in a claim
            if (match := _LEFT_BY_A_KILL.fullmatch(path.name)) and int(match[1]) <= self.attempt.attempt:
                path.unlink(missing_ok=True)

    def abandon(self) -> None:
        """Stop the heartbeat of a lost lease, leaving every file as it is."""
        self._closed.set()
        self._thread.join()

    def _record(self, state: State, reason: str) -> None:
        self.check()
        row = _row(state, "worker", reason) | {"attempt": self.attempt.attempt}
        self._write_manifest([*history(self.run_dir), row])
        append_row(_states_file(self.run_dir, self.attempt.attempt), row)

    def _write_manifest(self, states: list[dict[str, Any]]) -> None:
        self.check()
        attempts = [dataclasses.asdict(read_attempt(self.run_dir, n)) for n in range(1, self.attempt.attempt + 1)]
        here = {"host": self.attempt.host, "place": self.attempt.place, "job_id": self.attempt.job_id}
        write_json(self.run_dir / "manifest.json", self._facts | here | {"attempts": attempts, "states": states})

    def _beat(self) -> None:
        while not self._closed.wait(self.attempt.heartbeat_every):
            try:
                os.utime(self._heartbeat)
            except OSError as error:  # a server that does not answer may come back; a heartbeat that is gone will not
                if error.errno in _GONE:
                    return


def newest_attempt(run_dir: Path, at_least: int = 0) -> int:
    """Number of the newest attempt, 0 before the first; ``at_least`` is one known to exist, should a listing be out of date."""
    try:
        names = os.listdir(run_dir / "attempts")
    except FileNotFoundError:
        names = []
    return max([at_least, *(int(m[1]) for name in names if (m := _ATTEMPT_FILE.fullmatch(name)))])


def _newest_recorded(run_dir: Path) -> int:
    """Number of the newest attempt that has set a state, should a server's crash have taken the attempt's own file."""
    return max((int(path.name.split(".")[1]) for path in run_dir.glob("states.*.jsonl")), default=0)


def read_attempt(run_dir: Path, number: int) -> Attempt:
    """Who runs an attempt, as far as its file says."""
    path = _attempt_file(run_dir, number)
    try:
        return Attempt(**json.loads(path.read_bytes()))
    except FileNotFoundError:
        return Attempt.unreadable(path.parent, number, "is gone")
    except (ValueError, TypeError) as error:
        return Attempt.unreadable(path.parent, number, f"is damaged: {error}" if path.stat().st_size else "is empty")


def _predecessor(run_dir: Path, number: int) -> tuple[Attempt | None, str | None]:
    """The attempt to follow and, if it never ended, why it may be taken over. Raises when it is completed or alive."""
    if number == 0:
        return None, None
    attempt = read_attempt(run_dir, number)
    end, age, lost = _standing(run_dir, attempt, None)
    if end is not None and end["state"] == State.COMPLETED:
        raise AlreadyCompleted(f"{run_dir} was completed by {attempt.owner()} at {end['at']}; a completed run is never run again")
    if end is not None:
        return attempt, None
    if lost is None:
        raise LeaseHeld(
            f"{run_dir} is being run by {attempt.owner()}; its heartbeat is {age:.1f} s old "
            f"and it counts as lost after {attempt.lost_after:g} s. Wait, or end that process"
        )
    return attempt, f"took over from {attempt.owner()}: {lost}"


def _standing(run_dir: Path, attempt: Attempt, now: float | None) -> tuple[dict[str, Any] | None, float | None, str | None]:
    """The row that ended the attempt, if one did; seconds since its heartbeat; and why its owner counts as lost.

    The heartbeat is looked at first: an owner writes its last row before its heartbeat goes, so an end is never taken for a loss.
    """
    age, lost = _pulse(run_dir, attempt, now)
    last = _last_row(run_dir, attempt.attempt)
    return (last if last.get("state") in ENDED else None), age, lost


def _pulse(run_dir: Path, attempt: Attempt, now: float | None) -> tuple[float | None, str | None]:
    """Seconds since the heartbeat, and why the owner counts as lost (``None``: it is alive)."""
    try:
        with (run_dir / "attempts" / attempt.heartbeat).open("rb") as file:  # opening revalidates what a client has cached
            beat = os.fstat(file.fileno()).st_mtime
    except OSError as error:
        if error.errno not in _GONE:
            raise
        return None, "its heartbeat file is gone"
    age = max(0.0, (server_time(run_dir / "attempts") if now is None else now) - beat)
    if attempt.owner_is_gone():
        return age, "its process is gone"
    if age > attempt.lost_after:
        return age, f"its heartbeat is {age:.1f} s old, more than {attempt.lost_after:g} s"
    return age, None


def _stop_file(run_dir: Path, job_id: str) -> Path:
    return run_dir / "attempts" / f"{job_id}.stop"


def _link(target: Path, attempt: Attempt) -> bool:
    """Create an attempt's file if nobody has; true when it is ours."""
    finished = target.with_name(f".{attempt.heartbeat}.json")
    content = (json.dumps(dataclasses.asdict(attempt), indent=2) + "\n").encode()
    create(finished, content)
    try:
        os.link(finished, target)
        sync(target.parent)
        return True
    except FileExistsError:
        return target.read_bytes() == content  # a server may have linked it and its answer got lost
    except FileNotFoundError:  # a newer attempt has ended, and cleared away what it took for a killed rival's
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        raise LifecycleError(
            f"{target.parent}: this file system has no hard links, which the lease needs; use another directory"
        ) from error
    finally:
        finished.unlink(missing_ok=True)


def _attempt_file(run_dir: Path, number: int) -> Path:
    return run_dir / "attempts" / f"{number:04d}.json"


def _facts_file(run_dir: Path, number: int) -> Path:
    return run_dir / "attempts" / f"{number:04d}.facts.json"


def _states_file(run_dir: Path, number: int) -> Path:
    return run_dir / f"states.{number:04d}.jsonl"


def _noted(row: Mapping[str, Any], attempt: Attempt | None) -> Status:
    detail = row.get("reason") or f"by {row['by']}"
    job_id = row.get("job_id") or (attempt.job_id if attempt else None)
    return Status(State(row["state"]), detail, attempt, row["at"], None, job_id, row["by"])


def _row(state: State, role: str, reason: str) -> dict[str, Any]:
    return {"state": state, **stamp(role)} | ({"reason": reason} if reason else {})


def _last_row(run_dir: Path, number: int) -> dict[str, Any]:
    rows = read_rows(_states_file(run_dir, number))
    return rows[-1] if rows else {}
