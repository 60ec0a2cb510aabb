"""Runs as jobs of a Ray cluster: one that is there, or a head of the launcher's own."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import queue
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from pth_exp import lifecycle, machine
from pth_exp.interpreters import NoInterpreter, interpreter
from pth_exp.launchers.interrupts import explain, signals_into
from pth_exp.launchers.place import LOG, Job, RunResult, exit_text, outcome
from pth_exp.launchers.progress import Progress, progress
from pth_exp.launchers.ray_head import START_SECONDS, Head, HeadFailed
from pth_exp.launchers.ray_jobs import Jobs, NotConnected, Report
from pth_exp.launchers.secrets import looks_secret
from pth_exp.lifecycle import State
from pth_exp.refusal import refuse

INSTALL = "pip install 'pth-exp[ray]'"
VERL_CPUS = 16
"""Logical CPUs that verl's processes ask Ray for, besides the worker's; they are not what they use."""
_GIB = 1 << 30
_POLL_SECONDS = 1.0
_REFRESH_SECONDS = 0.5
_NO_AGENT = "No available agent"
"""What a head says that is up, but not yet ready to take jobs."""
_TAKEN = "already exists"
"""What it says of an id that it has."""
_GAVE_UP = "Job supervisor actor failed to start within"
"""What Ray says of a job that it has not started within its own limit, a quarter of an hour unless the cluster has another."""


@dataclass(slots=True)
class Flight:
    """A job that has been submitted and has not ended.

    Attributes:
        submitted: when, by the monotonic clock.
        started: whether Ray has started it.
    """

    job: Job
    job_id: str
    submitted: float = field(default_factory=time.monotonic)
    started: bool = False


@dataclass(frozen=True, slots=True)
class Lost:
    """The cluster is gone, and why."""

    why: str


Event = signal.Signals | tuple[Flight, Report] | Lost


class RayPlace:
    """Every run a job of Ray's, with an id of its own: ``pth-<sweep>-<run>-<attempt>``.

    Only one job at a time waits in Ray's own queue; the rest wait here, and a verl run has the cluster to itself. Ctrl-C asks the
    workers to stop at their next update, with a checkpoint; a second one has Ray end them. Should this process be killed, runs on
    an existing cluster go on, and those on a head of its own end at their next update, and the head with them.

    The arguments are those of ``conf/hydra/launcher/pth_ray.yaml``. Raises ``Refusal`` for a value that cannot work, and for a
    cluster that does not answer, or not to this token.
    """

    def __init__(
        self,
        address: str | None = None,
        token_env: str | None = None,
        slots: int | None = None,
        num_cpus: float | None = None,
        num_gpus: float | None = None,
        memory_gb: float | None = None,
        resources: Mapping[str, float] | None = None,
        env_vars: Mapping[str, str] | None = None,
        connect_timeout: float = 15.0,
        start_timeout: float = 600.0,
        silence_timeout: float = 60.0,
        stream: TextIO | None = None,
    ) -> None:
        if importlib.util.find_spec("ray") is None:
            raise refuse("hydra/launcher", "pth_ray", "needs Ray, which is not installed here", INSTALL)
        if slots is not None and (type(slots) is not int or slots < 1):
            raise refuse("launcher.slots", slots, "leaves no run a place", "give a whole number of at least 1, or null")
        for name, seconds in (("connect", connect_timeout), ("start", start_timeout), ("silence", silence_timeout)):
            if type(seconds) not in (int, float) or not seconds > 0:
                raise refuse(f"launcher.{name}_timeout", seconds, "is no time to wait", "give seconds, more than 0")
        for name in env_vars or {}:
            if looks_secret(name):
                remedy = "have the cluster's own environment hold it"
                raise refuse("launcher.env_vars", name, "would be shown by Ray to everyone who may see the job", remedy)
        self._address, self._slots = address, slots
        self._num_cpus, self._num_gpus, self._memory_gb = num_cpus, num_gpus, memory_gb
        self._resources = dict(resources or {})
        self._variables = {name: str(value) for name, value in (env_vars or {}).items()}
        self._start_timeout, self._silence_timeout, self._connect_timeout = start_timeout, silence_timeout, connect_timeout
        self._stream = stream or sys.stdout
        self._existing = None if address is None else _connect(address, token_env, connect_timeout)

    def dispatch(self, runs: Sequence[Job]) -> list[RunResult]:
        """Execute the runs; results in the order given, QUEUED for those that Ctrl-C or the cluster's end kept from starting."""
        if not runs:
            return []
        for run in runs:
            lifecycle.note(run.run_dir, State.QUEUED, "launcher")
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        with progress(runs, self._stream) as shown, signals_into(events):
            try:
                with self._cluster(runs, events, shown) as jobs:
                    results = _Sweep(self, jobs, runs, events, shown).fly()
            except (HeadFailed, NoInterpreter, NotConnected) as error:
                results = {}
                for run in runs:
                    lifecycle.note(run.run_dir, State.FAILED, "launcher", str(error))
                    results[run.index] = RunResult(run.index, run.label, State.FAILED, str(error), "")
        unstarted = {run.index: RunResult(run.index, run.label, State.QUEUED, "not started", "") for run in runs}
        return [(unstarted | results)[run.index] for run in runs]

    @contextmanager
    def _cluster(self, runs: Sequence[Job], events: queue.SimpleQueue[Event], shown: Progress) -> Iterator[Jobs]:
        if self._existing is not None:
            yield self._existing
            return
        verl = [run for run in runs if run.stack == "verl"]
        cores, gpus = machine.cores(), len(machine.visible_gpus())
        settings: dict[str, Any] = {
            "num_cpus": max([cores, *(VERL_CPUS + run.threads for run in verl)]),
            "num_gpus": max(
                [gpus, *(run.ranks for run in verl)]
            ),  # stand-ins on a machine without: verl places its workers by GPU
        }
        if not verl:
            settings["object_store_memory"] = 100_000_000  # bytes; a trainer run keeps nothing there
        self._slots = self._slots or cores
        python = interpreter(verl[0].stack, verl[0].python) if verl else Path(sys.executable)
        shown.message(f"starting a Ray head on this machine: {settings['num_cpus']} logical CPUs, {settings['num_gpus']} GPUs")
        head = Head(
            python,
            settings,
            runs[0].run_dir.parent / "ray-head.log",
            lambda why: events.put(Lost(f"the Ray head has ended: {why}")),
        )
        try:
            yield Jobs(head.address, head.token, START_SECONDS)
        finally:
            head.close()

    def need(self, job: Job, cluster: Mapping[str, float]) -> dict[str, Any]:
        """What a run's worker asks Ray for; a verl run's other processes ask for themselves."""
        gpus = self._num_gpus
        if gpus is None:
            there = len(machine.visible_gpus()) if self._existing is None else cluster.get("GPU", 0)
            gpus = float(job.stack != "verl" and job.device != "cpu" and there > 0)
        need: dict[str, Any] = {"num_cpus": job.threads if self._num_cpus is None else self._num_cpus}
        if gpus:
            need["num_gpus"] = gpus
        if self._memory_gb:
            need["memory"] = int(self._memory_gb * _GIB)
        if self._resources:
            need["resources"] = self._resources
        return need

    def variables(self, job: Job, job_id: str) -> dict[str, str]:
        own = {"PTH_JOB_ID": job_id, "PTH_RAY_ADDRESS": "auto"}
        return {**self._variables, **job.variables("ray"), **own}


class _Sweep:
    """The flight of one sweep's runs."""

    def __init__(
        self, place: RayPlace, jobs: Jobs, runs: Sequence[Job], events: queue.SimpleQueue[Event], shown: Progress
    ) -> None:
        self._place, self._jobs, self._events, self._shown = place, jobs, events, shown
        self._waiting = list(runs)
        self._flying: dict[str, Flight] = {}
        self._results: dict[int, RunResult] = {}
        self._taken = jobs.taken()
        self._cluster = jobs.resources()
        self._held_back = False
        self._ended = time.monotonic()
        self._interrupts = 0
        self._answered = time.monotonic()
        self._silence = ""
        self._done = threading.Event()

    def fly(self) -> dict[int, RunResult]:
        threading.Thread(target=self._poll, name="ray poller", daemon=True).start()
        try:
            self._loop()
        except BaseException as error:
            for flight in [*self._flying.values()]:  # on a cluster that goes on, they would run unseen
                lifecycle.ask_to_stop(flight.job.run_dir, flight.job_id, f"the launcher failed: {error}")
            raise
        finally:
            self._done.set()
        return self._results

    def _loop(self) -> None:
        while self._flying or (self._waiting and not self._interrupts):
            while (job := self._next()) is not None:
                self._submit(job)
            try:
                event = self._events.get(timeout=_REFRESH_SECONDS)
            except queue.Empty:
                self._shown.refresh()
                self._look_at_the_clock()
                continue
            if isinstance(event, Lost):
                self._lose(event.why)
            elif isinstance(event, signal.Signals):
                self._interrupt(event)
            else:
                self._hear(*event)

    def _next(self) -> Job | None:
        """The next run to submit: none while one waits in Ray's queue, and nothing beside a verl run."""
        flying = [*self._flying.values()]
        if not self._waiting or self._interrupts or any(not flight.started for flight in flying):
            return None
        if self._held_back:
            return None
        if self._place._slots is not None and len(flying) >= self._place._slots:
            return None
        if flying and any(flight.job.alone for flight in flying):
            return None
        return next((job for job in self._waiting if not (flying and job.alone)), None)

    def _submit(self, job: Job) -> None:
        self._waiting.remove(job)
        flight = Flight(job, self._job_id(job))
        log = shlex.quote(str((job.run_dir / LOG).absolute()))
        try:
            entrypoint = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(job.command())} >> {log} 2>&1"
            self._retried(flight, entrypoint)
        except (OSError, RuntimeError) as error:
            self._end(flight, self._failed(job, f"Ray did not take the job: {error}"))
            return
        self._flying[flight.job_id] = flight
        self._answered = time.monotonic()

    def _retried(self, flight: Flight, entrypoint: str) -> None:
        """Submit, and again where the head is not ready yet or the connection breaks: Ray may have taken the job all the same."""
        begun, again = time.monotonic(), False
        need = self._place.need(flight.job, self._cluster)
        variables = self._place.variables(flight.job, flight.job_id)
        while True:
            try:
                return self._jobs.submit(flight.job_id, entrypoint, variables, need, flight.job.label)
            except OSError:
                if time.monotonic() - begun > self._place._silence_timeout:
                    raise
                again = True
            except RuntimeError as error:
                if again and _TAKEN in str(error):
                    return None
                if _NO_AGENT not in str(error) or time.monotonic() - begun > self._place._start_timeout:
                    raise
            time.sleep(_POLL_SECONDS)

    def _job_id(self, job: Job) -> str:
        """Ray takes no id twice, so it counts attempts: those of the run, and those of Ray that never came to be one."""
        sweep, attempt = job.run_dir.parent.name, lifecycle.newest_attempt(job.run_dir)
        while True:
            attempt += 1
            job_id = f"pth-{sweep}-{job.index:03d}-{attempt}"
            if job_id not in self._taken:
                self._taken.add(job_id)
                return job_id

    def _poll(self) -> None:
        """Ask Ray about every job; a thread, because a cluster that is dying answers late."""
        while not self._done.wait(_POLL_SECONDS):
            for flight in [*self._flying.values()]:
                try:
                    report = self._jobs.report(flight.job_id)
                except Exception as error:  # told once the silence has lasted
                    self._silence = str(error)
                    continue
                self._answered = time.monotonic()
                self._events.put((flight, report))

    def _hear(self, flight: Flight, report: Report) -> None:
        if flight.job_id not in self._flying:
            return
        job = flight.job
        if report.status == "FAILED" and report.message.startswith(_GAVE_UP) and len(self._flying) > 1:
            del self._flying[flight.job_id]  # it waited for others of this sweep: submit it anew when one of them has ended
            self._waiting.insert(0, job)
            self._held_back = True
            return
        if report.status not in ("PENDING", "FAILED") and not flight.started:
            flight.started = True
            self._shown.start(job)
        if not report.ended:
            return
        if report.exit_code is not None:
            how = exit_text(report.exit_code)
        else:
            how = "Ray's stop" if report.status == "STOPPED" else report.message or "Ray's word"
        if lifecycle.state(job.run_dir)[0] in (State.QUEUED, State.FROZEN) and not (job.run_dir / LOG).exists():
            said = self._jobs.log(flight.job_id).strip().rpartition("\n")[2]
            self._end(flight, self._failed(job, f"its worker never began: {said or report.message}"))
        else:
            self._end(flight, outcome(job, how))

    def _look_at_the_clock(self) -> None:
        now = time.monotonic()
        if self._flying and now - self._answered > self._place._silence_timeout:
            self._lose(f"Ray at {self._jobs.address} has not answered for {now - self._answered:.0f} s: {self._silence}")
        for flight in [*self._flying.values()]:
            alone = not flight.started and len(self._flying) == 1  # else it may wait for those of this sweep
            if alone and now - max(flight.submitted, self._ended) > self._place._start_timeout:
                self._withdraw(flight)
                self._end(flight, self._failed(flight.job, self._why_not_started(flight.job)))

    def _withdraw(self, flight: Flight) -> None:
        """Take a job back that has not started. Ray cannot: it keeps it waiting, and stops it as soon as it starts."""
        del self._flying[flight.job_id]
        lifecycle.ask_to_stop(flight.job.run_dir, flight.job_id, "withdrawn before it started")
        self._try_to_stop(flight)

    def _why_not_started(self, job: Job) -> str:
        need = {name.removeprefix("num_"): amount for name, amount in self._place.need(job, self._cluster).items()}
        asked = ", ".join(f"{name} {_told(name, amount)}" for name, amount in (need | need.pop("resources", {})).items())
        with contextlib.suppress(Exception):  # a head that has just come up did not know yet
            self._cluster = self._jobs.resources()
        there = ", ".join(f"{name} {_told(name, amount)}" for name, amount in sorted(self._cluster.items())) or "nothing"
        return (
            f"Ray has not started it within {self._place._start_timeout:g} s (launcher.start_timeout): it asks for {asked}; "
            f"the cluster has {there} in all"
        )

    def _interrupt(self, received: signal.Signals) -> None:
        self._interrupts += 1
        started = [flight for flight in self._flying.values() if flight.started]
        for flight in [*self._flying.values()]:
            if not flight.started:
                self._withdraw(flight)
            elif self._interrupts == 1:
                lifecycle.ask_to_stop(flight.job.run_dir, flight.job_id, f"{received.name} received by the launcher")
            else:
                self._try_to_stop(flight)
        self._shown.message(explain(received, self._interrupts, len(started)))

    def _try_to_stop(self, flight: Flight) -> None:
        try:
            self._jobs.stop(flight.job_id)
        except Exception as error:  # a cluster that does not answer is given up by its silence
            self._silence = str(error)

    def _lose(self, why: str) -> None:
        """Give up what flies. A worker that still lives is asked to stop, since nobody follows it any more."""
        unstarted = len(self._waiting)
        self._waiting.clear()
        for flight in [*self._flying.values()]:
            lifecycle.ask_to_stop(flight.job.run_dir, flight.job_id, why)
            if not flight.started:
                del self._flying[flight.job_id]
                unstarted += 1
                continue
            lifecycle.note(flight.job.run_dir, State.LOST, "launcher", why)
            self._end(flight, RunResult(flight.job.index, flight.job.label, State.LOST, why, ""))
        if unstarted:
            self._shown.message(f"{unstarted} not started: {why}")

    def _failed(self, job: Job, why: str) -> RunResult:
        lifecycle.note(job.run_dir, State.FAILED, "launcher", why)
        return RunResult(job.index, job.label, State.FAILED, why, "")

    def _end(self, flight: Flight, result: RunResult) -> None:
        self._flying.pop(flight.job_id, None)
        self._held_back, self._ended = False, time.monotonic()
        self._results[flight.job.index] = result
        if not flight.started:
            self._shown.start(flight.job)
        self._shown.end(flight.job, result)


def _told(name: str, amount: float) -> str:
    return f"{amount / _GIB:.1f} GiB" if "memory" in name.lower() else f"{amount:g}"


def _connect(address: str, token_env: str | None, seconds: float) -> Jobs:
    token = (os.environ.get(token_env) or None) if token_env else None
    if token_env not in (None, "RAY_AUTH_TOKEN") and token_env not in os.environ:
        raise refuse("launcher.token_env", token_env, "the environment has no such variable", f"export {token_env}=<the token>")
    try:
        return Jobs(address, token, seconds)
    except NotConnected as error:
        if error.token and token is None:
            why = "the cluster asks for a token, and this variable does not hold one"
            raise refuse("launcher.token_env", token_env, why, "export the token under that name, or name another") from None
        if error.token:
            why = f"the cluster at {address} refuses the token that this variable holds"
            raise refuse("launcher.token_env", token_env, why, "export the right one, or name another variable") from None
        raise refuse(
            "launcher.address",
            address,
            f"no Ray dashboard with a Jobs API answers there within {seconds:g} s: {error}",
            "name it as http://host:8265, or null for a head of the launcher's own",
        ) from None
