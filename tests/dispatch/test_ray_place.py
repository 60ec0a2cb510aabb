"""The Ray place's own decisions, with a stand-in for the Jobs API that runs each entrypoint as a process."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from frozen_sweeps import runs_of, until

from pth_exp import freeze, resume
from pth_exp.launchers import place, places, ray
from pth_exp.launchers.place import Job
from pth_exp.launchers.places import open_place
from pth_exp.launchers.ray import RayPlace
from pth_exp.launchers.ray_jobs import Jobs, Report, bounded
from pth_exp.lifecycle import State, history, read_attempt, state
from pth_exp.refusal import Refusal

WORKER = Path(__file__).with_name("instant_worker.py")


class Cluster(Jobs):
    """``cpus`` logical CPUs; starts what fits in the order in which it came, and keeps a diary."""

    def __init__(self, cpus: float) -> None:
        self.address, self.cpus = "http://stand-in:8265", cpus
        self.queue: list[tuple[str, str, dict[str, str], float]] = []
        self.running: dict[str, tuple[subprocess.Popen[bytes], float]] = {}
        self.ended: dict[str, Report] = {}
        self.diary: list[str] = []
        self.silent = False
        self.patience = 1e9
        self.stopped: set[str] = set()
        self.hiccups: list[Exception] = []
        self.submitted: dict[str, float] = {}

    def submit(self, job_id: str, entrypoint: str, variables: Mapping[str, str], need: Mapping[str, Any], run: str) -> None:
        if self.hiccups:
            raise self.hiccups.pop(0)
        self.queue.append((job_id, entrypoint, dict(variables), need["num_cpus"]))
        self.submitted[job_id] = time.monotonic()
        self.diary.append(f"submit {job_id}, {len(self.queue)} waiting, {len(self.running)} running")

    def report(self, job_id: str) -> Report:
        if self.silent:
            raise ConnectionError("connection refused")
        for name, (process, _) in list(self.running.items()):
            if (code := process.poll()) is not None:
                del self.running[name]
                self.ended[name] = Report("SUCCEEDED" if code == 0 else "FAILED", "Job entrypoint command failed", code)
        while self.queue and self.queue[0][3] + sum(cpus for _, cpus in self.running.values()) <= self.cpus:
            name, entrypoint, variables, cpus = self.queue.pop(0)
            if name in self.stopped:
                self.ended[name] = Report("STOPPED", "", None)
                continue
            environment = {**os.environ, **variables}
            process = subprocess.Popen(
                entrypoint, shell=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            self.running[name] = process, cpus
        for waiting in [*self.queue]:
            if time.monotonic() - self.submitted[waiting[0]] > self.patience:
                self.queue.remove(waiting)
                why = "Job supervisor actor failed to start within 900.0 seconds. This timeout can be configured"
                self.ended[waiting[0]] = Report("FAILED", why, None)
        if job_id in self.ended:
            return self.ended[job_id]
        return Report("RUNNING" if job_id in self.running else "PENDING", "", None)

    def taken(self) -> set[str]:
        return set()

    def log(self, job_id: str) -> str:
        return "Running entrypoint\n/bin/sh: 1: cd: can't cd to /elsewhere\n"

    def stop(self, job_id: str) -> None:
        """As Ray does: a job that waits goes on waiting, and ends when it starts."""
        self.diary.append(f"stop {job_id}")
        self.stopped.add(job_id)
        if job_id in self.running:
            self.running.pop(job_id)[0].kill()
            self.ended[job_id] = Report("STOPPED", "", None)

    def resources(self) -> dict[str, float]:
        return {"CPU": self.cpus, "memory": 4e9}


@pytest.fixture
def jobs(sweep: Path, monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    monkeypatch.setattr(place, "WORKER", (str(WORKER),))
    monkeypatch.setattr(ray, "_POLL_SECONDS", 0.02)
    monkeypatch.setattr(ray, "_REFRESH_SECONDS", 0.02)
    return [Job.of(freeze.load(run / "frozen.yaml")) for run in runs_of(sweep)]


def _told(job: Job, deed: str) -> Job:
    return dataclasses.replace(job, environment={"PTH_TEST_DEED": deed})


def _place(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> tuple[RayPlace, io.StringIO]:
    monkeypatch.setattr(ray, "_connect", lambda *_: cluster)
    shown = io.StringIO()
    return RayPlace("http://stand-in:8265", stream=shown, **settings), shown


def test_each_end_is_told_and_ids_number_the_attempts(jobs: list[Job], monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(8)
    deeds = ["kill", "complete", "raise"]
    ray_place, _ = _place(cluster, monkeypatch)
    results = ray_place.dispatch([_told(job, deed) for job, deed in zip(jobs, deeds, strict=True)])
    assert [result.state for result in results] == [State.LOST, State.COMPLETED, State.FAILED]
    assert results[0].message.startswith("its worker ended by signal 9 (SIGKILL) without a last word")
    assert results[2].message == "the cat ate it" and results[2].log_tail.splitlines()[-1] == "last words of grpo·seed=3"
    ids = [read_attempt(job.run_dir, 1).job_id for job in jobs]
    name = jobs[0].run_dir.parent.name
    assert ids == [f"pth-{name}-00{i}-1" for i in range(3)]
    assert read_attempt(jobs[0].run_dir, 1).place == "ray"
    again, _ = _place(cluster, monkeypatch)
    (result,) = again.dispatch([_told(jobs[2], "complete")])
    assert result.state is State.COMPLETED and read_attempt(jobs[2].run_dir, 2).job_id == f"pth-{name}-002-2"


def test_only_one_job_waits_in_rays_queue(jobs: list[Job], monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(2)
    ray_place, _ = _place(cluster, monkeypatch)
    results = ray_place.dispatch([_told(job, "complete") for job in jobs])
    assert all(result.state is State.COMPLETED for result in results)
    assert all(", 1 waiting," in line for line in cluster.diary), cluster.diary


def test_a_head_that_is_not_ready_is_asked_again(jobs: list[Job], monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(2)
    cluster.hiccups = [RuntimeError("No available agent to submit job"), ConnectionError("remote end closed connection")]
    ray_place, _ = _place(cluster, monkeypatch)
    assert ray_place.dispatch([_told(jobs[0], "complete")])[0].state is State.COMPLETED
    cluster.hiccups = [RuntimeError("Request failed with status code 400: runtime_env is invalid")]
    (result,) = ray_place.dispatch([_told(jobs[1], "complete")])
    assert result.state is State.FAILED and "runtime_env is invalid" in result.message


def test_a_job_that_was_taken_although_the_connection_broke_is_followed(jobs: list[Job], monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(2)
    submit = cluster.submit

    def breaking(job_id: str, *rest: Any) -> None:
        if job_id in cluster.submitted:
            raise RuntimeError(f"Job with submission_id {job_id} already exists.")
        submit(job_id, *rest)
        raise ConnectionError("remote end closed connection")

    monkeypatch.setattr(cluster, "submit", breaking)
    ray_place, _ = _place(cluster, monkeypatch)
    assert ray_place.dispatch([_told(jobs[0], "complete")])[0].state is State.COMPLETED


def test_a_verl_run_has_the_cluster_to_itself(jobs: list[Job], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cluster = Cluster(8)
    told = [_told(job, "complete") for job in jobs]
    python = Path(sys.executable)
    told[1] = dataclasses.replace(told[1], stack="verl", python=str(python))
    ray_place, _ = _place(cluster, monkeypatch)
    assert all(result.state is State.COMPLETED for result in ray_place.dispatch(told))
    (verl,) = [line for line in cluster.diary if "-001-1," in line]
    assert verl.endswith("0 running") and verl is cluster.diary[-1], "those of the trainer go first, side by side"


def test_what_never_starts_fails_with_what_it_asks_for_and_what_is_there(
    jobs: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    ray_place, _ = _place(Cluster(2), monkeypatch, num_cpus=64, resources={"tpu": 1}, start_timeout=0.1)
    results = ray_place.dispatch([_told(jobs[0], "complete")])
    assert results[0].state is State.FAILED
    assert (
        "within 0.1 s (launcher.start_timeout): it asks for cpus 64, tpu 1; the cluster has CPU 2, memory" in results[0].message
    )
    assert state(jobs[0].run_dir) == (State.FAILED, results[0].message)


def test_what_ray_gives_up_while_runs_of_its_own_sweep_go_on_is_submitted_anew_when_one_has_ended(
    jobs: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray fails a job that has waited for a quarter of an hour; here for a fifth of a second, and ours would fail it sooner."""
    cluster = Cluster(1)
    cluster.patience = 0.2
    ray_place, _ = _place(cluster, monkeypatch, start_timeout=60.0)

    def end_the_first() -> None:
        until(lambda: any("FAILED" in report.status for report in [*cluster.ended.values()]))
        until((jobs[0].run_dir / "ready").exists)
        cluster.patience = 1e9
        os.kill(int((jobs[0].run_dir / "ready").read_text()), signal.SIGTERM)

    thread = threading.Thread(target=end_the_first)
    thread.start()
    results = ray_place.dispatch([_told(jobs[0], "wait"), _told(jobs[1], "complete")])
    thread.join()
    assert [result.state for result in results] == [State.PREEMPTED, State.COMPLETED]
    assert str(read_attempt(jobs[1].run_dir, 1).job_id).endswith("-001-2"), "the id of the first job is spent"
    assert len([line for line in cluster.diary if "-001-" in line]) == 2, "and not before"


def test_a_cluster_that_falls_silent_loses_its_runs_and_asks_the_worker_to_stop(
    jobs: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(1)
    ray_place, shown = _place(cluster, monkeypatch, silence_timeout=2.0)

    def silence() -> None:
        until((jobs[0].run_dir / "ready").exists)
        cluster.silent = True

    thread = threading.Thread(target=silence)
    thread.start()
    results = ray_place.dispatch([_told(jobs[0], "wait"), _told(jobs[1], "complete"), _told(jobs[2], "complete")])
    thread.join()
    assert [result.state for result in results] == [State.LOST, State.QUEUED, State.QUEUED]
    assert "Ray at http://stand-in:8265 has not answered for" in results[0].message and "connection refused" in results[0].message
    assert list((jobs[0].run_dir / "attempts").glob("pth-*-000-1.stop"))
    os.kill(int((jobs[0].run_dir / "ready").read_text()), signal.SIGKILL)
    assert "2 not started: Ray at" in shown.getvalue()


def test_a_worker_whose_shell_fails_says_what_the_shell_said(jobs: list[Job], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray.os, "getcwd", lambda: "/elsewhere")
    ray_place, _ = _place(Cluster(1), monkeypatch)
    (result,) = ray_place.dispatch([_told(jobs[0], "complete")])
    assert result.state is State.FAILED and result.message.endswith("can't cd to /elsewhere")


def test_interrupts_ask_then_kill_and_take_back_what_waits(jobs: list[Job], monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(1)
    ray_place, shown = _place(cluster, monkeypatch)

    def interrupt() -> None:
        until((jobs[0].run_dir / "ready").exists)
        until(lambda: bool(cluster.queue))
        os.kill(os.getpid(), signal.SIGINT)
        until(lambda: bool(list((jobs[0].run_dir / "attempts").glob("*.stop"))))
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    results = ray_place.dispatch([_told(jobs[0], "wait"), _told(jobs[1], "complete"), _told(jobs[2], "complete")])
    thread.join()
    assert [result.state for result in results] == [State.LOST, State.QUEUED, State.QUEUED]
    assert results[0].message.startswith("its worker ended by Ray's stop")
    assert "SIGINT: 1 run to checkpoint" in shown.getvalue() and "SIGINT again: 1 run killed" in shown.getvalue()
    assert [row["state"] for row in history(jobs[1].run_dir)] == ["FROZEN", "QUEUED"]


def test_what_a_run_asks_for(jobs: list[Job], monkeypatch: pytest.MonkeyPatch) -> None:
    ray_place, _ = _place(Cluster(1), monkeypatch, memory_gb=2, resources={"fast_disk": 0.5})
    trainer, verl = jobs[0], dataclasses.replace(jobs[0], stack="verl", threads=3)
    gpus = {"CPU": 8.0, "GPU": 2.0}
    extra = {"memory": 2 << 30, "resources": {"fast_disk": 0.5}}
    assert ray_place.need(trainer, gpus) == {"num_cpus": 1, "num_gpus": 1.0, **extra}
    assert ray_place.need(dataclasses.replace(trainer, device="cpu"), gpus) == {"num_cpus": 1, **extra}
    assert ray_place.need(trainer, {"CPU": 8.0}) == {"num_cpus": 1, **extra}
    assert ray_place.need(verl, gpus) == {"num_cpus": 3, **extra}, "verl's processes ask for their GPUs themselves"
    variables = ray_place.variables(trainer, "pth-x-000-1")
    assert variables["PTH_PLACE"] == "ray" and variables["PTH_JOB_ID"] == "pth-x-000-1"
    assert variables["PTH_RAY_ADDRESS"] == "auto" and "PATH" not in variables, "not this machine's whole environment"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"slots": 0}, r"launcher.slots=0: leaves no run a place"),
        ({"start_timeout": -1}, r"launcher.start_timeout=-1: is no time to wait"),
        ({"env_vars": {"WANDB_API_KEY": "x"}}, r"launcher.env_vars=WANDB_API_KEY: would be shown by Ray"),
        ({"adress": "http://x:1"}, r"launcher.adress=http://x:1: is no setting of pth_ray; did you mean address\?"),
        ({"address": "http://x:1", "token_env": "NOT_SET"}, r"launcher.token_env=NOT_SET: the environment has no such variable"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(Refusal, match=says):
        open_place("pth_ray", settings)


def test_without_ray_the_refusal_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Refusal, match=r"needs Ray, which is not installed here\n    remedy: pip install 'pth-exp\[ray\]'"):
        RayPlace()


def test_a_call_is_bounded_in_time_and_keeps_its_error() -> None:
    assert bounded(5, lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        bounded(5, lambda: 1 // 0)
    forever = threading.Event()
    with pytest.raises(TimeoutError, match=r"no answer within 0\.05 s"):
        bounded(0.05, forever.wait)
    forever.set()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--launcher", "pth_rai"], "launcher=pth_rai: is no place; did you mean pth_ray?"),
        (["launcher.slot=2"], "launcher.slot=2: is no setting of pth_local; did you mean slots?"),
        (["launcher.slots=none"], "slots=none: leaves no run a place"),
        (["--launcher", "pth_ray", "launcher.silence_timeout=0"], "launcher.silence_timeout=0: is no time to wait"),
        (["launcher.slots"], "launcher.slots: has no value"),
        (["elsewhere"], "is more than one"),
    ],
)
def test_resume_refuses_a_place_it_cannot_open(
    sweep: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    assert resume.main([str(sweep), *words]) == 2
    assert says in capsys.readouterr().err


def test_resume_goes_on_where_the_sweep_was_launched(sweep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless told otherwise; another place starts from its own defaults."""
    opened: list[tuple[str, Any]] = []

    def opening(name: str, settings: Mapping[str, Any]) -> Any:
        opened.append((name, settings))
        raise Refusal([])

    monkeypatch.setattr(places, "open_place", opening)
    launch = json.loads((sweep / "launch.json").read_text())
    launch["launcher"] = {"name": "pth_ray", "settings": {"address": "http://a:1", "slots": 3}}
    (sweep / "launch.json").write_text(json.dumps(launch))
    for words in ([], ["launcher.address=http://b:2"], ["--slots", "1"], ["--launcher", "pth_local"]):
        resume.main([str(sweep), *words])
    assert opened == [
        ("pth_ray", {"address": "http://a:1", "slots": 3}),
        ("pth_ray", {"address": "http://b:2", "slots": 3}),
        ("pth_ray", {"address": "http://a:1", "slots": 1}),
        ("pth_local", {}),
    ]
