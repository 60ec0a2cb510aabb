"""A Ray cluster over the nodes of a SLURM job, which owns it: srun starts one task a node.

The first task starts a head, says in a file of the job's folder where it is, and waits for the others, each of which joins with
its node. The file is named after the job and how often it was requeued, so that nobody finds an earlier head. It holds the
token that the head asks for, since others have access to the cluster's network, and only its owner can read it.

Signals that SLURM sends to all processes end none of these: the worker stops at its next update, then the head ends, then the
nodes that have joined it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pth_exp import leftovers, marked, steadfast
from pth_exp.launchers import slurm_client
from pth_exp.launchers.slurm_client import SlurmError

MARK = "PTH_RAY_NODE"
"""Which node's processes a process is of."""
START_SECONDS = 300.0
"""For one node; on a machine with two busy cores a head has taken 70 s."""
ATTEMPTS = 3
"""Ray gives its raylet 30 s to start and then gives up."""
LOGICAL_CPUS = 64
"""That each node offers verl's processes: 3 of them go with a rank; they are not what they use."""
GONE_SECONDS = 60.0
"""A head that has not answered for so long is gone; one that has ended refuses at once."""
_UP = "Ray runtime started"
_POLL_SECONDS = 0.5
_LOOK_SECONDS = 2.0


class NoCluster(RuntimeError):
    """The job's Ray cluster did not come up; the message says why."""


@dataclass(frozen=True, slots=True)
class Head:
    """What a node has to know to join: ``host:port``, the token, and how many GPUs it is to have (null: those it has)."""

    address: str
    token: str
    gpus: int | None

    def variables(self) -> dict[str, str]:
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token}


def is_first() -> bool:
    """Whether this is the task that runs the worker."""
    return os.environ.get("SLURM_PROCID", "0") == "0"


# --------------------------------------------------------------------------------------------------------------- the first


@contextmanager
def head(python: Sequence[str], job_dir: Path, gpus: int | None) -> Iterator[dict[str, str]]:
    """A head on this node, which the job's other nodes have joined; the environment of the worker that is to use it.

    Args:
        python: the command line of verl's interpreter, a container's before it perhaps.
        job_dir: a folder that the job's nodes share.
        gpus: of each node; None for those that it has.

    Raises `NoCluster`.
    """
    count, meeting = int(os.environ["SLURM_JOB_NUM_NODES"]), _Meeting.of_this_job(job_dir)
    try:
        here, port = node_address(), _free_port()
        known = Head(f"{here}:{port}", secrets.token_hex(16), gpus)
        options = ["--head", f"--port={port}", f"--ray-client-server-port={_free_port()}", "--include-dashboard=false"]
        with _node(python, job_dir, options, here, known):
            meeting.open(known)
            meeting.wait_for(count - 1)
            print(f"a Ray head at {known.address}, over {count} nodes", flush=True)
            yield {"PTH_RAY_ADDRESS": known.address, **known.variables()}
    except NoCluster as error:
        meeting.fail(str(error))
        raise
    finally:
        meeting.close()


# -------------------------------------------------------------------------------------------------------------- the others


def join(python: Sequence[str], job_dir: Path) -> int:
    """Join the first task's head with this node, and stay until it ends; the exit code, with the reason on standard error."""
    for number in steadfast.SIGNALS:  # the first task has the worker stop; SLURM's SIGKILL follows if that takes too long
        signal.signal(number, signal.SIG_IGN)
    meeting = _Meeting.of_this_job(job_dir)
    try:
        known = meeting.found()
        with _node(python, job_dir, [f"--address={known.address}"], node_address(), known) as node:
            meeting.arrive()
            node.stay(known.address)
    except NoCluster as error:
        meeting.fail(str(error))
        print(error, file=sys.stderr, flush=True)
        return 1
    return 0


# ------------------------------------------------------------------------------------------------------------ how they meet


@dataclass(frozen=True, slots=True)
class _Meeting:
    """Files by which the tasks of one job, in one of its lives, find one another."""

    file: Path
    task: str

    @classmethod
    def of_this_job(cls, job_dir: Path) -> _Meeting:
        job, life = os.environ["SLURM_JOB_ID"], os.environ.get("SLURM_RESTART_COUNT", "0")
        return cls(job_dir / f".ray-{job}-{life}", os.environ["SLURM_PROCID"])

    def open(self, known: Head) -> None:
        self._write("head", json.dumps(asdict(known)))

    def found(self) -> Head:
        """Raises `NoCluster` where the first task has failed, or says nothing."""
        head = self._of("head")
        self._until(head.exists, lambda: "the job's first task has started no Ray head")
        return Head(**json.loads(head.read_text()))

    def arrive(self) -> None:
        self._write(f"joined-{self.task}", "")

    def wait_for(self, others: int) -> None:
        """Raises `NoCluster`."""

        def here() -> int:
            return len([*self.file.parent.glob(f"{self.file.name}.joined-*")])

        self._until(lambda: here() == others, lambda: f"only {here()} of the job's {others} other nodes joined its Ray head")

    def fail(self, why: str) -> None:
        with contextlib.suppress(OSError):
            self._write(f"failed-{self.task}", why)

    def close(self) -> None:
        for name in ("head", "joined-*"):
            for file in self.file.parent.glob(f"{self.file.name}.{name}"):
                file.unlink(missing_ok=True)

    def _until(self, condition: Callable[[], bool], otherwise: Callable[[], str]) -> None:
        deadline = time.monotonic() + ATTEMPTS * START_SECONDS
        while not condition():
            for file in self.file.parent.glob(f"{self.file.name}.failed-*"):
                raise NoCluster(file.read_text())
            if time.monotonic() > deadline:
                raise NoCluster(f"{otherwise()} within {ATTEMPTS * START_SECONDS:g} s")
            time.sleep(_POLL_SECONDS)

    def _of(self, what: str) -> Path:
        return self.file.with_name(f"{self.file.name}.{what}")

    def _write(self, what: str, text: str) -> None:
        """Whole, or not there, and for this user alone."""
        passing = self._of(f"{what}.{self.task}.new")
        with open(os.open(passing, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(text)
        passing.replace(self._of(what))


# ------------------------------------------------------------------------------------------------------------------- a node


@dataclass(slots=True)
class _Node:
    """Ray's processes on this machine."""

    ray: subprocess.Popen[bytes]
    mark: str
    record: Path
    segments: set[Path] = field(default_factory=set)

    def stay(self, address: str) -> None:
        """Until the head has ended. Raises `NoCluster` when this node breaks, or the head's machine answers no more."""
        host, _, port = address.rpartition(":")
        answered = time.monotonic()
        while True:
            ended = self.ray.poll()
            self._note_segments()
            try:
                socket.create_connection((host, int(port)), timeout=5).close()
                answered = time.monotonic()
            except ConnectionRefusedError:
                return
            except OSError as error:
                if time.monotonic() - answered > GONE_SECONDS:
                    raise NoCluster(f"{_here()}: the Ray head at {address} is gone: {error}") from None
            if ended is not None:
                raise NoCluster(f"{_here()}: Ray on this node has ended by exit code {ended}")
            time.sleep(_LOOK_SECONDS)

    def _note_segments(self) -> None:
        """Shared memory that verl's processes have now, and may leave behind."""
        if not (held := marked.held(MARK, self.mark)) <= self.segments:
            self.segments |= held
            leftovers.note_segments(self.record, self.segments)


@contextmanager
def _node(python: Sequence[str], job_dir: Path, options: Sequence[str], address: str, known: Head) -> Iterator[_Node]:
    """``ray start`` on this machine; everything that came of it is ended. Raises `NoCluster`."""
    record, mark = job_dir / f".ray-{_here()}", secrets.token_hex(8)
    record.mkdir(exist_ok=True)
    with _removed(record), leftovers.scratch(record, "pth-ray-") as scratch:
        more = {
            MARK: mark,
            "TMPDIR": str(scratch),
            "SPT_NOENV": "1",  # processes that rename themselves keep the environment that they are found by
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_memory_monitor_refresh_ms": "0",  # SLURM bounds the job; Ray would end processes when others fill the machine
            **known.variables(),
        }
        words = [
            *options,
            "--block",
            "--disable-usage-stats",
            "--log-color=false",
            f"--node-ip-address={address}",
            f"--node-name={_here()}",
            f"--num-cpus={LOGICAL_CPUS}",
            *([f"--num-gpus={known.gpus}"] if known.gpus is not None else []),
            # any that are free: the node may have another job, and another cluster
            *("--dashboard-agent-listen-port=0", "--min-worker-port=0", "--max-worker-port=0"),
        ]
        environment = {**{k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")}, **more}
        segments = set[Path]()
        try:
            ray = _start([*python, "-P", "-m", "ray.scripts.scripts", "start", *words], environment, scratch)
            yield _Node(ray, mark, record, segments)
        finally:
            marked.remove(segments | marked.end(lambda: marked.processes(MARK, mark, scratch)))


@contextmanager
def _removed(folder: Path) -> Iterator[None]:
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()


def _start(command: Sequence[str], environment: Mapping[str, str], scratch: Path) -> subprocess.Popen[bytes]:
    """Raises `NoCluster` with Ray's own last words."""
    for attempt in range(ATTEMPTS):
        printed = scratch / f"{attempt}.txt"
        with printed.open("wb") as file, steadfast.children():
            ray = subprocess.Popen(
                [*command, f"--temp-dir={scratch}/{attempt}"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                preexec_fn=_die_with_parent,  # and Ray's processes die with theirs
            )
        deadline = time.monotonic() + START_SECONDS
        while ray.poll() is None and time.monotonic() < deadline:
            if _UP in printed.read_text(errors="replace"):
                return ray
            time.sleep(_POLL_SECONDS)
        sys.stderr.write(printed.read_text(errors="replace"))
        marked.remove(marked.end(lambda: marked.processes(MARK, environment[MARK])))
        ray.wait()
    last = printed.read_text(errors="replace").strip().rpartition("\n")[2]
    raise NoCluster(f"{_here()}: Ray did not start: {last or f'it ended by exit code {ray.returncode}'}")


def node_address() -> str:
    """The IPv4 address by which the cluster knows this node. Raises `NoCluster`."""
    try:
        told = re.search(r"\bNodeAddr=(\S+)", slurm_client.call(["scontrol", "--oneliner", "show", "node", _here()]))
    except SlurmError:  # a container, perhaps, that has none of SLURM's commands
        told = None
    name = told[1] if told is not None else _here()
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        raise NoCluster(f"{_here()}: its address {name} leads nowhere: {error}") from None


def _here() -> str:
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def _free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
