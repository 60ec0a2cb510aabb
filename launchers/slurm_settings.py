"""What a SLURM job is asked to be: the launcher's settings, checked, and what follows from them for a run."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from pth_exp.launchers.place import Job
from pth_exp.refusal import Objection, Refusal, refuse

_GIB = 1 << 30
_VERL_CPUS = 4
"""A verl rank is a learner, a vLLM engine and their helpers."""


def _setting(kind: str, default: Any = None, **more: Any) -> Any:
    return field(default=default, metadata={"kind": kind}, **more)


@dataclass(frozen=True, slots=True)
class SlurmSettings:
    """The fields of ``conf/hydra/launcher/pth_slurm.yaml``, which say what each means. Raises ``Refusal``."""

    partition: str | None = _setting("text")
    account: str | None = _setting("text")
    qos: str | None = _setting("text")
    constraint: str | None = _setting("text")
    nodes: int = _setting("count", 1)
    gpus_per_node: int | str | None = _setting("gpus")
    cpus_per_task: int | None = _setting("count")
    mem_gb: float | None = _setting("amount")
    timeout_min: int = _setting("count", 60)
    signal_delay_s: int = _setting("count", 120)
    requeue: bool = _setting("switch", True)
    array_parallelism: int | None = _setting("count")
    setup: Sequence[str] = _setting("lines", ())
    srun_args: Sequence[str] = _setting("lines", ())
    additional_parameters: Mapping[str, Any] = field(default_factory=dict, metadata={"kind": "map"})
    container: str | None = _setting("text")
    python: str | None = _setting("text")
    wait: bool = _setting("switch", True)
    poll_seconds: float = _setting("amount", 5.0)

    def __post_init__(self) -> None:
        objections = []
        for each in fields(self):
            value, needed = getattr(self, each.name), each.default is not None
            test, wanted = _KINDS[each.metadata["kind"]]
            if not (value is None and not needed) and not test(value):
                objections.append(Objection(f"launcher.{each.name}", str(value), f"is not {wanted}", f"give {wanted}"))
        if not objections and self.signal_delay_s >= self.timeout_min * 60:
            remedy = "give it less, or launcher.timeout_min more"
            why = f"a warning so early leaves nothing of the {self.timeout_min} minutes of launcher.timeout_min"
            objections.append(Objection("launcher.signal_delay_s", str(self.signal_delay_s), why, remedy))
        for name in self.additional_parameters if not objections else ():
            if (own := _OWN.get(str(name).replace("_", "-"))) is not None:
                why = f"is what the {own} decides"
                objections.append(Objection("launcher.additional_parameters", str(name), why, "leave it out there"))
        if objections:
            raise Refusal(objections)

    def alike(self, jobs: Sequence[Job]) -> list[list[Job]]:
        """Runs together that ask SLURM for the same, in order: what a job array can hold. Raises ``Refusal``."""
        groups: dict[str, list[Job]] = {}
        for job in jobs:
            groups.setdefault(repr((self.options(job), self.step(job))), []).append(job)
        return [*groups.values()]

    def require(self, job: Job) -> None:
        """Raises ``Refusal`` for a run that cannot be laid out over a job's nodes and their GPUs."""
        nodes = self.nodes
        if job.stack != "verl":
            if nodes > 1:
                raise refuse("launcher.nodes", nodes, f"a run of stack={job.stack} is one process", "give launcher.nodes=1")
            return
        if job.ray_address is not None:  # its ranks are there, and not in the job
            if nodes > 1:
                why = f"the run joins the cluster at stack.ray_address={job.ray_address}, and these nodes would stand idle"
                raise refuse("launcher.nodes", nodes, why, "give launcher.nodes=1, or stack.ray_address=null")
            return
        if job.ranks % nodes:
            why = f"stack.ranks={job.ranks} cannot be divided into equal parts over so many"
            raise refuse("launcher.nodes", nodes, why, "give as many nodes as divide stack.ranks")
        each, gpus = job.ranks // nodes, self._gpus(job)
        there = int(count) if (count := str(gpus or 0).rpartition(":")[2]).isdigit() else each
        if job.device.startswith("cuda") and there < each:
            why = f"stack.ranks={job.ranks} take a GPU each, {each} on each of {nodes} node{'s' * (nodes != 1)}"
            raise refuse("launcher.gpus_per_node", self.gpus_per_node, why, f"give {each}, or more nodes, or fewer ranks")

    def options(self, job: Job) -> dict[str, Any]:
        """Options of sbatch for a run, by their names there; True is a flag. Raises ``Refusal``."""
        options = {
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
            "constraint": self.constraint,
            "nodes": self.nodes,
            "ntasks-per-node": 1,
            "cpus-per-task": self._cpus(job),
            "gpus-per-node": self._gpus(job),
            "mem": self._memory(job),
            "time": self.timeout_min,
            "signal": f"USR2@{self.signal_delay_s}",
            "requeue" if self.requeue else "no-requeue": True,
            "open-mode": "append",
            **{str(name).replace("_", "-"): value for name, value in self.additional_parameters.items()},
        }
        return {name: value for name, value in options.items() if value not in (None, False)}

    def step(self, job: Job) -> list[str]:
        """Arguments of srun: since SLURM 22.05 a step does not take its CPUs from the job by itself."""
        return ["--unbuffered", f"--cpus-per-task={self._cpus(job)}", *self.srun_args]

    def command(self, job: Job) -> list[str]:
        """The worker's command line on a node. Raises ``NoInterpreter``."""
        python, *rest = job.command()
        if self.python is not None and job.stack != "verl":  # a verl run's is stack.python
            python = self.python
        return [*shlex.split(self.container or ""), python, *rest]

    def ray(self, job: Job) -> dict[str, Any]:
        """What starts Ray on the nodes of a job that has several; empty for one, whose worker does it by itself."""
        if job.stack != "verl" or self.nodes == 1:
            return {}
        stand_ins = job.ranks // self.nodes if job.device == "cpu" else None  # verl places its workers by GPU, on CPUs too
        return {"ray_python": [*shlex.split(self.container or ""), job.command()[0]], "ray_gpus": stand_ins}

    def _cpus(self, job: Job) -> int:
        if self.cpus_per_task is not None:
            return self.cpus_per_task
        return max(job.threads, _VERL_CPUS * math.ceil(job.ranks / self.nodes)) if job.stack == "verl" else job.threads

    def _gpus(self, job: Job) -> int | str | None:
        if self.gpus_per_node is not None:
            return self.gpus_per_node or None
        if not job.device.startswith("cuda"):
            return None
        return math.ceil(job.ranks / self.nodes) if job.stack == "verl" else 1

    def _memory(self, job: Job) -> str | None:
        gib = self.mem_gb if self.mem_gb is not None else math.ceil(job.memory / _GIB / self.nodes)
        return f"{math.ceil(gib * 1024)}M" if gib else None


def flags(options: Mapping[str, Any]) -> list[str]:
    """Options as sbatch takes them, on its command line and, quoted, in a script."""
    return [f"--{name}" if value is True else f"--{name}={value}" for name, value in options.items()]


def job_name(sweep: Path) -> str:
    """What a sweep's jobs are called in the queue."""
    return f"pth-{sweep.resolve().name}"


def _count(value: Any) -> bool:
    return type(value) is int and value >= 1


def _lines(value: Any) -> bool:
    return not isinstance(value, str) and isinstance(value, Sequence) and all(isinstance(line, str) for line in value)


_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "text": (lambda value: isinstance(value, str) and bool(value.strip()), "a word, in quotes where it is a number"),
    "count": (_count, "a whole number of at least 1"),
    "gpus": (lambda value: isinstance(value, str) or (type(value) is int and value >= 0), "a whole number, or TYPE:NUMBER"),
    "amount": (lambda value: type(value) in (int, float) and 0 < value < math.inf, "a number above 0"),
    "switch": (lambda value: type(value) is bool, "true or false"),
    "lines": (_lines, "a list of texts"),
    "map": (lambda value: isinstance(value, Mapping), "a mapping of names to values"),
}
_OWN = {
    "array": "list of runs",
    "job-name": "sweep's name",
    "output": "run's directory",
    "error": "run's directory",
    "signal": "field launcher.signal_delay_s",
    "time": "field launcher.timeout_min",
    "nodes": "field launcher.nodes",
    "cpus-per-task": "field launcher.cpus_per_task",
    "requeue": "field launcher.requeue",
    "no-requeue": "field launcher.requeue",
    "mem": "field launcher.mem_gb",
    "ntasks": "field launcher.nodes",
    "ntasks-per-node": "field launcher.nodes",
    "gpus-per-node": "field launcher.gpus_per_node",
    "partition": "field launcher.partition",
    "account": "field launcher.account",
    "qos": "field launcher.qos",
    "constraint": "field launcher.constraint",
}
"""Options of sbatch that are decided elsewhere, and by what."""
