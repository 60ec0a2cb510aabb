"""Runs as subprocesses of this machine, as many at a time as its cores, GPUs and memory allow."""

from __future__ import annotations

import math
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

from pth_exp import lifecycle, machine
from pth_exp.launchers.place import LOG, Job, RunResult, log_tail
from pth_exp.launchers.progress import Progress, progress
from pth_exp.lifecycle import State
from pth_exp.refusal import refuse

GIB = 1 << 30
_REFRESH = 0.5
_LEAST_NEED = 1 * GIB
"""What a run is taken to need before one has been seen: the libraries of a small run."""


@dataclass(frozen=True, slots=True)
class _Child:
    job: Job
    process: subprocess.Popen[bytes]
    gpu: str | None


class LocalPlace:
    """Parallel workers on this machine.

    A run gets a GPU of its own where GPUs are visible and ``stack.device`` takes one, otherwise ``stack.threads`` cores. The next
    run waits until there is memory for it, except that one run always runs. Ctrl-C asks the workers to stop at their next update,
    with a checkpoint; a second one kills them. Should this process itself be killed, its workers notice at their next update, and
    stop there in the same way.

    Args:
        slots: runs at a time; ``None`` as many as cores or GPUs allow. More slots than GPUs share the GPUs evenly.
        memory_per_run_gb: memory that one run needs, in GiB; ``None`` takes the most that a run of this sweep has held so far.
        stream: where progress goes; standard output by default.
    """

    def __init__(self, slots: int | None = None, memory_per_run_gb: float | None = None, stream: TextIO | None = None) -> None:
        if slots is not None and slots < 1:
            raise refuse("hydra.launcher.slots", slots, "leaves no run a place", "give at least 1, or null")
        if memory_per_run_gb is not None and memory_per_run_gb <= 0:
            raise refuse(
                "hydra.launcher.memory_per_run_gb", memory_per_run_gb, "is no amount of memory", "give more than 0, or null"
            )
        self._slots, self._stream = slots, stream
        self._need = None if memory_per_run_gb is None else int(memory_per_run_gb * GIB)
        self._largest = 0
        self._gpus = machine.visible_gpus()

    def dispatch(self, runs: Sequence[Job]) -> list[RunResult]:
        """Execute the runs; results in the order given, QUEUED for those that Ctrl-C kept from starting."""
        for job in runs:
            lifecycle.note(job.run_dir, State.QUEUED, "launcher")
        waiting, children, results = list(runs), list[_Child](), dict[int, RunResult]()
        events: queue.SimpleQueue[_Child | signal.Signals] = queue.SimpleQueue()
        interrupts = 0
        with progress(runs, self._stream or sys.stdout) as shown, _signals_into(events):
            try:
                while children or (waiting and not interrupts):
                    while not interrupts and (job := self._next(waiting, children)) is not None:
                        waiting.remove(job)
                        self._start(job, children, events, shown, results)
                    try:
                        event = events.get(timeout=_REFRESH)
                    except queue.Empty:
                        self._watch_memory(children)
                        shown.refresh()
                        continue
                    if isinstance(event, _Child):
                        children.remove(event)
                        results[event.job.index] = result = _result(event)
                        shown.end(event.job, result)
                    else:
                        interrupts += 1
                        _stop(children, kill=interrupts > 1)
                        shown.message(_explain(event, interrupts, len(children)))
            finally:  # only an error leaves children here
                _stop(children, kill=False)
                for child in children:
                    child.process.wait()
        unstarted = {job.index: RunResult(job.index, job.label, State.QUEUED, "not started", "") for job in waiting}
        return [(results | unstarted)[job.index] for job in runs]

    def _start(
        self,
        job: Job,
        children: list[_Child],
        events: queue.SimpleQueue[_Child | signal.Signals],
        shown: Progress,
        results: dict[int, RunResult],
    ) -> None:
        gpu = self._gpu_for(job, children)
        environment = job.process_environment("local") | {"PTH_LAUNCHER_PID": str(os.getpid())}
        if gpu is not None and not job.device.startswith("cuda:"):  # a numbered device counts among all visible ones
            environment["CUDA_VISIBLE_DEVICES"] = gpu
        shown.start(job)
        try:
            with (job.run_dir / LOG).open("ab") as log:
                process = subprocess.Popen(
                    job.command(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,  # Ctrl-C reaches the launcher alone, which then asks each worker
                )
        except OSError as error:
            results[job.index] = result = RunResult(job.index, job.label, State.FAILED, f"could not be started: {error}", "")
            shown.end(job, result)
            return
        child = _Child(job, process, gpu)
        children.append(child)

        def wait() -> None:
            process.wait()
            events.put(child)

        threading.Thread(target=wait, name=f"run-{job.index}", daemon=True).start()

    def _next(self, waiting: Sequence[Job], children: Sequence[_Child]) -> Job | None:
        """The first waiting run that there is room for."""
        if self._slots is not None and len(children) >= self._slots:
            return None
        if children and waiting and not self._memory_suffices(children):
            return None
        return next((job for job in waiting if self._has_room(job, children)), None)

    def _has_room(self, job: Job, children: Sequence[_Child]) -> bool:
        if self._takes_gpu(job):
            return self._gpu_for(job, children) is not None
        if self._slots is not None or not children:
            return True
        return sum(c.job.threads for c in children if c.gpu is None) + job.threads <= machine.cores()

    def _takes_gpu(self, job: Job) -> bool:
        kind, _, number = job.device.partition(":")
        return kind in ("auto", "cuda") and bool(self._gpus) and (not number or int(number) < len(self._gpus))

    def _gpu_for(self, job: Job, children: Sequence[_Child]) -> str | None:
        """The least busy GPU that the run may use; ``None`` when it uses none, or all are taken."""
        if not self._takes_gpu(job):
            return None
        number = job.device.partition(":")[2]
        busy = Counter(child.gpu for child in children)
        gpu = min([self._gpus[int(number)]] if number else self._gpus, key=lambda gpu: busy[gpu])
        return gpu if busy[gpu] < math.ceil((self._slots or 1) / len(self._gpus)) else None

    def _memory_suffices(self, children: Sequence[_Child]) -> bool:
        need = self._need or max(self._largest, _LEAST_NEED)
        promised = sum(max(0, need - machine.resident_memory(child.process.pid)) for child in children)
        return machine.available_memory() - promised >= need

    def _watch_memory(self, children: Sequence[_Child]) -> None:
        self._largest = max([self._largest, *(machine.resident_memory(child.process.pid) for child in children)])


def _result(child: _Child) -> RunResult:
    """What became of a run whose worker has ended; records what the worker could not."""
    job, code = child.job, child.process.returncode
    tail = log_tail(job.run_dir)
    state, message = lifecycle.state(job.run_dir)
    if state is State.LOST:
        how = f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"
        hint = "; the kernel does so when memory runs out" if code == -signal.SIGKILL else ""
        message = f"its worker ended by {how} without a last word{hint}"
        lifecycle.note(job.run_dir, state, "launcher", message)
    elif state in (State.FROZEN, State.QUEUED):
        state, message = State.FAILED, tail.rpartition("\n")[2] or f"its worker ended with exit code {code}"
        lifecycle.note(job.run_dir, state, "launcher", message)
    return RunResult(job.index, job.label, state, message, tail)


def _stop(children: Sequence[_Child], kill: bool) -> None:
    for child in children:
        if child.process.poll() is not None:
            continue
        if kill:
            os.killpg(child.process.pid, signal.SIGKILL)  # its own session: the worker and what it started, nobody else
        else:
            child.process.terminate()


def _explain(received: signal.Signals, interrupts: int, children: int) -> str:
    if interrupts == 1:
        return f"{received.name}: {children} runs checkpoint at their next update and stop; once more kills them"
    return f"{received.name} again: {children} runs killed; their last checkpoints hold"


@contextmanager
def _signals_into(events: queue.SimpleQueue[_Child | signal.Signals]) -> Iterator[None]:
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
