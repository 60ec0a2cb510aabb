"""A verl job's Ray cluster when something in it stops answering, or dies: real Ray, in this process."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="not verl's environment: make verl")

import psutil
import ray

from pth_exp import marked
from pth_exp.freeze import HASH_FILE
from pth_exp.schema import VerlStack
from pth_exp.verl_stack import cluster, frozen, host
from pth_exp.verl_stack.reasons import reason
from pth_exp.verl_stack.watchdog import Broken, Stalled, Watchdog, watching


@ray.remote
class Waiter:
    def pid(self) -> int:
        return os.getpid()


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[VerlStack, dict[str, str], str]]:
    (tmp_path / HASH_FILE).write_text("0" * 64)
    stack = VerlStack("verl", device="cpu")
    with tempfile.TemporaryDirectory(prefix="pth-", dir="/tmp", ignore_cleanup_errors=True) as scratch:
        environment = host._environment(tmp_path, stack, "cpu") | {"TMPDIR": scratch}
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        yield stack, environment, scratch
    assert not ray.is_initialized()
    assert not marked.processes(frozen.PATH, environment[frozen.PATH])


def _joined(job: tuple[VerlStack, dict[str, str], str], watchdog: Watchdog) -> AbstractContextManager[None]:
    stack, environment, scratch = job
    watchdog.allow(300, "the start", "stack.start_timeout")
    return cluster.joined(stack, "cpu", environment, Path(scratch), watchdog)


def test_a_wait_for_a_process_that_does_not_answer_is_ended(job: tuple[VerlStack, dict[str, str], str]) -> None:
    says = r"update 3 took longer than it may \(stack.update_timeout=1 seconds\)"
    with pytest.raises(Stalled, match=says), watching() as dog, _joined(job, dog):
        waiter = Waiter.remote()
        os.kill(ray.get(waiter.pid.remote()), signal.SIGSTOP)
        dog.allow(1, "update 3")
        ray.get(waiter.pid.remote())


@pytest.mark.parametrize("part", ["gcs_server", "raylet"])
def test_a_head_that_dies_ends_the_wait(job: tuple[VerlStack, dict[str, str], str], part: str) -> None:
    with pytest.raises(Broken, match=f"its {part}, pid"), watching() as dog, _joined(job, dog):
        (head,) = [p for p in psutil.Process().children() if p.name() == part]
        head.kill()
        signal.pause()


def test_a_start_that_took_too_long_is_made_again(
    job: tuple[VerlStack, dict[str, str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    init, started = ray.init, list[int]()

    def slow(**arguments: Any) -> None:
        init(**arguments)
        started.append(next(p.pid for p in psutil.Process().children() if p.name() == "raylet"))
        if len(started) == 1:
            raise Exception("The current node timed out during startup. This could happen because of many things.")

    monkeypatch.setattr(ray, "init", slow)
    with watching() as dog, _joined(job, dog):
        assert [psutil.pid_exists(pid) for pid in started] == [False, True]


def test_a_dead_process_is_named_in_one_sentence(job: tuple[VerlStack, dict[str, str], str]) -> None:
    with watching() as dog, _joined(job, dog):
        waiter = Waiter.remote()
        pid = ray.get(waiter.pid.remote())
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ray.exceptions.RayActorError) as caught:
            ray.get(waiter.pid.remote())
    said = reason(caught.value)
    assert said is not None and said.startswith(f"verl's process Waiter, pid {pid}, died: ") and "\n" not in said
    assert reason(ValueError("another error")) is None
