"""Runs as subprocesses of this machine, as many at a time as its cores, GPUs and memory allow."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from typing import TextIO

from pth_exp import lifecycle
from pth_exp.launchers.interrupts import explain, signals_into
from pth_exp.launchers.place import LOG, Job, RunResult, exit_text, outcome
from pth_exp.launchers.progress import progress
from pth_exp.launchers.slots import GIB, Running, Slots
from pth_exp.lifecycle import State
from pth_exp.refusal import refuse

_REFRESH_SECONDS = 0.5

Process = subprocess.Popen[bytes]
Event = Process | signal.Signals
"""A worker that ended, or a signal that asks this process to end."""


class LocalPlace:
    """Parallel workers on this machine; `Slots` says how many.

    Ctrl-C asks the workers to stop at their next update, with a checkpoint; a second one kills them. Should this process itself
    be killed, its workers notice at their next update and stop there in the same way.

    Args:
        slots: runs at a time; ``None`` as many as cores or GPUs allow.
        memory_per_run_gb: memory that one run needs, in GiB; ``None`` to measure it.
        stream: where progress goes; standard output by default.

    Raises ``Refusal`` for a value that leaves no run a place.
    """

    def __init__(self, slots: int | None = None, memory_per_run_gb: float | None = None, stream: TextIO | None = None) -> None:
        if slots is not None and (type(slots) is not int or slots < 1):
            raise refuse("slots", slots, "leaves no run a place", "give a whole number of at least 1, or null for as many as fit")
        if memory_per_run_gb is not None and (type(memory_per_run_gb) not in (int, float) or not memory_per_run_gb > 0):
            raise refuse(
                "memory_per_run_gb", memory_per_run_gb, "is no amount of memory", "give more than 0, or null to measure it"
            )
        self._slots = Slots(slots, None if memory_per_run_gb is None else int(memory_per_run_gb * GIB))
        self._stream = stream

    def dispatch(self, runs: Sequence[Job]) -> list[RunResult]:
        """Execute the runs; results in the order given, QUEUED for those that Ctrl-C kept from starting."""
        for run in runs:
            lifecycle.note(run.run_dir, State.QUEUED, "launcher")
        waiting = list(runs)
        running: dict[Process, Running] = {}
        results: dict[int, RunResult] = {}
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        interrupts = 0
        with progress(runs, self._stream or sys.stdout) as shown, signals_into(events):
            try:
                while running or (waiting and not interrupts):
                    while not interrupts and (job := self._slots.next(waiting, [*running.values()])) is not None:
                        waiting.remove(job)
                        shown.start(job)
                        if not running and (short := self._slots.shortage(job)) is not None:
                            shown.message(f"[{job.index}] {job.label}  {short}")
                        try:
                            process, occupied = self._start(job, [*running.values()])
                        except OSError as error:
                            result = RunResult(job.index, job.label, State.FAILED, f"could not be started: {error}", "")
                            results[job.index] = result
                            shown.end(job, result)
                            continue
                        running[process] = occupied
                        threading.Thread(target=_await, args=(process, events), name=job.label, daemon=True).start()
                    try:
                        event = events.get(timeout=_REFRESH_SECONDS)
                    except queue.Empty:
                        self._slots.watch([*running.values()])
                        shown.refresh()
                        continue
                    if isinstance(event, signal.Signals):
                        interrupts += 1
                        _stop(running, kill=interrupts > 1)
                        shown.message(explain(event, interrupts, len(running)))
                    else:
                        ended = running.pop(event).job
                        results[ended.index] = result = outcome(ended, exit_text(event.returncode))
                        shown.end(ended, result)
            finally:  # only an error leaves workers here
                _stop(running, kill=False)
                for process in running:
                    process.wait()
        unstarted = {run.index: RunResult(run.index, run.label, State.QUEUED, "not started", "") for run in waiting}
        return [(results | unstarted)[run.index] for run in runs]

    def _start(self, job: Job, running: Sequence[Running]) -> tuple[Process, Running]:
        gpu = self._slots.gpu_for(job, running)
        environment = job.process_environment("local") | {"PTH_LAUNCHER_PID": str(os.getpid())}
        if gpu is not None and not job.device.startswith("cuda:"):  # a numbered device counts among all visible ones
            environment["CUDA_VISIBLE_DEVICES"] = gpu
        with (job.run_dir / LOG).open("ab") as log:
            process = subprocess.Popen(
                job.command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches the launcher alone, which then asks each worker
            )
        return process, Running(job, process.pid, gpu)


def _await(process: Process, events: queue.SimpleQueue[Event]) -> None:
    process.wait()
    events.put(process)


def _stop(running: Iterable[Process], kill: bool) -> None:
    for process in running:
        if process.poll() is not None:
            continue
        if kill:
            os.killpg(process.pid, signal.SIGKILL)  # its own session: the worker and what it started, nobody else
        else:
            process.terminate()
