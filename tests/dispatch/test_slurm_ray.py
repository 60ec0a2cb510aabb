"""How the tasks of a SLURM job find one another's Ray, and which runs a job's nodes can hold. Real clusters: tests/slurm."""

from __future__ import annotations

import socket
import stat
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from pth_exp.cli import main
from pth_exp.launchers import slurm_ray
from pth_exp.launchers.place import Job
from pth_exp.launchers.slurm_ray import Head, NoCluster
from pth_exp.launchers.slurm_settings import SlurmSettings
from pth_exp.refusal import Refusal

KNOWN = Head("10.0.0.1:6379", "token", 2)


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of a job's two tasks, on a machine where SLURM's commands are not on the path."""
    for name, value in {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_PROCID": "1",
        "SLURMD_NODENAME": "localhost",
        "PATH": "/nowhere",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(slurm_ray, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(slurm_ray, "START_SECONDS", 20.0)  # bounds a failing test


def _first(folder: Path, life: str = "0") -> slurm_ray._Meeting:
    return slurm_ray._Meeting(folder / f".ray-7-{life}", "0")


def test_a_node_learns_of_the_head_and_the_head_of_the_node(task: None, tmp_path: Path) -> None:
    first, other = _first(tmp_path), slurm_ray._Meeting.of_this_job(tmp_path)
    first.open(KNOWN)
    assert other.found() == KNOWN
    (file,) = tmp_path.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600  # it holds the token
    other.arrive()
    first.wait_for(1)
    first.close()
    assert not [*tmp_path.iterdir()]


def test_a_requeued_job_does_not_find_the_head_that_it_had(task: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _first(tmp_path).open(KNOWN)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    monkeypatch.setattr(slurm_ray, "START_SECONDS", 0.1)
    other = slurm_ray._Meeting.of_this_job(tmp_path)
    with pytest.raises(NoCluster, match=r"the job.s first task has started no Ray head within 0\.3 s"):
        other.found()
    _first(tmp_path, "1").open(Head("10.0.0.2:1", "another", None))
    assert other.found().address == "10.0.0.2:1"


def test_a_head_does_not_wait_for_ever(task: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_ray, "START_SECONDS", 0.1)
    with pytest.raises(NoCluster, match=r"only 0 of the job.s 1 other nodes joined its Ray head within 0\.3 s"):
        _first(tmp_path).wait_for(1)


def test_what_keeps_one_node_away_is_told_by_the_others(
    task: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An interpreter without Ray: the node says so, the head gives up with its words, and no process or folder stays."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho no Ray here\n{sys.executable} -c 'import sys; sys.exit(5)'\n")
    python.chmod(0o755)
    job_dir = tmp_path / "run"
    job_dir.mkdir()
    _first(job_dir).open(KNOWN)
    monkeypatch.setattr(slurm_ray.signal, "signal", lambda number, handler: None)  # this process goes on
    assert slurm_ray.join([str(python)], job_dir) == 1
    why = "localhost: Ray did not start: no Ray here"
    assert why in capsys.readouterr().err
    with pytest.raises(NoCluster, match=why):
        _first(job_dir).wait_for(1)
    monkeypatch.setenv("SLURM_PROCID", "0")
    with pytest.raises(NoCluster, match=why), slurm_ray.head([str(python)], job_dir, None):
        pass
    assert sorted(path.name for path in job_dir.iterdir()) == [".ray-7-0.failed-0", ".ray-7-0.failed-1"]


def test_a_node_stays_as_long_as_the_head_listens(task: None, tmp_path: Path) -> None:
    import subprocess

    ray = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    node = slurm_ray._Node(ray, "mark", tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        staying = threading.Thread(target=node.stay, args=(address,), daemon=True)
        staying.start()
        server.accept()[0].close()
        server.accept()[0].close()
        assert staying.is_alive()
    staying.join(60)
    assert not staying.is_alive()
    ray.kill()
    ray.wait()


def test_a_node_whose_ray_breaks_says_so(task: None, tmp_path: Path) -> None:
    import subprocess

    ray = subprocess.Popen([sys.executable, "-c", "import sys; sys.exit(9)"])
    ray.wait()
    with socket.create_server(("127.0.0.1", 0)) as server:
        node = slurm_ray._Node(ray, "mark", tmp_path)
        with pytest.raises(NoCluster, match="localhost: Ray on this node has ended by exit code 9"):
            node.stay(f"127.0.0.1:{server.getsockname()[1]}")


def test_a_nodes_address_is_slurms(task: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\necho NodeName=$4 Arch=x86_64 NodeAddr=127.0.0.9 NodeHostName=elsewhere\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert slurm_ray.node_address() == "127.0.0.9"
    scontrol.unlink()
    assert slurm_ray.node_address() == "127.0.0.1"
    monkeypatch.setenv("SLURMD_NODENAME", "no.such.host.invalid")
    with pytest.raises(NoCluster, match=r"its address no\.such\.host\.invalid leads nowhere"):
        slurm_ray.node_address()


def _job(stack: str = "verl", **more: object) -> Job:
    values: dict[str, object] = {"device": "cuda", "ranks": 4, **more}
    return Job(0, "run", Path(), Path(), "", stack=stack, python=sys.executable, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "job", "said"),
    [
        ({"nodes": 2}, _job("trainer"), ["launcher.nodes=2", "stack=trainer is one process"]),
        ({"nodes": 3}, _job(), ["launcher.nodes=3", "stack.ranks=4 cannot be divided"]),
        ({"gpus_per_node": 3}, _job(), ["launcher.gpus_per_node=3", "4 on each of 1 node", "give 4"]),
        ({"nodes": 2, "gpus_per_node": "a100:1"}, _job(), ["launcher.gpus_per_node=a100:1", "2 on each of 2 nodes", "give 2"]),
        ({"gpus_per_node": 0}, _job(), ["launcher.gpus_per_node=0", "take a GPU each"]),
        ({"nodes": 2}, _job(ray_address="head:6379"), ["launcher.nodes=2", "stack.ray_address=head:6379", "stand idle"]),
    ],
)
def test_a_run_that_the_nodes_cannot_hold_is_refused(settings: dict[str, Any], job: Job, said: list[str]) -> None:
    with pytest.raises(Refusal) as refused:
        SlurmSettings(**settings).require(job)
    for part in said:
        assert part in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "job"),
    [
        ({}, _job("trainer")),
        ({"nodes": 2}, _job()),
        ({"nodes": 2, "gpus_per_node": "a100:2"}, _job()),
        ({"nodes": 4, "gpus_per_node": 8}, _job()),
        ({"nodes": 2}, _job(device="cpu")),
        ({"gpus_per_node": 1}, _job(ray_address="head:6379")),
    ],
)
def test_others_are_asked_for(settings: dict[str, Any], job: Job) -> None:
    asked = SlurmSettings(**settings)
    asked.require(job)
    assert asked.options(job)["nodes"] == settings.get("nodes", 1)


def test_the_trainer_joins_no_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--dry-run", "stack=trainer", "stack.ray_address=head:6379"]) == 2
    assert "ray_address" in capsys.readouterr().err


def test_what_starts_ray_on_several_nodes() -> None:
    two = SlurmSettings(nodes=2, container="apptainer exec image.sif")
    assert two.ray(_job()) == {"ray_python": ["apptainer", "exec", "image.sif", sys.executable], "ray_gpus": None}
    assert two.ray(_job(device="cpu"))["ray_gpus"] == 2  # stand-ins for two of four ranks
    assert SlurmSettings().ray(_job()) == {}
