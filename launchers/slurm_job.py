"""What a SLURM job executes: one run's worker, stopped at the warning signal, and the job put back into the queue.

The worker gets the frozen file and its hash, and nothing else decides what it does. SLURM signals every process of a job's
step. SIGUSR2, the warning before the time limit, is this process's to hear: workers start with it ignored, and are asked by
SIGTERM to stop at their next update, with a checkpoint. SIGTERM comes from SLURM when a job is preempted or cancelled; the
controller says which.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from pth_exp import leftovers, lifecycle
from pth_exp.exits import PREEMPTED
from pth_exp.launchers import slurm_client, slurm_ray
from pth_exp.launchers.place import LOG, Job
from pth_exp.launchers.slurm_settings import SlurmSettings
from pth_exp.lifecycle import State
from pth_exp.records.fields import segment_name

_WAIT_SECONDS = 1.0


@dataclass(frozen=True)
class SlurmRun:
    """One run, as its job executes it.

    Attributes:
        run_dir: the run's directory.
        command: the worker's command line.
        variables: the environment that it starts with, on top of the job's.
        folder: where it starts.
        requeue: whether a job that is stopped goes back into the queue.
        ray_python: verl's interpreter, a container's command line before it perhaps, for a job of several nodes: Ray joins them.
        ray_gpus: that each of these is to have; None for those that it has.
    """

    run_dir: Path
    command: Sequence[str]
    variables: Mapping[str, str]
    folder: str
    requeue: bool
    ray_python: Sequence[str] | None = None
    ray_gpus: int | None = None

    @classmethod
    def of(cls, job: Job, settings: SlurmSettings) -> SlurmRun:
        """Raises `NoInterpreter`."""
        variables, folder = job.variables("slurm"), os.getcwd()
        return cls(job.run_dir.absolute(), settings.command(job), variables, folder, settings.requeue, **settings.ray(job))

    def __call__(self) -> None:
        """Raises SystemExit with the worker's exit code when the run did not complete."""
        code = self.run()
        if code:
            sys.exit(code)

    def run(self) -> int:
        """Execute the run; 0 when it is completed."""
        if self.ray_python is not None and not slurm_ray.is_first():
            return slurm_ray.join(self.ray_python, self.run_dir)
        job_id = this_job()
        self._wait_for_own_attempt(job_id)
        if lifecycle.state(self.run_dir)[0] is State.COMPLETED:  # it ended while SLURM was stopping it
            print(f"{self.run_dir} is completed; it is not run again")
            return 0
        earlier, worker = lifecycle.newest_attempt(self.run_dir), _Worker()
        try:
            with ExitStack() as cluster:
                code = worker.run(lambda: self._start(job_id, cluster))
        except slurm_ray.NoCluster as error:
            lifecycle.note(self.run_dir, State.FAILED, "job", str(error), job_id)
            print(error, file=sys.stderr)
            return 1
        leftovers.clear(self.run_dir)
        stopped = code == PREEMPTED or code < 0  # by itself it would have ended otherwise
        if worker.received and stopped and lifecycle.state(self.run_dir)[0] is not State.COMPLETED:
            self._put_back(job_id, signal.SIGUSR2 in worker.received, earlier)
        return code if code >= 0 else 128 - code

    def _start(self, job_id: str, cluster: ExitStack) -> subprocess.Popen[bytes]:
        """Raises `NoCluster`."""
        more: Mapping[str, str] = {}
        if self.ray_python is not None:
            more = cluster.enter_context(slurm_ray.head(self.ray_python, self.run_dir, self.ray_gpus))
        with (self.run_dir / LOG).open("ab") as log:
            return subprocess.Popen(
                self.command,
                cwd=self.folder,
                env={**os.environ, **self.variables, **more, "PTH_JOB_ID": job_id},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=_ignore_the_warning,
            )

    def _wait_for_own_attempt(self, job_id: str) -> None:
        """SLURM runs a job once at a time: its attempt that still seems to run is of a node that has failed."""
        while (found := lifecycle.status(self.run_dir)).state is State.RUNNING and found.job_id == job_id:
            time.sleep(_WAIT_SECONDS)

    def _put_back(self, job_id: str, warned: bool, earlier: int) -> None:
        """Requeue the job if SLURM needs its place or its time is up, and not if somebody has cancelled it."""
        try:
            fate = slurm_client.fate(job_id)
            if fate == "preempted":
                why = "preempted"
            elif fate == "running" and warned:
                why = "the time limit is near"
            else:
                return
            if not self.requeue:
                return
            if fate == "running" and not self._has_done_an_update(earlier):
                reason = "the time limit came before an update was done; give launcher.timeout_min more"
                lifecycle.note(self.run_dir, State.FAILED, "job", reason, job_id)
                return
            lifecycle.note(self.run_dir, State.QUEUED, "job", f"requeued: {why}", job_id)
            slurm_client.requeue(job_id)
        except slurm_client.SlurmError as error:
            lifecycle.note(self.run_dir, State.PREEMPTED, "job", f"could not be requeued: {error}", job_id)

    def _has_done_an_update(self, earlier: int) -> bool:
        attempt = lifecycle.newest_attempt(self.run_dir)
        segment = self.run_dir / segment_name("updates", attempt)
        return attempt > earlier and segment.exists() and segment.stat().st_size > 0


class _Worker:
    """The worker's process, and the signals that this one receives meanwhile: each has the worker stop at its next update."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, start: Callable[[], subprocess.Popen[bytes]]) -> int:
        for number in (signal.SIGUSR2, signal.SIGTERM):  # for good: a late one must not keep the job from being requeued
            signal.signal(number, self._hear)
        self._process = start()
        if self.received:
            self._process.terminate()
        return self._process.wait()

    def _hear(self, number: int, _frame: FrameType | None) -> None:
        self.received.append(number)
        os.write(1, f"{signal.Signals(number).name} received: the run is to checkpoint at its next update and stop\n".encode())
        if self._process is not None:
            self._process.terminate()


def _ignore_the_warning() -> None:
    """Inherited by everything that the worker starts."""
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def this_job() -> str:
    """The id of the job that this process is in, as squeue shows it: ``123``, or ``123_4`` of an array."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ["SLURM_JOB_ID"]
