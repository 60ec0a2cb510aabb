"""Where runs execute. A place starts workers by their command line and never imports them."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TextIO

from pth_exp import leftovers, lifecycle
from pth_exp.exits import HELD
from pth_exp.freeze import FrozenRun
from pth_exp.interpreters import interpreter
from pth_exp.launchers import memory
from pth_exp.lifecycle import State

WORKER = ("-P", "-m", "pth_exp.worker")
"""What the stack's interpreter is given. -P: files of the folder the sweep was started in (a study, another checkout) do not
stand in for modules."""

LOG = "log.txt"
"""A run's stdout and stderr, in its directory; attempts append."""

_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
_GLIBC = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
"""glibc gives every freed tensor back to the kernel unless told otherwise; keeping them spares a quarter of an update's time."""


@dataclass(frozen=True, slots=True)
class Job:
    """One run to execute.

    Attributes:
        index: its number in the sweep.
        label: how people call it.
        run_dir: its directory.
        frozen: its frozen file.
        sha256: the hash that the worker verifies.
        environment: the frozen environment.
        updates: how many updates it has, for progress.
        threads: CPU threads that it may use.
        device: ``stack.device``: auto, cpu, cuda or cuda:N.
        stack: name of the stack.
        ranks: GPUs that its learner takes.
        ray_address: ``stack.ray_address``, where a verl run is to join a cluster that is there.
        python: ``stack.python``, where a stack has an interpreter of its own.
        memory: bytes of the machine's memory that a verl job is estimated to take, on a CPU or beside its GPUs.
    """

    index: int
    label: str
    run_dir: Path
    frozen: Path
    sha256: str
    environment: Mapping[str, str] = field(default_factory=dict)
    updates: int | None = None
    threads: int = 1
    device: str = "auto"
    stack: str = "trainer"
    ranks: int = 1
    ray_address: str | None = None
    python: str | None = None
    memory: int = 0

    @property
    def alone(self) -> bool:
        """Whether nothing may run beside it: a verl job takes all the GPUs, or the memory, that there is."""
        return self.stack == "verl"

    @classmethod
    def of(cls, run: FrozenRun) -> Job:
        stack = run.config_values["stack"]
        return cls(
            index=run.run["index"],
            label=run.run["label"],
            run_dir=run.path.parent,
            frozen=run.path,
            sha256=run.sha256,
            environment=run.environment,
            updates=run.config_values["updates"],
            threads=stack.get("threads", 1),
            device=stack.get("device", "auto"),
            stack=stack["name"],
            ranks=stack.get("ranks", 1),
            ray_address=stack.get("ray_address"),
            python=stack.get("python"),
            memory=memory.of_verl_job(run),
        )

    def command(self) -> list[str]:
        """Raises ``NoInterpreter``."""
        return [
            str(interpreter(self.stack, self.python)),
            *WORKER,
            "--frozen",
            str(self.frozen.absolute()),
            "--sha256",
            self.sha256,
        ]

    def variables(self, place: str) -> dict[str, str]:
        """What a worker's process must start with: it is too late for threads and the allocator once it runs."""
        threads = dict.fromkeys(_THREAD_VARIABLES, str(self.threads))
        return {**_GLIBC, **threads, **self.environment, "PTH_PLACE": place}

    def process_environment(self, place: str) -> dict[str, str]:
        """The same on top of this process's own environment."""
        return {**os.environ, **self.variables(place)}


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run stood when its place was done with it.

    Attributes:
        state: COMPLETED, FAILED, PREEMPTED, LOST; QUEUED when it never started; RUNNING when another place's worker has it.
        message: one sentence.
        log_tail: the last lines of its log.
        left: nobody waits for it here: QUEUED, its job goes on; FROZEN, nothing was started.
    """

    index: int
    label: str
    state: State
    message: str
    log_tail: str
    left: bool = False


class Place(Protocol):
    def dispatch(self, runs: Sequence[Job]) -> list[RunResult]:
        """Execute the runs and return their results in the same order; one run's failure never stops another."""
        ...


def exit_text(code: int) -> str:
    """How a process ended, from what ``Popen.returncode`` says."""
    return f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"


def outcome(job: Job, how: str) -> RunResult:
    """What became of a run whose worker has ended by ``how``; records what the worker could not."""
    leftovers.clear(job.run_dir)
    tail = log_tail(job.run_dir)
    state, message = lifecycle.state(job.run_dir)
    hint = "; the kernel does so when memory runs out" if "SIGKILL" in how else ""
    if state is State.RUNNING and how == exit_text(HELD):
        message = f"another worker has it: {message}"
    elif state in (State.LOST, State.RUNNING):  # a worker of another machine seems to run until its heartbeat has aged
        state, message = State.LOST, f"its worker ended by {how} without a last word{hint}"
        lifecycle.note(job.run_dir, state, "launcher", message)
    elif state in (State.FROZEN, State.QUEUED):
        before = f"its worker ended by {how} before it began{hint}"
        if "SIGTERM" in how or "SIGINT" in how:  # it was asked to stop before it could hear that
            state, message = State.PREEMPTED, before
        elif "SIGKILL" in how:
            state, message = State.LOST, before
        else:
            state, message = State.FAILED, tail.rpartition("\n")[2] or before
        lifecycle.note(job.run_dir, state, "launcher", message)
    return RunResult(job.index, job.label, state, message, tail)


_LEFT = {State.QUEUED: "submitted", State.FROZEN: "frozen"}


def conclude(results: Sequence[RunResult], sweep_dir: Path, stream: TextIO) -> int:
    """Say how a sweep ended, each run that did not complete by name with the last lines of its log; the exit code, 0 or 1."""
    ended = [result for result in results if not result.left]
    bad = [result for result in ended if result.state is not State.COMPLETED]
    for result in bad:
        if result.state is State.QUEUED:
            continue
        print(f"\n[{result.index}] {result.label}: {result.state}: {result.message}", file=stream)
        for line in result.log_tail.splitlines():
            print(f"    | {line}", file=stream)
    counts = [f"{n} {state.lower()}" for state in State if (n := sum(r.state is state for r in ended))]
    left = {result.state for result in results if result.left}
    counts += [f"{sum(r.left and r.state is state for r in results)} {_LEFT[state]}" for state in left]
    print(f"\n{len(results)} run{'s' * (len(results) != 1)}: {', '.join(counts)}. Records: {sweep_dir}", file=stream)
    if State.QUEUED in left:
        print(f"See where they stand with: pth status {sweep_dir}", file=stream)
    if State.FROZEN in left:
        print(f"Start them with: pth resume {sweep_dir} --launcher NAME, or pth sbatch {sweep_dir}", file=stream)
    if bad:
        print(f"Go on with: pth resume {sweep_dir}", file=stream)
    return 1 if bad else 0


def log_tail(run_dir: Path, lines: int = 12) -> str:
    """The last lines of a run's log."""
    try:
        with (run_dir / LOG).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
    except FileNotFoundError:
        return ""
