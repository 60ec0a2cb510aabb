"""A verl run in a SLURM job of two nodes. Preemption, cancelling, one node, and others: tests/slurm/verl_jobs.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "slurm"))
sys.path.insert(0, str(Path(__file__).parents[1] / "dispatch"))

from cluster import slurm_of_tests
from frozen_sweeps import all_reach, pid_of, runs_of, until

from pth_exp.lifecycle import State, state
from pth_exp.machine import carrying
from pth_exp.records.reader import RunRecords

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

RUN = (
    *("stack=verl", "arm=tis_ppo", "stack.ranks=2", "refresh_interval=4", "prompts_per_update=4", "responses_per_prompt=4"),
    *("max_response_tokens=24", "task.train_problems=8", "validation.every=null", "updates=5", "seed=7"),
    *("hydra/launcher=pth_slurm", "hydra.launcher.nodes=2", "hydra.launcher.cpus_per_task=4", "hydra.launcher.mem_gb=10"),
)


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


def test_over_two_nodes_and_told_to_stop_all_over(verl_python: Path, tmp_path: Path) -> None:
    """SLURM's signals reach all processes of a job: they end none of Ray's, verl's or vLLM's, which the worker still needs."""
    with slurm_of_tests() as cluster:
        environment = {**os.environ, **cluster.environment, "PTH_VERL_PYTHON": str(verl_python)}
        command = [sys.executable, "-P", "-m", "pth_exp.cli"]
        with (tmp_path / "launcher.txt").open("w") as said:
            launcher = subprocess.Popen([*command, "run", *RUN], cwd=tmp_path, env=environment, stdout=said, stderr=said)
        latest = tmp_path / "multirun_outputs" / "latest"
        until(lambda: (latest / "index.json").exists() or launcher.poll() is not None)
        (run,) = runs_of(latest.resolve())
        until(lambda: all_reach([run], 1)() or launcher.poll() is not None, seconds=1500)
        assert launcher.poll() is None, (tmp_path / "launcher.txt").read_text()

        (head,) = run.glob(".ray-*.head")
        token = json.loads(head.read_text())["token"]
        processes = carrying("RAY_AUTH_TOKEN", token) - {pid_of(run)}
        titles = {pid: _title(pid) for pid in processes}
        places = {_environ(pid)["TMPDIR"] for pid in processes if titles[pid].startswith("ray::WorkerDict")}
        assert {_environ(pid)["SLURMD_NODENAME"] for pid in processes if titles[pid].startswith("VLLM::EngineCore")} == {
            "n0",
            "n1",
        }
        for pid in processes:
            for number in (signal.SIGUSR2, signal.SIGTERM):
                os.kill(pid, number)
        assert launcher.wait(timeout=900) == 0, (tmp_path / "launcher.txt").read_text()

        assert state(run)[0] is State.COMPLETED
        records = RunRecords.load(run)
        assert [row["update"] for row in records.updates] == list(range(5)) and not records.problems
        assert {row["attempt"] for row in records.updates} == {1}
        assert records.received is not None
        objects = records.received["objects"]
        assert (objects["ranks"], objects["sampler_servers"]) == (2, 2)
        assert (objects["places"]["trainer.nnodes"], objects["places"]["trainer.n_gpus_per_node"]) == (2, 1)
        checked = subprocess.run([*command, "check"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stdout

        until(lambda: not carrying("RAY_AUTH_TOKEN", token))
        assert len(places) == 2 and not any(Path(place).exists() for place in places)
        assert not [*run.glob(".ray-*")]
