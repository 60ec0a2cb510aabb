"""A real SLURM of its own on this machine: munged, slurmctld and one slurmd a node, on loopback, ended by process id."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from frozen_sweeps import until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel", "srun")

CONFIG = """\
ClusterName=pth
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=1,sched_interval=2,sched_min_interval=0,batch_sched_delay=0
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
JobRequeue=1
MinJobAge=3600
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/%n
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr={address} Port={port} CPUs=4 CoresPerSocket=4 RealMemory=20000\n"
PARTITIONS = """\
PartitionName=debug Nodes=ALL Default=YES MaxTime=60 State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=60 State=UP PriorityTier=9 PreemptMode=OFF
"""


def absent() -> str:
    """Why SLURM cannot be started on this machine; empty where it can."""
    if os.getuid() != 0:
        return "needs root"
    missing = [program for program in PROGRAMS if shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None]
    return f"not installed: {', '.join(missing)} (make slurm)" if missing else ""


class Slurm:
    """A running cluster of the nodes n0, n1, ... with four CPUs each; partition ``urgent`` preempts ``debug``, the default."""

    def __init__(self, folder: Path) -> None:
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, *command: str) -> str:
        """Standard output of a client's command."""
        environment = {**os.environ, **self.environment}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60).stdout

    def job(self, job_id: str) -> dict[str, str]:
        """What scontrol says of a job, or of one task of an array."""
        fields = self.run("scontrol", "-o", "show", "job", job_id).split()
        return dict(field.partition("=")[::2] for field in fields if "=" in field)

    def drained(self, node: str) -> None:
        self.run("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=test")

    def resumed(self, node: str) -> None:
        """A node that only was reported down comes back by itself."""
        if any(word in self.run("sinfo", "--noheader", "-n", node, "-o", "%T") for word in ("down", "drain")):
            self.run("scontrol", "update", f"NodeName={node}", "State=RESUME")


@contextmanager
def slurm_of_tests() -> Iterator[Slurm]:
    """One of two nodes. Skips the test where SLURM is not installed, unless PTH_TEST_SLURM says that it must be."""
    if why := absent():
        if os.environ.get("PTH_TEST_SLURM") == "1":
            pytest.fail(f"PTH_TEST_SLURM=1, and SLURM {why}")
        pytest.skip(f"SLURM {why}")
    with tempfile.TemporaryDirectory(prefix="pth-slurm-") as folder, slurm(Path(folder), nodes=2) as running:
        yield running


@contextmanager
def slurm(folder: Path, nodes: int) -> Iterator[Slurm]:
    """Start a cluster, end its jobs and its daemons. ``folder``: short, sockets have a limit on their path."""
    host = socket.gethostname().partition(".")[0]
    with _free_ports(nodes + 1) as ports:
        text = CONFIG.format(host=host, port=ports[0], folder=folder)
        for i, port in enumerate(ports[1:]):
            text += NODE.format(name=f"n{i}", host=host, address=f"127.0.0.{i + 2}", port=port)  # nodes that have their own
    text += PARTITIONS
    (folder / "slurm.conf").write_text(text)
    (folder / "state").mkdir()
    with ExitStack() as daemons:
        _start_munge(folder / "munge", daemons)
        cluster = Slurm(folder)
        _start(daemons, folder / "slurmctld.out", ["slurmctld", "-D", "-c"], cluster.environment)
        for i in range(nodes):
            _start(daemons, folder / f"n{i}.out", ["slurmd", "-D", "-N", f"n{i}"], cluster.environment)
        daemons.callback(_empty, cluster)
        until(lambda: _idle(cluster) == nodes, seconds=60)
        yield cluster


def _start_munge(folder: Path, daemons: ExitStack) -> None:
    """A munge daemon with a key and a socket of its own; the system's, if there is one, is left alone."""
    folder.mkdir(mode=0o700)
    (folder / "key").touch(mode=0o600)
    (folder / "key").write_bytes(secrets.token_bytes(1024))
    paths = [f"--{name}={folder / name}" for name in ("socket", "pid-file", "log-file", "seed-file")]
    _start(daemons, folder / "out", ["munged", "--foreground", "--force", f"--key-file={folder / 'key'}", *paths], {})
    folder.chmod(0o711)
    until((folder / "socket").exists, seconds=30)


def _start(daemons: ExitStack, log: Path, command: list[str], environment: Mapping[str, str]) -> None:
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    program = shutil.which(command[0], path=path)
    assert program is not None, command[0]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [program, *command[1:]],
            env={**os.environ, **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
    daemons.callback(_end, process)


def _end(process: subprocess.Popen[Any]) -> None:
    process.terminate()
    try:
        process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _idle(cluster: Slurm) -> int:
    with contextlib.suppress(subprocess.CalledProcessError):  # slurmctld does not answer yet
        return cluster.run("sinfo", "--noheader", "-N", "-p", "debug", "-o", "%T").split().count("idle")
    return 0


def _empty(cluster: Slurm) -> None:
    """Cancel what a test has left and see its processes go."""
    waiting = lambda: cluster.run("squeue", "--noheader", "-o", "%i").split()  # noqa: E731
    for job_id in waiting():
        with contextlib.suppress(subprocess.CalledProcessError):  # it has just ended
            cluster.run("scancel", "--signal=KILL", "--full", job_id)
            cluster.run("scancel", job_id)
    until(lambda: not waiting(), seconds=60)


@contextmanager
def _free_ports(count: int) -> Iterator[list[int]]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        yield [each.getsockname()[1] for each in sockets]
