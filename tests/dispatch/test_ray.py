"""Runs on a real Ray head: one that the launcher owns, and one that is there and asks for a token."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from frozen_sweeps import SMALL, SMALL_TASK, alive, all_reach, pid_of, pth, runs_of, until

from pth_exp import marked
from pth_exp.launchers.ray_head import MARK, Head
from pth_exp.lifecycle import State, read_attempt, state
from pth_exp.records.reader import RunRecords

pytest.importorskip("ray", reason="pip install 'pth-exp[ray]'")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

RUN = ["run", "hydra/launcher=pth_ray", *SMALL, *SMALL_TASK, "validation.every=null", "arm=grpo"]
ENDLESS = "updates=100000"
TOKEN = "PTH_TEST_TOKEN"


def _start(folder: Path, *overrides: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "pth_exp.cli", *RUN, *overrides],
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _runs(folder: Path) -> list[Path]:
    latest = folder / "multirun_outputs" / "latest"
    until((latest / "index.json").exists, seconds=120)
    return runs_of(latest.resolve())


def _mark(run: Path) -> str:
    """The mark of the head that started a run's worker."""
    environment = Path(f"/proc/{pid_of(run)}/environ").read_text()
    found = re.search(rf"{MARK}=(\w+)", environment)
    assert found is not None
    return found[1]


def _leaves_nothing(mark: str) -> None:
    until(lambda: not marked.processes(MARK, mark))


# --------------------------------------------------------------------------------------------------------- a head of its own


def test_a_sweep_stopped_by_control_c_resumes_on_the_place_it_was_launched_on(tmp_path: Path) -> None:
    """On a head of the launcher's own each time; whatever RAY_ADDRESS says, which Ray's client would follow."""
    launcher = _start(tmp_path, "updates=40", "seed=1,2", "hydra.launcher.slots=1", RAY_ADDRESS="http://127.0.0.1:1")
    first, second = _runs(tmp_path)
    until(all_reach([first], 4))
    mark = _mark(first)
    listening = subprocess.run(["ss", "-tlnpH"], capture_output=True, text=True, check=False).stdout
    own = {str(pid) for pid in marked.processes(MARK, mark)}
    theirs = [line for line in listening.splitlines() if own & set(re.findall(r"pid=(\d+)", line))]
    os.kill(launcher.pid, signal.SIGINT)
    out, err = launcher.communicate()
    assert launcher.returncode == 1, err
    assert [state(run)[0] for run in (first, second)] == [State.PREEMPTED, State.QUEUED], out + err
    assert state(first)[1] == "SIGINT received by the launcher" and list((first / "checkpoint").glob("update-*"))
    assert read_attempt(first, 1).job_id == f"pth-{first.parent.name}-000-1"
    _leaves_nothing(mark)
    assert theirs and all("127.0.0.1" in line.split()[3] for line in theirs), theirs

    resumed = pth("resume", "launcher.slots=2", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "starting a Ray head" in resumed.stdout and "2 runs: 2 completed" in resumed.stderr
    assert [read_attempt(run, n).job_id for run, n in ((first, 2), (second, 1))] == [
        f"pth-{first.parent.name}-000-2",
        f"pth-{first.parent.name}-001-1",
    ]
    records = RunRecords.load(first)
    assert [row["update"] for row in records.updates] == list(range(40)) and not records.problems


def test_no_worker_and_no_head_outlives_a_killed_launcher(tmp_path: Path) -> None:
    launcher = _start(tmp_path, ENDLESS)
    (run,) = _runs(tmp_path)
    until(all_reach([run], 2))
    mark = _mark(run)
    launcher.kill()
    launcher.wait()
    _leaves_nothing(mark)
    assert state(run) == (State.PREEMPTED, "SIGTERM received")
    assert not RunRecords.load(run).problems


@pytest.mark.parametrize("part", ["gcs_server", "raylet"])
def test_a_head_that_dies_loses_its_runs_at_once_and_leaves_nothing(tmp_path: Path, part: str) -> None:
    launcher = _start(tmp_path, ENDLESS)
    (run,) = _runs(tmp_path)
    until(all_reach([run], 2))
    mark = _mark(run)
    (victim,) = [p for p in marked.processes(MARK, mark) if Path(f"/proc/{p}/exe").resolve().name == part]
    os.kill(victim, signal.SIGKILL)
    out, err = launcher.communicate(timeout=600)
    assert launcher.returncode == 1
    found, why = state(run)
    assert found is State.LOST, out + err
    assert re.fullmatch(rf"the Ray head has ended: {part} ended by signal 9 \(SIGKILL\).*", why), why
    _leaves_nothing(mark)


# ------------------------------------------------------------------------------------------------------- a cluster that is there


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    """A head that stays, with two logical CPUs and a GPU that is none."""
    log = tmp_path_factory.mktemp("head") / "log.txt"
    ended: queue.SimpleQueue[str] = queue.SimpleQueue()
    settings = {"num_cpus": 2, "num_gpus": 1, "object_store_memory": 100_000_000}
    head = Head(Path(sys.executable), settings, log, ended.put)
    yield head
    head.close()
    assert ended.empty()


def _on(head: Head) -> list[str]:
    return [f"hydra.launcher.address={head.address}", f"hydra.launcher.token_env={TOKEN}"]


def test_a_job_killed_or_never_started_harms_no_other(head: Head, tmp_path: Path) -> None:
    """The worker of the first is killed. A second sweep asks for more than there is, and a third completes."""
    launcher = _start(tmp_path, *_on(head), ENDLESS, "hydra.launcher.num_gpus=0.5", **{TOKEN: head.token})
    (victim,) = _runs(tmp_path)
    until(all_reach([victim], 2))
    os.kill(pid_of(victim), signal.SIGKILL)
    _, err = launcher.communicate()
    assert launcher.returncode == 1 and state(victim)[0] is State.LOST
    assert "LOST: its worker ended by signal 9 (SIGKILL) without a last word" in err

    asks = ["hydra.launcher.num_cpus=64", "hydra.launcher.start_timeout=5", "hydra.launcher.num_gpus=0"]
    launcher = _start(tmp_path, *_on(head), "updates=2", *asks, **{TOKEN: head.token})
    _, err = launcher.communicate()
    (hungry,) = runs_of((tmp_path / "multirun_outputs" / "latest").resolve())
    assert state(hungry)[0] is State.FAILED and launcher.returncode == 1
    assert re.search(r"asks for cpus 64; the cluster has CPU 2, GPU 1, .*in all", state(hungry)[1]), err

    env = "hydra.launcher.env_vars={OMP_NUM_THREADS: 7, PTH_TEST_WORD: x}"
    launcher = _start(tmp_path, *_on(head), "updates=4", env, **{TOKEN: head.token})
    _, err = launcher.communicate()
    (third,) = runs_of((tmp_path / "multirun_outputs" / "latest").resolve())
    assert launcher.returncode == 0 and state(third)[0] is State.COMPLETED, err
    assert "completed" in (third / "log.txt").read_text()


def test_runs_on_a_cluster_go_on_when_the_launcher_is_killed(head: Head, tmp_path: Path) -> None:
    launcher = _start(tmp_path, *_on(head), "updates=60", **{TOKEN: head.token})
    (run,) = _runs(tmp_path)
    until(all_reach([run], 2))
    worker = pid_of(run)
    launcher.kill()
    launcher.wait()
    until(lambda: not alive([worker]))
    assert state(run)[0] is State.COMPLETED and len(RunRecords.load(run).updates) == 60


@pytest.mark.parametrize(
    ("variable", "token", "says"),
    [
        (TOKEN, "wrong", "the cluster at {address} refuses the token that this variable holds"),
        (TOKEN, "", "the cluster asks for a token, and this variable does not hold one"),
        ("RAY_AUTH_TOKEN", "", "the cluster asks for a token, and this variable does not hold one"),
    ],
)
def test_a_wrong_token_is_refused_before_anything_is_written(
    head: Head, tmp_path: Path, variable: str, token: str, says: str
) -> None:
    settings = [f"hydra.launcher.address={head.address}", f"hydra.launcher.token_env={variable}"]
    launcher = _start(tmp_path, *settings, "updates=2", **{variable: token})
    _, err = launcher.communicate()
    assert launcher.returncode == 2 and "pth run: refused, nothing was started" in err
    assert f"launcher.token_env={variable}: {says.format(address=head.address)}" in err
    assert not (tmp_path / "multirun_outputs").exists()


def test_an_address_where_nothing_answers_is_refused_within_its_time(tmp_path: Path) -> None:
    """A port that takes connections and never answers: only the time-out ends the wait."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"http://127.0.0.1:{mute.getsockname()[1]}"
        settings = [f"hydra.launcher.address={address}", "hydra.launcher.connect_timeout=2"]
        launcher = _start(tmp_path, *settings, "updates=2")
        _, err = launcher.communicate()
    assert launcher.returncode == 2
    assert f"launcher.address={address}: no Ray dashboard with a Jobs API answers there within 2 s: no answer within 2 s" in err
    assert "remedy: name it as http://host:8265" in err and "Traceback" not in err


def test_launch_json_keeps_the_settings_and_no_token(head: Head, tmp_path: Path) -> None:
    launcher = _start(tmp_path, *_on(head), "updates=2", **{TOKEN: head.token})
    _, err = launcher.communicate()
    assert launcher.returncode == 0, err
    sweep = (tmp_path / "multirun_outputs" / "latest").resolve()
    kept = json.loads((sweep / "launch.json").read_text())["launcher"]
    assert kept["name"] == "pth_ray" and kept["settings"]["address"] == head.address
    assert not [p for p in sweep.rglob("*") if p.is_file() and head.token.encode() in p.read_bytes()]
