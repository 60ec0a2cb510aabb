"""Runs as jobs of a SLURM cluster: a job array a sweep, submitted through submitit."""

from __future__ import annotations

import importlib.util
import queue
import shlex
import signal
import sys
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from pth_exp import lifecycle
from pth_exp.exits import HELD
from pth_exp.interpreters import NoInterpreter
from pth_exp.launchers import sbatch, slurm_client
from pth_exp.launchers.interrupts import explain, signals_into
from pth_exp.launchers.place import Job, RunResult, exit_text, outcome
from pth_exp.launchers.progress import Progress, progress
from pth_exp.launchers.slurm_client import Queued, SlurmError
from pth_exp.launchers.slurm_job import SlurmRun
from pth_exp.launchers.slurm_settings import SlurmSettings, flags, job_name
from pth_exp.lifecycle import State
from pth_exp.refusal import refuse

INSTALL = "pip install 'pth-exp[slurm]'"
FOLDER = "slurm"
"""In the sweep's directory: what submitit writes, and what jobs print beside their runs' logs."""
MOST_IN_AN_ARRAY = 1000
"""SLURM's own limit, MaxArraySize, is 1001 unless a cluster says otherwise."""
_REFRESH_SECONDS = 0.5

Event = signal.Signals | dict[str, Queued] | SlurmError


@dataclass(slots=True)
class Flight:
    """A run whose job SLURM has.

    Attributes:
        reason: why it waits.
        missing: looks at the queue since it was last seen there.
        waits: it does not run yet, or has been requeued.
        withdrawn: cancelled by this launcher while it waited.
    """

    job: Job
    job_id: str
    started: bool = False
    reason: str = ""
    missing: int = 0
    waits: bool = True
    withdrawn: bool = False


class SlurmPlace:
    """Every run a job, all of a sweep one array; what becomes of them is read from the queue and from the runs' directories.

    Ctrl-C asks running workers to stop at their next update, with a checkpoint, and takes waiting jobs back; a second one cancels
    all. When the terminal goes, or this process is killed, the jobs go on, and `pth resume` follows them again.

    The settings are those of ``conf/hydra/launcher/pth_slurm.yaml``. Raises ``Refusal`` for a value that cannot work, and for
    what this cluster's sbatch refuses.
    """

    def __init__(self, stream: TextIO | None = None, **settings: Any) -> None:
        if importlib.util.find_spec("submitit") is None:
            remedy = f"{INSTALL}; or let `pth sbatch` write a script that needs no submitit"
            raise refuse("hydra/launcher", "pth_slurm", "needs submitit, which is not installed here", remedy)
        self._settings = SlurmSettings(**settings)
        if absent := slurm_client.missing():
            why = f"needs SLURM's commands, and {', '.join(absent)} cannot be found"
            raise refuse("hydra/launcher", "pth_slurm", why, "start it on a login node of the cluster")
        self._stream = stream or sys.stdout
        try:
            probe = Job(0, "probe", Path(), Path(), "", device="cpu")
            slurm_client.would_take(flags(self._settings.options(probe)))
        except SlurmError as error:
            remedy = f"correct one of launcher.{', '.join(_ASKED)}, additional_parameters"
            raise refuse("launcher", _told(settings), f"sbatch refuses it: {error}", remedy) from None

    def dispatch(self, runs: Sequence[Job]) -> list[RunResult]:
        """Submit the runs and wait for them, unless ``wait`` is false; results in the order given. Raises ``Refusal``."""
        for run in runs:
            self._settings.require(run)
        if not runs:
            return []
        results: dict[int, RunResult] = {}
        with progress(runs, self._stream) as shown:
            try:
                flights = self._adopt(runs, shown)
            except SlurmError as error:
                why = f"nothing was submitted: {error}"
                return [RunResult(run.index, run.label, lifecycle.state(run.run_dir)[0], why, "") for run in runs]
            flying = {flight.job.index for flight in flights}
            for jobs in self._arrays([run for run in runs if run.index not in flying]):
                try:
                    flights += self._submit(jobs, shown)
                except (SlurmError, NoInterpreter) as error:
                    results |= {job.index: _failed(job, str(error)) for job in jobs}
            if self._settings.wait:
                results |= _Sweep(flights, _names(runs[0].run_dir.parent), self._settings.poll_seconds, shown).fly()
        ids = {flight.job.index: flight.job_id for flight in flights}
        return [
            results.get(run.index) or RunResult(run.index, run.label, State.QUEUED, f"job {ids[run.index]}", "", left=True)
            for run in runs
        ]

    def _adopt(self, runs: Sequence[Job], shown: Progress) -> list[Flight]:
        """Follow the jobs of an earlier launch that still wait instead of submitting theirs again. Raises `SlurmError`."""
        attempts = [lifecycle.newest_attempt(run.run_dir) for run in runs]
        waiting = waiting_jobs(runs)
        for run, attempt in zip(runs, attempts, strict=True):
            if run.index in waiting and lifecycle.status(run.run_dir).job_id != waiting[run.index]:  # submitted by hand
                lifecycle.note(run.run_dir, State.QUEUED, "launcher", job_id=waiting[run.index], after=attempt)
        flights = [Flight(run, waiting[run.index]) for run in runs if run.index in waiting]
        for flight in flights:
            shown.message(f"[{flight.job.index}] {flight.job.label}  job {flight.job_id} is in the queue already; following it")
        return flights

    def _arrays(self, runs: Sequence[Job]) -> Iterable[list[Job]]:
        """Runs that ask for the same, in portions that one array holds."""
        for jobs in self._settings.alike(runs):
            for first in range(0, len(jobs), MOST_IN_AN_ARRAY):
                yield jobs[first : first + MOST_IN_AN_ARRAY]

    def _submit(self, jobs: Sequence[Job], shown: Progress) -> list[Flight]:
        """Raises `SlurmError`, `NoInterpreter`."""
        import submitit
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        folder = jobs[0].run_dir.parent / FOLDER
        work = [SlurmRun.of(job, self._settings) for job in jobs]
        executor = submitit.SlurmExecutor(folder=folder, python=shlex.join([sys.executable, "-P"]))
        options = self._settings.options(jobs[0])
        executor.update_parameters(
            job_name=job_name(jobs[0].run_dir.parent),
            time=options.pop("time"),
            signal_delay_s=self._settings.signal_delay_s,
            setup=list(self._settings.setup) or None,
            srun_args=self._settings.step(jobs[0])[1:],
            array_parallelism=self._settings.array_parallelism or len(jobs),
            stderr_to_stdout=True,
            additional_parameters={name: value for name, value in options.items() if name != "signal"},
        )
        attempts = [lifecycle.newest_attempt(job.run_dir) for job in jobs]
        try:
            with executor.batch():
                submitted = [executor.submit(run) for run in work]
        except (FailedSubmissionError, FailedJobError, OSError) as error:
            raise SlurmError(f"sbatch did not take the job: {_last_line(error)}") from error
        flights = [Flight(job, handle.job_id) for job, handle in zip(jobs, submitted, strict=True)]
        for flight, attempt in zip(flights, attempts, strict=True):
            lifecycle.note(flight.job.run_dir, State.QUEUED, "launcher", job_id=flight.job_id, after=attempt)
        array = submitted[0].job_id.partition("_")[0]
        asked = ", ".join(f"{name} {value}" for name, value in self._settings.options(jobs[0]).items() if name in _SHOWN)
        shown.message(f"submitted {len(jobs)} run{'s' * (len(jobs) != 1)} as job {array}: each {asked}")
        return flights


class _Sweep:
    """The flight of a sweep's jobs."""

    def __init__(self, flights: Sequence[Flight], names: Collection[str], poll_seconds: float, shown: Progress) -> None:
        self._flying = {flight.job_id: flight for flight in flights}
        self._names, self._poll_seconds, self._shown = names, poll_seconds, shown
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._results: dict[int, RunResult] = {}
        self._interrupts = 0
        self._silent = ""
        self._done = threading.Event()

    def fly(self) -> dict[int, RunResult]:
        """Results of the runs that have ended, or were never started; the others go on without this process."""
        with signals_into(self._events):
            threading.Thread(target=self._poll, name="slurm poller", daemon=True).start()
            try:
                while self._flying:
                    try:
                        event = self._events.get(timeout=_REFRESH_SECONDS)
                    except queue.Empty:
                        self._shown.refresh()
                        continue
                    if event is signal.SIGHUP:
                        break
                    self._hear(event)
            finally:
                self._done.set()
        return self._results

    def _poll(self) -> None:
        """Ask for the queue; a thread, because a controller that is down answers late."""
        while True:
            try:
                self._events.put(slurm_client.queue([*self._flying], self._names))
            except SlurmError as error:
                self._events.put(error)
            if self._done.wait(self._poll_seconds):
                return

    def _hear(self, event: Event) -> None:
        if isinstance(event, SlurmError):
            if str(event) != self._silent:
                self._silent = str(event)
                self._shown.message(f"SLURM does not answer: {event}; the jobs go on, asking again")
        elif isinstance(event, signal.Signals):
            self._interrupt(event)
        else:
            self._silent = ""
            for flight in [*self._flying.values()]:
                self._look(flight, event.get(flight.job_id))

    def _look(self, flight: Flight, queued: Queued | None) -> None:
        state = lifecycle.state(flight.job.run_dir)[0]
        if state is not State.QUEUED and not flight.started and not (queued and queued.waits):
            flight.started = True
            self._shown.start(flight.job)
        if queued is None:
            flight.missing += 1
            if flight.missing > 1 and state is not State.RUNNING:
                self._end(flight, self._vanished(flight, state))
            return
        flight.missing, flight.waits = 0, queued.waits
        if queued.ended:
            self._end(flight, self._outcome(flight, queued))
        elif queued.reason != flight.reason and queued.waits:
            flight.reason = queued.reason
            if queued.reason not in _PATIENCE:
                self._shown.message(f"[{flight.job.index}] {flight.job.label}  job {flight.job_id} waits: {queued.reason}")

    def _vanished(self, flight: Flight, state: State) -> RunResult:
        """SLURM forgets a job some minutes after its end; one of an array that is cancelled while it waits, at once."""
        if flight.withdrawn:
            return _withdrawn(flight.job)
        if state in (State.QUEUED, State.FROZEN):
            return _failed(flight.job, f"job {flight.job_id} was cancelled before it began")
        return outcome(flight.job, f"job {flight.job_id}, which SLURM no longer knows,")

    def _outcome(self, flight: Flight, queued: Queued) -> RunResult:
        if flight.withdrawn:
            return _withdrawn(flight.job)
        status = lifecycle.status(flight.job.run_dir)
        if status.state is State.RUNNING and status.job_id != flight.job_id:
            return outcome(flight.job, exit_text(HELD))
        if status.state in (State.QUEUED, State.FROZEN) and queued.state == "CANCELLED":
            return _failed(flight.job, f"job {flight.job_id} was cancelled before it began")
        hint = _HINTS.get(queued.state, "")
        result = outcome(flight.job, f"SLURM's {queued.state}{hint}")
        if queued.state == "CANCELLED" and result.state is State.PREEMPTED:
            return RunResult(result.index, result.label, result.state, "cancelled in SLURM, with a checkpoint", result.log_tail)
        return result

    def _interrupt(self, received: signal.Signals) -> None:
        self._interrupts += 1
        flights = [*self._flying.values()]
        started = [flight for flight in flights if flight.started and not flight.waits]
        cancelled = flights if self._interrupts > 1 else [flight for flight in flights if flight not in started]
        for flight in flights:
            if flight not in started:
                flight.withdrawn = True
            elif self._interrupts == 1:
                lifecycle.ask_to_stop(flight.job.run_dir, flight.job_id, f"{received.name} received by the launcher")
        try:
            slurm_client.cancel([flight.job_id for flight in cancelled])
        except SlurmError as error:
            self._shown.message(f"could not be cancelled: {error}")
        self._shown.message(explain(received, self._interrupts, len(started)))

    def _end(self, flight: Flight, result: RunResult) -> None:
        del self._flying[flight.job_id]
        self._results[flight.job.index] = result
        if not flight.started:
            self._shown.start(flight.job)
        self._shown.end(flight.job, result)


def waiting_jobs(jobs: Sequence[Job]) -> dict[int, str]:
    """By the run's number, the job that SLURM has for a run of a sweep that is not running: queued, or requeued, or of a script.

    Raises `SlurmError` when it does not answer.
    """
    if not jobs:
        return {}
    sweep = jobs[0].run_dir.parent
    script = sbatch.name_of(sweep)
    waiting = slurm_client.waiting_tasks(script) if script is not None else {}
    found = {job.index: lifecycle.status(job.run_dir) for job in jobs}
    ids = {index: status.job_id for index, status in found.items() if status.job_id and status.state in _MAY_WAIT}
    known = slurm_client.queue([*filter(slurm_client.is_job_id, ids.values())], _names(sweep))
    for index, job_id in ids.items():
        queued = known.get(job_id)
        if queued is not None and (queued.waits or (found[index].state is State.QUEUED and not queued.ended)):
            waiting[index] = job_id
    return {index: job_id for index, job_id in waiting.items() if index in found}


def not_waiting(jobs: Sequence[Job], stream: TextIO) -> list[Job]:
    """The runs that no job of SLURM's waits for; what is left out is said.

    For what would start them elsewhere. A queue that cannot be asked holds nothing up: the lease lets one worker run a run.
    """
    try:
        waiting = waiting_jobs(jobs)
    except SlurmError as error:
        print(f"whether jobs of SLURM wait for these runs cannot be told: {error}", file=stream)
        return [*jobs]
    for job in jobs:
        if (job_id := waiting.get(job.index)) is not None:
            print(
                f"[{job.index}] {job.label}  job {job_id} is in SLURM's queue; left to it, or `scancel {job_id}` first",
                file=stream,
            )
    return [job for job in jobs if job.index not in waiting]


def _names(sweep: Path) -> list[str]:
    """What jobs of the sweep are called: those of this launcher, and those of a script."""
    return [name for name in (job_name(sweep), sbatch.name_of(sweep)) if name is not None]


def _withdrawn(job: Job) -> RunResult:
    return RunResult(job.index, job.label, State.QUEUED, "taken back while it waited", "")


def _failed(job: Job, why: str) -> RunResult:
    lifecycle.note(job.run_dir, State.FAILED, "launcher", why)
    return RunResult(job.index, job.label, State.FAILED, why, "")


def _told(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={settings[name]}" for name in _ASKED if settings.get(name) is not None)


def _last_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


_MAY_WAIT = (State.QUEUED, State.PREEMPTED)
_ASKED = ("partition", "account", "qos", "constraint", "nodes", "cpus_per_task", "gpus_per_node", "mem_gb", "timeout_min")
_SHOWN = ("partition", "nodes", "cpus-per-task", "gpus-per-node", "mem", "time")
_PATIENCE = ("", "Priority", "Resources", "JobArrayTaskLimit", "BeginTime", "None", "Cleaning")
"""Reasons to wait that pass by themselves."""
_HINTS = {
    "TIMEOUT": "; an update and a checkpoint must fit between the warning and the end: give launcher.signal_delay_s more",
    "OUT_OF_MEMORY": "; give launcher.mem_gb more",
}
