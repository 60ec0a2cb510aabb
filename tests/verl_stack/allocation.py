"""A verl run in a SLURM job of two nodes, a rank on each, all of whose processes are told to stop while it trains."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "slurm"))
sys.path.insert(0, str(Path(__file__).parents[1] / "dispatch"))

from cluster import Slurm
from frozen_sweeps import all_reach, pid_of, runs_of, until

from pth_exp.machine import carrying

ON_TWO_NODES = (
    "hydra/launcher=pth_slurm",
    "hydra.launcher.nodes=2",
    "hydra.launcher.cpus_per_task=4",
    "hydra.launcher.mem_gb=10",
)


@dataclass(frozen=True)
class Allocation:
    """What was seen of a run.

    Attributes:
        sweep: its sweep's directory.
        run: its directory.
        engines: nodes that vLLM's engines ran on.
        places: temporary folders of verl's workers.
        token: of the job's Ray, which its processes carry.
    """

    sweep: Path
    run: Path
    engines: frozenset[str]
    places: frozenset[str]
    token: str


def over_two_nodes(cluster: Slurm, verl_python: Path, folder: Path, *overrides: str) -> Allocation:
    """Run one run to its end; after its first update every process but the worker gets SLURM's two signals."""
    environment = {**os.environ, **cluster.environment, "PTH_VERL_PYTHON": str(verl_python)}
    command = [sys.executable, "-P", "-m", "pth_exp.cli", "run", *overrides, *ON_TWO_NODES]
    said = folder / "launcher.txt"
    with said.open("w") as file:
        launcher = subprocess.Popen(command, cwd=folder, env=environment, stdout=file, stderr=file)
    latest = folder / "multirun_outputs" / "latest"
    until(lambda: (latest / "index.json").exists() or launcher.poll() is not None)
    (run,) = runs_of(latest.resolve())
    until(lambda: all_reach([run], 1)() or launcher.poll() is not None, seconds=1500)
    assert launcher.poll() is None, said.read_text()
    (head,) = run.glob(".ray-*.head")
    token = json.loads(head.read_text())["token"]
    processes = carrying("RAY_AUTH_TOKEN", token) - {pid_of(run)}
    titles = {pid: _title(pid) for pid in processes}
    engines = {_environ(pid)["SLURMD_NODENAME"] for pid in processes if titles[pid].startswith("VLLM::EngineCore")}
    places = {_environ(pid)["TMPDIR"] for pid in processes if titles[pid].startswith("ray::WorkerDict")}
    for pid in processes:
        for number in (signal.SIGUSR2, signal.SIGTERM):
            os.kill(pid, number)
    assert launcher.wait(timeout=900) == 0, said.read_text()
    return Allocation(run.parent, run, frozenset(engines), frozenset(places), token)


def _environ(pid: int) -> dict[str, str]:
    try:
        words = Path(f"/proc/{pid}/environ").read_text().split("\0")
    except OSError:  # it has ended
        return {}
    return dict(word.partition("=")[::2] for word in words if "=" in word)


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    except OSError:
        return ""
