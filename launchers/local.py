"""Runs as subprocesses of this machine, as many at a time as its cores, GPUs and memory allow."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from pth_exp import leftovers, lifecycle
from pth_exp.launchers.place import LOG, Job, RunResult, log_tail
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
        with progress(runs, self._stream or sys.stdout) as shown, _signals_into(events):
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
                        shown.message(_explain(event, interrupts, len(running)))
                    else:
                        ended = running.pop(event).job
                        leftovers.clear(ended.run_dir)
                        results[ended.index] = result = _result(ended, event.returncode)
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


def _result(job: Job, code: int) -> RunResult:
    """What became of a run whose worker has ended; records what the worker could not."""
    tail = log_tail(job.run_dir)
    state, message = lifecycle.state(job.run_dir)
    how = f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"
    if state is State.LOST:
        hint = "; the kernel does so when memory runs out" if code == -signal.SIGKILL else ""
        message = f"its worker ended by {how} without a last word{hint}"
        lifecycle.note(job.run_dir, state, "launcher", message)
    elif state in (State.FROZEN, State.QUEUED):
        state, message = State.FAILED, tail.rpartition("\n")[2] or f"its worker ended by {how} before it began"
        lifecycle.note(job.run_dir, state, "launcher", message)
    return RunResult(job.index, job.label, state, message, tail)


def _stop(running: Iterable[Process], kill: bool) -> None:
    for process in running:
        if process.poll() is not None:
            continue
        if kill:
            os.killpg(process.pid, signal.SIGKILL)  # its own session: the worker and what it started, nobody else
        else:
            process.terminate()


def _explain(received: signal.Signals, interrupts: int, running: int) -> str:
    runs = f"{running} run{'s' * (running != 1)}"
    if interrupts == 1:
        return f"{received.name}: {runs} to checkpoint at the next update and stop; once more kills"
    return f"{received.name} again: {runs} killed; the last checkpoints hold"


@contextmanager
def _signals_into(events: queue.SimpleQueue[Event]) -> Iterator[None]:
    """Signals that ask this process to end become events; outside the main thread they stay as they are."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {n: signal.signal(n, lambda number, _: events.put(signal.Signals(number))) for n in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
