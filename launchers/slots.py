"""Which run of this machine's queue may start now: cores, GPUs, memory."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pth_exp import machine
from pth_exp.launchers.place import Job
from pth_exp.verl_stack.frozen import PATH

GIB = 1 << 30
LEAST_NEED = 1 * GIB
"""What a run is taken to need before one of its stack has been seen: the libraries of a small run."""

LOOK_EVERY = 5.0
"""Seconds; to look at the processes of a verl job takes 50 ms."""


@dataclass(frozen=True, slots=True)
class Running:
    """A run that occupies a slot: its worker's pid and, unless it computes on the CPU, its GPU."""

    job: Job
    pid: int
    gpu: str | None


class Slots:
    """Room for runs on this machine.

    A run gets a GPU of its own where GPUs are visible and ``stack.device`` takes one, otherwise ``stack.threads`` cores. It waits
    until there is memory for it, except that one run always runs (`shortage` says when that may go wrong). Nothing runs beside a
    verl job, which sees all GPUs.

    Args:
        limit: runs at a time; ``None`` as many as cores or GPUs allow. More runs than GPUs share the GPUs evenly.
        memory_per_run: bytes that one run needs; ``None`` takes the most that a run of its stack has held so far, all its
            processes together, and before that the estimate of ``Job.memory``.
    """

    def __init__(self, limit: int | None, memory_per_run: int | None) -> None:
        self._limit, self._need = limit, memory_per_run
        self._largest: Counter[str] = Counter()
        self._next_look = 0.0
        self._gpus = machine.visible_gpus()

    def next(self, waiting: Sequence[Job], running: Sequence[Running]) -> Job | None:
        """The first waiting run that there is room for."""
        if not waiting or (self._limit is not None and len(running) >= self._limit):
            return None
        return next((job for job in waiting if self._has_room(job, running) and self._has_memory(job, running)), None)

    def shortage(self, job: Job) -> str | None:
        """What to say of a run that starts alone, since one always does, on a machine with too little memory for it."""
        need, available = self._needs(job), machine.available_memory()
        if available >= need:
            return None
        return (
            f"needs about {need / GIB:.1f} GiB of memory, and {available / GIB:.1f} are available; it starts all the same, as no "
            "other of this sweep runs. The kernel may end it: free memory, or stop it with Ctrl-C"
        )

    def gpu_for(self, job: Job, running: Sequence[Running]) -> str | None:
        """The least busy GPU that the run may use; ``None`` when it uses none, or all are taken."""
        if not self._takes_gpu(job):
            return None
        number = job.device.partition(":")[2]
        busy = Counter(run.gpu for run in running)
        gpu = min([self._gpus[int(number)]] if number else self._gpus, key=lambda gpu: busy[gpu])
        return gpu if busy[gpu] < math.ceil((self._limit or 1) / len(self._gpus)) else None

    def watch(self, running: Sequence[Running]) -> None:
        """Look at how much memory the runs hold, every few seconds."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + LOOK_EVERY
        for run in running:
            self._largest[run.job.stack] = max(self._largest[run.job.stack], held(run))

    def _has_room(self, job: Job, running: Sequence[Running]) -> bool:
        if running and (job.alone or any(run.job.alone for run in running)):
            return False
        if self._takes_gpu(job):
            return self.gpu_for(job, running) is not None
        taken = sum(run.job.threads for run in running if run.gpu is None)
        return self._limit is not None or taken == 0 or taken + job.threads <= machine.cores()

    def _takes_gpu(self, job: Job) -> bool:
        kind, _, number = job.device.partition(":")
        return not job.alone and kind in ("auto", "cuda") and bool(self._gpus) and (not number or int(number) < len(self._gpus))

    def _has_memory(self, job: Job, running: Sequence[Running]) -> bool:
        """Whether there is memory for one more, when those that run have taken what they will need. One always runs."""
        promised = sum(max(0, self._needs(run.job) - held(run)) for run in running)
        return not running or machine.available_memory() - promised >= self._needs(job)

    def _needs(self, job: Job) -> int:
        return self._need or max(self._largest[job.stack], job.memory, LEAST_NEED)


def held(run: Running) -> int:
    """Bytes of a run's processes: its worker with what that started and, of a verl job, what Ray has made independent."""
    pids = machine.descendants(run.pid)
    return machine.held_memory(pids | (machine.carrying(PATH, str(run.job.frozen.absolute())) if run.job.alone else set()))
