"""Sweeps on a real SLURM through ``pth run hydra/launcher=pth_slurm``, ``pth resume`` and ``pth sbatch``."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cluster import Slurm
from frozen_sweeps import SMALL, SMALL_TASK, alive, all_reach, numbers, pid_of, pth, runs_of, until

from pth_exp.lifecycle import State, history, state, status
from pth_exp.records.reader import RunRecords

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

RUN = ["run", *SMALL, *SMALL_TASK, "validation.every=null", "hydra/launcher=pth_slurm", "hydra.launcher.poll_seconds=0.5"]
ENDLESS = "updates=100000"


def _start(folder: Path, *overrides: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "pth_exp.cli", *RUN, *overrides],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _runs(folder: Path, launcher: subprocess.Popen[str] | None = None) -> list[Path]:
    latest = folder / "multirun_outputs" / "latest"
    until(lambda: (latest / "index.json").exists() or (launcher is not None and launcher.poll() is not None), seconds=120)
    if launcher is not None and launcher.poll() is not None:
        pytest.fail("\n".join(launcher.communicate()))
    return runs_of(latest.resolve())


def _job(run: Path) -> str:
    job_id = status(run).job_id
    assert job_id is not None
    return job_id


@contextmanager
def _draining(cluster: Slurm) -> Iterator[None]:
    """Jobs wait meanwhile."""
    for node in ("n0", "n1"):
        cluster.drained(node)
    try:
        yield
    finally:
        for node in ("n0", "n1"):
            cluster.resumed(node)


def _submitted(runs: list[Path]) -> bool:
    return all(status(run).job_id is not None for run in runs)


def test_an_array_of_twelve_with_a_failing_run_a_cancelled_one_and_a_yaml_edited_in_the_queue(
    cluster: Slurm, tmp_path: Path
) -> None:
    study = tmp_path / "conf" / "experiment" / "mine.yaml"
    study.parent.mkdir(parents=True)
    study.write_text("# @package _global_\nname: mine\nlr: 3e-4\nupdates: 2\n")
    with _draining(cluster):
        launcher = _start(
            tmp_path, "experiment=mine", "arm=grpo,tis_ppo,san", "seed=1,2,3,4", "hydra.launcher.array_parallelism=3"
        )
        runs = _runs(tmp_path, launcher)
        until(lambda: _submitted(runs))
        array = _job(runs[0]).partition("_")[0]
        assert [_job(run) for run in runs] == [f"{array}_{i}" for i in range(12)]
        told = json.loads(pth("status", "--json", cwd=tmp_path).stdout)
        assert {run["state"] for run in told["runs"]} == {"QUEUED"}
        elsewhere = pth("resume", "--only", "3", "--launcher", "pth_local", cwd=tmp_path)
        assert elsewhere.returncode == 1 and f"job {array}_3 is in SLURM's queue; left to it" in elsewhere.stderr
        assert "nothing to run" in pth("sbatch", cwd=tmp_path).stdout
        study.write_text("# @package _global_\nname: mine\nlr: 9e-4\nupdates: 5\n")
        edited = runs[10] / "frozen.yaml"
        edited.write_text(edited.read_text().replace("lr: 0.0003", "lr: 0.0009"))
        cluster.run("scancel", f"{array}_11")
    out, err = launcher.communicate()
    assert launcher.returncode == 1, err + out
    assert "12 runs: 10 completed, 2 failed" in err
    assert [state(run)[0] for run in runs] == [State.COMPLETED] * 10 + [State.FAILED] * 2
    assert (
        "was frozen with sha256" in state(runs[10])[1] and state(runs[11])[1] == f"job {array}_11 was cancelled before it began"
    )
    for run in runs[:10]:
        records = RunRecords.load(run)
        assert [row["update"] for row in records.updates] == [0, 1] and not records.problems
        assert {row["actor/lr"] for row in records.updates} == {3e-4}
        assert {(row["state"], row["by"].split()[0]) for row in history(run)} == {
            ("FROZEN", "launcher"), ("QUEUED", "launcher"), ("RUNNING", "worker"), ("COMPLETED", "worker"),
        }  # fmt: skip
    assert cluster.job(f"{array}_9")["JobState"] == "COMPLETED"
    assert (cluster.job(f"{array}_10")["JobState"], cluster.job(f"{array}_10")["ExitCode"]) == ("FAILED", "2:0")

    with _draining(cluster):
        again = pth("resume", "--only", "11", "launcher.wait=false", cwd=tmp_path)
        assert again.returncode == 0 and "1 submitted" in again.stderr, again.stderr
        job_id = _job(runs[11])
        command = [sys.executable, "-P", "-m", "pth_exp.cli", "resume", "--only", "11"]
        follower = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert follower.stdout is not None
        until(lambda: "following it" in follower.stdout.readline())
    told = follower.communicate()[0]
    assert follower.returncode == 0 and "1 run: 1 completed" in told, told
    assert _job(runs[11]) == job_id and [row["update"] for row in RunRecords.load(runs[11]).updates] == [0, 1]


def test_cancelled_interrupted_and_killed(cluster: Slurm, tmp_path: Path) -> None:
    """A running job that is cancelled; then Ctrl-C, with one that waits; then a launcher that dies, whose jobs go on."""
    container = "hydra.launcher.container='env PTH_TEST_CONTAINER=1'"
    launcher = _start(
        tmp_path,
        "arm=grpo",
        "seed=1,2,3",
        ENDLESS,
        container,
        "hydra.launcher.cpus_per_task=2",
        "hydra.launcher.array_parallelism=1",
    )
    first, second, third = _runs(tmp_path, launcher)
    until(all_reach([first], 2))
    assert "PTH_TEST_CONTAINER=1" in Path(f"/proc/{pid_of(first)}/environ").read_text()
    step = cluster.run("scontrol", "-o", "show", "step", f"{_job(first)}.0")
    assert re.search(r"\.0 .* CPUs=2 ", step), step
    cluster.run("scancel", _job(first))
    until(lambda: state(first) == (State.PREEMPTED, "SIGTERM received"))
    until(all_reach([second], 2))
    workers = [pid_of(first), pid_of(second)]
    launcher.send_signal(signal.SIGINT)
    out, err = launcher.communicate()
    assert launcher.returncode == 1 and "3 runs: 1 queued, 2 preempted" in err, err + out
    assert "cancelled in SLURM, with a checkpoint" in err
    assert state(second) == (State.PREEMPTED, "SIGINT received by the launcher")
    assert state(third)[0] is State.QUEUED and not cluster.run("squeue", "--noheader").strip()
    assert not alive(workers)
    for run in (first, second):
        records = RunRecords.load(run)
        assert not records.problems and list((run / "checkpoint").glob(f"update-{len(records.updates):08d}-*"))

    command = [sys.executable, "-P", "-m", "pth_exp.cli", "resume", "--only", "1"]
    resumed = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(lambda: state(second)[0] is State.RUNNING)
    resumed.kill()
    resumed.wait()
    reached = len(RunRecords.load(second).updates)
    until(all_reach([second], reached + 2))
    told = pth("resume", "--only", "1", cwd=tmp_path)
    assert "is running" in told.stderr and "left alone" in told.stderr
    cluster.run("scancel", _job(second))
    until(lambda: state(second)[0] is State.PREEMPTED and not alive([pid_of(second, 2)]))
    records = RunRecords.load(second)
    assert [row["update"] for row in records.updates] == list(range(len(records.updates))) and not records.problems


GATE = """
    while _rows() >= 3 and not Path("go").exists():
        time.sleep(0.05)
"""
COUNT = """
def _rows() -> int:
    return sum(path.read_bytes().count(10) for path in Path("multirun_outputs/latest").glob("0*/updates.*.jsonl"))


ARMS: dict"""


def _gated_study(folder: Path) -> None:
    """A loss that trains three updates and then waits for a file."""
    assert pth("new", "arm", "gated", cwd=folder).returncode == 0
    losses = folder / "my_losses.py"
    text = losses.read_text().replace("from collections.abc", "import time\nfrom pathlib import Path\nfrom collections.abc", 1)
    losses.write_text(text.replace("    terms =", f"{GATE}    terms =", 1).replace("ARMS: dict", COUNT, 1))


def _soon(cluster: Slurm, job_id: str) -> None:
    """SLURM has a requeued job wait for two minutes; within the second of its end a node would not take it again."""
    until(lambda: cluster.job(job_id)["JobState"] == "PENDING")
    cluster.run("scontrol", "update", f"JobId={job_id}", "StartTime=now+3")


def test_a_time_out_is_requeued_and_continues_to_the_last_bit(cluster: Slurm, tmp_path: Path) -> None:
    _gated_study(tmp_path)
    shape = ["arm=gated", "seed=1", "updates=12", "refresh_interval=4", "replay_age=3"]
    launcher = _start(tmp_path, *shape, "hydra.launcher.timeout_min=2", "hydra.launcher.signal_delay_s=60")
    (run,) = _runs(tmp_path, launcher)
    until(lambda: _submitted([run]))
    until(all_reach([run], 2))
    job_id, log = _job(run), run.parent / "slurm" / f"{_job(run)}_0_log.out"
    until(lambda: "SIGUSR2 received" in log.read_text())
    (tmp_path / "go").touch()
    until(lambda: "requeued: the time limit is near" in state(run)[1])
    _soon(cluster, job_id)
    out, err = launcher.communicate()
    assert launcher.returncode == 0, err + out
    assert [(row["state"], row["by"].split()[0]) for row in history(run)] == [
        ("FROZEN", "launcher"),
        ("QUEUED", "launcher"),
        ("RUNNING", "worker"),
        ("PREEMPTED", "worker"),
        ("QUEUED", "job"),
        ("RUNNING", "worker"),
        ("COMPLETED", "worker"),
    ]
    local = [word for word in RUN if "launcher" not in word]
    whole = pth(*local, *shape, cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    (uninterrupted,) = _runs(tmp_path)
    assert uninterrupted != run and {row["attempt"] for row in RunRecords.load(run).updates} == {1, 2}
    assert numbers(run) == numbers(uninterrupted)


def test_a_preempted_run_makes_room_and_comes_back(cluster: Slurm, tmp_path: Path) -> None:
    launcher = _start(tmp_path, "arm=grpo", "seed=1", ENDLESS)
    (run,) = _runs(tmp_path, launcher)
    until(all_reach([run], 2))
    urgent = cluster.run("sbatch", "--parsable", "-p", "urgent", "-N2", "-n8", "-o", "/dev/null", "--wrap", "srun true").strip()
    until(lambda: state(run) == (State.QUEUED, "requeued: preempted"))
    until(lambda: cluster.job(urgent)["JobState"] == "COMPLETED")
    reached = len(RunRecords.load(run).updates)
    _soon(cluster, _job(run))
    until(all_reach([run], reached + 2))
    cluster.run("scancel", _job(run))
    out, err = launcher.communicate()
    assert launcher.returncode == 1 and "1 preempted" in err, err + out
    records = RunRecords.load(run)
    assert not records.problems and {row["attempt"] for row in records.updates} == {1, 2}
    assert [row["update"] for row in records.updates] == list(range(len(records.updates)))


def test_a_plain_script_without_submitit(cluster: Slurm, tmp_path: Path) -> None:
    tmp_path = tmp_path / "a study"
    tmp_path.mkdir()
    words = [word for word in RUN if "launcher" not in word]
    frozen = pth(*words, "arm=grpo,san", "seed=1", "updates=2", "hydra/launcher=pth_freeze", cwd=tmp_path)
    assert frozen.returncode == 0 and "2 runs: 2 frozen" in frozen.stderr, frozen.stderr
    first, second = _runs(tmp_path)
    assert [state(run)[0] for run in (first, second)] == [State.FROZEN] * 2
    for words in (["sbatch", "launcher.nodes=2"], ["resume", "--launcher", "pth_slurm", "launcher.nodes=2"]):
        refused = pth(*words, cwd=tmp_path)
        assert refused.returncode == 2 and "launcher.nodes=2: a run of stack=trainer is one process" in refused.stderr
    settings = ["launcher.timeout_min=7", "launcher.setup=[export PTH_TEST_SETUP=1]"]
    written = pth("sbatch", *settings, "launcher.additional_parameters={comment: it's ours}", cwd=tmp_path)
    assert written.returncode == 0, written.stderr
    script = first.parent / "sbatch" / "job.sh"
    assert f"sbatch {script}" in written.stdout
    text = script.read_text()
    assert "submitit" not in text and "#SBATCH --array=0-1\n" in text and "#SBATCH --time=7\n" in text
    assert "\nexport PTH_TEST_SETUP=1\n" in text
    with _draining(cluster):
        job_id = cluster.run("sbatch", "--parsable", str(script)).strip()
        assert "Comment=it's ours" in cluster.run("scontrol", "-o", "show", "job", f"{job_id}_1")
        left = pth("resume", cwd=tmp_path)
        assert left.returncode == 1 and f"job {job_id}_1 is in SLURM's queue; left to it" in left.stderr, left.stderr
        assert "nothing to run" in pth("sbatch", cwd=tmp_path).stdout
        adopted = pth("resume", "--launcher", "pth_slurm", "launcher.wait=false", cwd=tmp_path)
        assert adopted.returncode == 0 and f"job {job_id}_0 is in the queue already; following it" in adopted.stdout
        assert [status(run).job_id for run in (first, second)] == [f"{job_id}_0", f"{job_id}_1"]
    until(lambda: all(cluster.job(f"{job_id}_{i}")["JobState"] in ("COMPLETED", "FAILED") for i in (0, 1)))
    for index, run in enumerate((first, second)):
        assert state(run)[0] is State.COMPLETED, state(run)
        assert status(run).job_id == f"{job_id}_{index}"
    again = pth("sbatch", cwd=tmp_path)
    assert again.returncode == 0 and "nothing to run" in again.stdout


def test_what_cannot_be_submitted_is_refused_before_anything_is_frozen(cluster: Slurm, tmp_path: Path) -> None:
    def refused(*words: str) -> str:
        told = pth(*RUN, "arm=grpo", "updates=2", *words, cwd=tmp_path)
        assert told.returncode == 2 and "Traceback" not in told.stderr, told.stderr
        assert not (tmp_path / "multirun_outputs").exists()
        return told.stderr

    partition = refused("hydra.launcher.partition=nowhere")
    assert "partition=nowhere" in partition and "invalid partition" in partition.lower()
    assert "launcher.timeout_min=0: is not a whole number of at least 1" in refused("hydra.launcher.timeout_min=0")
    assert "is what the field launcher.mem_gb decides" in refused("+hydra.launcher.additional_parameters.mem=4G")
    assert "leaves nothing of the 1 minutes" in refused("hydra.launcher.timeout_min=1", "hydra.launcher.signal_delay_s=60")


def test_a_node_that_fails_loses_no_update(cluster: Slurm, tmp_path: Path) -> None:
    launcher = _start(tmp_path, "arm=grpo", "seed=1", ENDLESS)
    (run,) = _runs(tmp_path, launcher)
    until(all_reach([run], 4))
    job_id = _job(run)
    failed = cluster.job(job_id)["NodeList"]
    cluster.run("scontrol", "update", f"NodeName={failed}", "State=DOWN", "Reason=test")
    cluster.drained(failed)  # it would return to service as soon as it answers
    try:
        until(lambda: cluster.job(job_id)["JobState"] == "PENDING" and not alive([pid_of(run)]))
        reached = len(RunRecords.load(run).updates)
        _soon(cluster, job_id)
        until(all_reach([run], reached + 6))
        assert cluster.job(job_id)["NodeList"] != failed
        launcher.send_signal(signal.SIGINT)
        out, err = launcher.communicate()
    finally:
        cluster.resumed(failed)
    assert launcher.returncode == 1 and "1 preempted" in err, err + out
    states, begun, again = [row["state"] for row in history(run)], ["FROZEN", "QUEUED", "RUNNING"], ["RUNNING", "PREEMPTED"]
    assert states in ([*begun, "PREEMPTED", *again], [*begun, "LOST", *again])  # as SLURM kills it at once or after KillWait
    records = RunRecords.load(run)
    assert [row["update"] for row in records.updates] == list(range(len(records.updates)))
    assert {problem.kind for problem in records.problems} <= {"torn"}


def test_a_job_that_finds_its_run_taken_leaves_it_alone(cluster: Slurm, tmp_path: Path) -> None:
    with _draining(cluster):
        launcher = _start(tmp_path, "arm=grpo", "seed=1", ENDLESS)
        (run,) = _runs(tmp_path, launcher)
        until(lambda: _submitted([run]))
        sha256 = (run / "frozen.sha256").read_text().strip()
        command = [sys.executable, "-P", "-m", "pth_exp.worker", "--frozen", str(run / "frozen.yaml"), "--sha256", sha256]
        other = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until(all_reach([run], 1))
    out, err = launcher.communicate()
    assert launcher.returncode == 1 and "another worker has it" in err, err + out
    assert state(run)[0] is State.RUNNING
    other.terminate()
    assert other.wait() == 3
    assert {row["attempt"] for row in RunRecords.load(run).updates} == {1}
