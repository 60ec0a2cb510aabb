"""SLURM's own commands as a place needs them: every call bounded in time, every failure told in one line.

Only what the controller itself knows is asked for, never the accounting database, which not every cluster has.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import dataclass

_SECONDS = 120.0
"""A client keeps asking a controller that does not answer for about a minute and a half."""
PROGRAMS = ("sbatch", "squeue", "scontrol", "scancel", "sinfo", "srun")
_JOB_ID = re.compile(r"\d+(_\d+)?")
_ENDED = frozenset(
    ["BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"]
)  # fmt: skip
_UNKNOWN = "Invalid job id"
_NO_SUCH_NODE = "Requested node configuration is not available"


class SlurmError(RuntimeError):
    """A command of SLURM's did not do what it was asked to; the message says why."""


@dataclass(frozen=True, slots=True)
class Queued:
    """What the controller says of a job: its state, as squeue spells it, and why it waits."""

    state: str
    reason: str

    @property
    def ended(self) -> bool:
        return self.state in _ENDED

    @property
    def waits(self) -> bool:
        return self.state in ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")


def missing() -> list[str]:
    """Commands of SLURM's that are not on this machine's path."""
    return [program for program in PROGRAMS if shutil.which(program) is None]


def is_job_id(text: str | None) -> bool:
    """Whether it is SLURM's: ``123``, or ``123_4`` of an array."""
    return text is not None and _JOB_ID.fullmatch(text) is not None


def queue(job_ids: Collection[str], names: Collection[str]) -> dict[str, Queued]:
    """Those of the jobs that the controller still knows, if one of ``names`` is theirs: ids start anew when a cluster does.

    Raises `SlurmError` when it does not answer.
    """
    if not job_ids:
        return {}
    asked = ",".join(sorted({job_id.partition("_")[0] for job_id in job_ids}))
    try:
        rows = _squeue("--states=all", f"--jobs={asked}")
    except SlurmError as error:
        if _UNKNOWN in str(error):
            return {}
        raise
    return {job_id: queued for job_id, called, queued in rows if job_id in job_ids and called in names}


def waiting_tasks(name: str) -> dict[int, str]:
    """Tasks of job arrays of that name that have not begun: the task's number to the job's id.

    Raises `SlurmError` when the controller does not answer.
    """
    rows = _squeue("--states=pending", f"--name={name}")
    return {int(job_id.partition("_")[2]): job_id for job_id, called, _ in rows if called == name and "_" in job_id}


def _squeue(*chosen: str) -> list[tuple[str, str, Queued]]:
    """Id, name and state of the chosen jobs, those of arrays one by one."""
    rows = call(["squeue", "--noheader", "--array", *chosen, "--format=%i|%T|%r|%j"]).splitlines()
    split = (row.strip().split("|", 3) for row in rows)
    return [(job_id, called, Queued(state, "" if reason == "None" else reason)) for job_id, state, reason, called in split]


def cancel(job_ids: Sequence[str]) -> None:
    """Raises `SlurmError`."""
    if job_ids:
        call(["scancel", *job_ids])


def requeue(job_id: str) -> None:
    """Raises `SlurmError`."""
    call(["scontrol", "requeue", job_id])


def fate(job_id: str) -> str:
    """Of a job that runs and is being stopped: ``preempted``, ``cancelled``, or ``running``. Raises `SlurmError`."""
    fields = dict(field.partition("=")[::2] for field in call(["scontrol", "-o", "show", "job", job_id]).split() if "=" in field)
    if fields.get("JobState") != "RUNNING":
        return "cancelled"
    return "running" if fields.get("PreemptTime", "None") in ("None", "Unknown", "N/A") else "preempted"


def would_take(options: Sequence[str]) -> None:
    """Raises `SlurmError` if sbatch would refuse these options.

    While nodes are down, a test of sbatch's takes them for missing; sbatch itself takes the job, which waits for them.
    """
    try:
        call(["sbatch", "--test-only", *options, "--wrap=true"])
    except SlurmError as error:
        if _NO_SUCH_NODE in str(error) and call(["sinfo", "--noheader", "--states=down,drain,fail,maint", "--format=%n"]).strip():
            return
        raise


def call(command: Sequence[str]) -> str:
    """Standard output of a command. Raises `SlurmError`."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, stdin=subprocess.DEVNULL)
    except FileNotFoundError:
        raise SlurmError(f"{command[0]} is not on this machine's path") from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{command[0]} did not answer within {_SECONDS:g} s") from None
    if done.returncode:
        raise SlurmError(_line(done.stderr or done.stdout) or f"{command[0]} ended with exit code {done.returncode}")
    return done.stdout


def _line(text: str) -> str:
    """What a command complained of, without its own name before it."""
    lines = [line.partition("error: ")[2] or line for line in text.strip().splitlines()]
    return "; ".join(dict.fromkeys(line.strip() for line in lines))[:300]
