"""verl runs in SLURM jobs, and what SLURM does to them: a table of what became of each.

PTH_VERL_PYTHON=... python tests/slurm/verl_jobs.py [CASE ...]    # needs root; without names all, half an hour on two idle cores
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "dispatch"))

from cluster import Slurm, slurm
from frozen_sweeps import alive, pid_of, runs_of, until, updates_done

from pth_exp import lifecycle, machine
from pth_exp.interpreters import interpreter
from pth_exp.launchers.ray_head import Head
from pth_exp.records.reader import RunRecords

SMALL = (
    *("stack=verl", "arm=tis_ppo", "refresh_interval=4", "prompts_per_update=4", "responses_per_prompt=4", "seed=7"),
    *("max_response_tokens=24", "task.train_problems=8", "validation.every=null"),
)
SLURM = ("hydra/launcher=pth_slurm", "hydra.launcher.cpus_per_task=2", "hydra.launcher.mem_gb=9", "hydra.launcher.poll_seconds=1")
TWO = ("stack.ranks=2", "hydra.launcher.nodes=2")
PATIENCE = 1800.0


class Sweep:
    """One that has been launched in a folder of its own."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.folder = folder
        folder.mkdir()
        self._said = folder / "launcher.txt"
        with self._said.open("w") as said:
            command = [sys.executable, "-P", "-m", "pth_exp.cli", "run", *SMALL, *overrides]
            self.launcher = subprocess.Popen(command, cwd=folder, stdout=said, stderr=said, start_new_session=True)

    def runs(self) -> list[Path]:
        latest = self.folder / "multirun_outputs" / "latest"
        until(lambda: (latest / "index.json").exists() or self.launcher.poll() is not None, PATIENCE)
        return runs_of(latest.resolve())

    def reach(self, updates: int) -> Path:
        (run,) = self.runs()
        until(lambda: updates_done(run) >= updates or self.launcher.poll() is not None, PATIENCE)
        if updates_done(run) < updates:
            raise RuntimeError(self.said())
        return run

    def wait(self) -> int:
        return self.launcher.wait(timeout=PATIENCE)

    def said(self) -> str:
        return self._said.read_text()


def processes(run: Path) -> set[int]:
    return machine.carrying("PTH_FROZEN", str(run / "frozen.yaml")) | machine.carrying("SLURM_JOB_ID", _number(run))


def _number(run: Path) -> str:
    return str(lifecycle.status(run).job_id).partition("_")[0]


def told(run: Path) -> str:
    """The states that the run went through, its rows, and what is left of it."""
    states = " ".join(row["state"] for row in lifecycle.history(run))
    records = RunRecords.load(run)
    numbers = [row["update"] for row in records.updates]
    gaps = " with gaps" * (numbers != [*range(len(numbers))])
    begun = time.monotonic()
    while (left := processes(run)) and time.monotonic() - begun < 60:
        time.sleep(0.5)
    note = ", .leftovers.json" * (run / ".leftovers.json").exists()
    return f"{states}; {len(numbers)} updates{gaps}; {len(left)} processes left{note}; {lifecycle.status(run).detail}"


def one_node(cluster: Slurm, folder: Path) -> str:
    """With the affinity that SLURM's task plug-in would give: every process of the job has to keep to it."""
    sweep = Sweep(folder / "one", *SLURM, "updates=4", "hydra.launcher.container='taskset -c 1'")
    run = sweep.reach(1)
    here = machine.carrying("PTH_FROZEN", str(run / "frozen.yaml"))
    cores = {tuple(os.sched_getaffinity(pid)) for pid in alive(here)}
    folders = {value for pid in alive(here) if (value := _variable(pid, "TMPDIR"))}
    sweep.wait()
    there = [folder for folder in folders if Path(folder).exists()]
    return f"{told(run)}; {len(here)} processes on cores {sorted(cores)}; of its folders {len(folders)} there are {len(there)}"


def _variable(pid: int, name: str) -> str:
    try:
        words = Path(f"/proc/{pid}/environ").read_text().split("\0")
    except OSError:
        return ""
    return dict(word.partition("=")[::2] for word in words).get(name, "")


def two_jobs_on_one_node(cluster: Slurm, folder: Path) -> str:
    cluster.drained("n1")
    try:
        sweeps = [Sweep(folder / name, *SLURM, "updates=4") for name in ("a", "b")]
        runs = [sweep.runs()[0] for sweep in sweeps]
        until(lambda: all(lifecycle.state(run)[0] is lifecycle.State.RUNNING for run in runs), PATIENCE)
        nodes = {_variable(pid_of(run), "SLURMD_NODENAME") for run in runs}
        for sweep in sweeps:
            sweep.wait()
        return f"on {nodes}: " + " | ".join(map(told, runs))
    finally:
        cluster.resumed("n1")


def preempted(cluster: Slurm, folder: Path) -> str:
    """Two nodes, taken away by a job of the partition ``urgent``, and given back."""
    sweep = Sweep(folder / "preempted", *SLURM, *TWO, "updates=8")
    run = sweep.reach(2)
    begun = time.monotonic()
    cluster.run("sbatch", "-p", "urgent", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 1")
    until(lambda: lifecycle.state(run)[0] is not lifecycle.State.RUNNING, PATIENCE)
    seconds = time.monotonic() - begun
    _now(cluster, _number(run))
    sweep.wait()
    return f"{told(run)}; checkpoint after {seconds:.0f} s"


def warned(cluster: Slurm, folder: Path) -> str:
    """One node; the warning before the time limit, as SLURM sends it, to every process of the step."""
    sweep = Sweep(folder / "warned", *SLURM, "updates=8")
    run = sweep.reach(2)
    cluster.run("scancel", "--signal=USR2", _number(run))
    until(lambda: lifecycle.state(run)[0] is not lifecycle.State.RUNNING, PATIENCE)
    _now(cluster, _number(run))
    sweep.wait()
    return told(run)


def _now(cluster: Slurm, job_id: str) -> None:
    """SLURM has a requeued job wait for two minutes."""
    until(lambda: cluster.job(job_id)["JobState"] == "PENDING", 300)
    cluster.run("scontrol", "update", f"JobId={job_id}", "StartTime=now")


def cancelled(cluster: Slurm, folder: Path) -> str:
    """scancel: SIGTERM to all, and SIGKILL after KillWait, here 5 s."""
    sweep = Sweep(folder / "cancelled", *SLURM, "updates=400")
    run = sweep.reach(2)
    cluster.run("scancel", _number(run))
    sweep.wait()
    return told(run)


def killed(cluster: Slurm, folder: Path) -> str:
    """SIGKILL to every process of the step, on two nodes."""
    sweep = Sweep(folder / "killed", *SLURM, *TWO, "updates=400")
    run = sweep.reach(2)
    cluster.run("scancel", "--signal=KILL", _number(run))
    sweep.wait()
    return told(run)


def joined(cluster: Slurm, folder: Path) -> str:
    """A job whose run joins a Ray that is there, by stack.ray_address; and one at an address where none is."""
    with _ray(folder) as address:
        sweep = Sweep(folder / "joined", *SLURM, "updates=4", f"stack.ray_address={address}")
        run = sweep.reach(1)
        sweep.wait()
        inside = told(run)
    nowhere = Sweep(folder / "nowhere", *SLURM, "updates=4", f"stack.ray_address={address}")
    nowhere.wait()
    return f"{inside} | {lifecycle.status(nowhere.runs()[0]).detail}"


@contextmanager
def _ray(folder: Path) -> Iterator[str]:
    """A Ray of two stand-ins for GPUs, which nobody owns, and which asks for a token: the jobs have it in their environment."""
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
    port = 26379
    command = [str(interpreter("verl", None)), "-P", "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}"]
    more = ["--num-gpus=2", "--num-cpus=32", "--node-ip-address=127.0.0.5", "--include-dashboard=false", "--disable-usage-stats"]
    log = folder / "ray.txt"
    with log.open("w") as said:
        ray = subprocess.Popen([*command, *more, "--temp-dir=/tmp/pth-ray-there"], stdout=said, stderr=said)
    try:
        until(lambda: "Ray runtime started" in log.read_text() or ray.poll() is not None, PATIENCE)
        yield f"127.0.0.5:{port}"
    finally:
        ray.terminate()
        ray.wait(60)
        del os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN"]


def a_cluster_of_others(cluster: Slurm, folder: Path) -> str:
    """No SLURM: a verl run as a job of a Ray that was there before, and asks for a token; launched by `pth_ray`."""
    head = Head(interpreter("verl", None), {"num_cpus": 24, "num_gpus": 1}, folder / "head.log", lambda why: None)
    try:
        os.environ["RAY_AUTH_TOKEN"] = head.token
        sweep = Sweep(folder / "ray", "hydra/launcher=pth_ray", f"hydra.launcher.address={head.address}", "updates=4")
        sweep.wait()
        return told(sweep.runs()[0])
    finally:
        del os.environ["RAY_AUTH_TOKEN"]
        head.close()


def script(cluster: Slurm, folder: Path) -> str:
    """What `pth sbatch` writes, submitted by hand."""
    sweep = Sweep(folder / "script", "hydra/launcher=pth_freeze", "updates=4", "stack.ranks=2")
    sweep.wait()
    pth = [sys.executable, "-P", "-m", "pth_exp.cli"]
    settings = [word.replace("hydra.", "") for word in (*SLURM[1:], *TWO[1:])]
    subprocess.run([*pth, "sbatch", *settings], cwd=sweep.folder, check=True, stdout=subprocess.DEVNULL)
    written = sweep.runs()[0].parent / "sbatch" / "job.sh"
    job_id = cluster.run("sbatch", "--parsable", str(written)).strip()
    until(lambda: cluster.job(job_id)["JobState"] in ("COMPLETED", "FAILED"), PATIENCE)
    return told(sweep.runs()[0])


CASES: dict[str, Callable[[Slurm, Path], str]] = {
    case.__name__: case
    for case in (one_node, two_jobs_on_one_node, preempted, warned, cancelled, killed, joined, script, a_cluster_of_others)
}


def main(names: Sequence[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="pth-slurm-") as place, slurm(Path(place), nodes=2) as cluster:
        os.environ |= cluster.environment
        for name in names or CASES:
            with tempfile.TemporaryDirectory(prefix="pth-verl-jobs-", ignore_cleanup_errors=True) as folder:
                begun = time.monotonic()
                try:
                    outcome = CASES[name](cluster, Path(folder))
                except Exception as error:
                    outcome = f"{type(error).__name__}: {error}"
                print(json.dumps([name, round(time.monotonic() - begun), outcome]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
