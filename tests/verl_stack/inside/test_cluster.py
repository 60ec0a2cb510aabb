"""A verl job's Ray cluster when something in it stops answering, or dies: real Ray, and each case in a process of its own.

A process imports verl once, for a CPU or not; the job's processes do when they start.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("verl", reason="not verl's environment: make verl")

from pth_exp import marked
from pth_exp.freeze import HASH_FILE
from pth_exp.schema import VerlStack
from pth_exp.verl_stack import cluster, frozen, host
from pth_exp.verl_stack.watchdog import Broken, Watchdog, watching

DRIVER = """
import os, signal, sys
from pathlib import Path

import psutil
import ray

from pth_exp.schema import VerlStack
from pth_exp.verl_stack import cluster, frozen, reasons
from pth_exp.verl_stack.watchdog import watching

case = sys.argv[1]
environment = {name: os.environ[name] for name in sys.argv[2].split()}


@ray.remote
class Waiter:
    def pid(self):
        return os.getpid()


started = []


def slow(**arguments):
    init(**arguments)
    started.append(next(p.pid for p in psutil.Process().children() if p.name() == "raylet"))
    if len(started) == 1:
        raise Exception("The current node timed out during startup. This could happen because of many things.")


if case == "slow":
    init, ray.init = ray.init, slow

with watching() as watchdog:
    watchdog.allow(300, "the start", "stack.start_timeout")
    with cluster.joined(VerlStack("verl", device="cpu"), "cpu", environment, Path(os.environ["TMPDIR"]), watchdog):
        with reasons.in_one_sentence():
            if case == "slow":
                print([psutil.pid_exists(pid) for pid in started])
                sys.exit(0)
            if case in ("gcs_server", "raylet"):
                (head,) = [p for p in psutil.Process().children() if p.name() == case]
                head.kill()
                signal.pause()
            waiter = Waiter.remote()
            pid = ray.get(waiter.pid.remote())
            print("waiter", pid, flush=True)
            os.kill(pid, signal.SIGSTOP if case == "hangs" else signal.SIGKILL)
            watchdog.allow(1 if case == "hangs" else 300, "update 3")
            ray.get(waiter.pid.remote())
"""


def _driven(case: str, run_dir: Path) -> subprocess.CompletedProcess[str]:
    """The driver's end; nothing of the job is left."""
    (run_dir / HASH_FILE).write_text("0" * 64)
    own = host._environment(run_dir, VerlStack("verl", device="cpu"), "cpu")
    with tempfile.TemporaryDirectory(prefix="pth-", dir="/tmp", ignore_cleanup_errors=True) as scratch:
        own |= {"TMPDIR": scratch}
        command = [sys.executable, "-P", "-c", DRIVER, case, " ".join(own)]
        done = subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True, timeout=600, check=False)
        assert not marked.processes(frozen.PATH, own[frozen.PATH], Path(scratch))
    return done


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("hangs", "Stalled: update 3 took longer than it may (stack.update_timeout=1 seconds)"),
        ("dies", "JobFailed: verl's process Waiter, pid {pid}, died: Worker unexpectedly exits"),
        ("gcs_server", "Broken: the run's Ray head is broken: its gcs_server, pid"),
        ("raylet", "Broken: the run's Ray head is broken: its raylet, pid"),
    ],
)
def test_what_breaks_ends_the_wait_with_its_reason_and_leaves_nothing(case: str, says: str, tmp_path: Path) -> None:
    done = _driven(case, tmp_path)
    assert done.returncode == 1, done.stderr
    pid = done.stdout.rpartition("waiter ")[2].split()[0] if "waiter" in done.stdout else ""
    last = next(line for line in reversed(done.stderr.splitlines()) if line.startswith("pth_exp."))
    assert says.format(pid=pid) in last, done.stderr


@pytest.mark.parametrize(
    ("ranks", "gpus", "held"),
    [
        (1, [8], (1, 1)),
        (8, [8], (1, 8)),
        (8, [4, 4], (2, 4)),
        (6, [4, 2, 2], (3, 2)),
        (2, [1, 1, 0], (2, 1)),
        (4, [8, 8], (1, 4)),
    ],
)
def test_ranks_lie_on_as_few_nodes_as_hold_them_in_equal_parts(ranks: int, gpus: list[int], held: tuple[int, int]) -> None:
    assert cluster.layout(ranks, gpus, "cuda") == held


@pytest.mark.parametrize(
    ("ranks", "gpus", "device", "said"),
    [
        (4, [2], "cuda", "stack.ranks: 4 ranks take a GPU each, and the Ray cluster has 2; take more GPUs, or fewer ranks"),
        (4, [3, 1], "cuda", "the Ray cluster has 3 + 1 on its 2 nodes, which do not hold them in equal parts"),
        (2, [1], "cpu", "start it with --num-gpus=2"),
    ],
)
def test_a_cluster_that_cannot_hold_them_is_refused(ranks: int, gpus: list[int], device: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        cluster.layout(ranks, gpus, device)


def test_an_allocation_with_too_few_gpus_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # as SLURM sets it
    monkeypatch.setattr(cluster, "_init", lambda arguments: pytest.fail("Ray was started"))
    joined = cluster.joined(VerlStack("verl", device="cuda", ranks=2), "cuda", {}, tmp_path, Watchdog())
    with pytest.raises(ValueError, match="2 ranks take a GPU each, and the Ray cluster has 1"), joined:
        pass


def test_the_configs_cluster_comes_before_the_jobs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cluster.VARIABLE, "job:1")
    assert cluster.address(VerlStack("verl", ray_address="configured:1")) == "configured:1"
    assert cluster.address(VerlStack("verl")) == "job:1"


def test_a_cluster_that_does_not_answer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(cluster.VARIABLE, raising=False)
    monkeypatch.setattr(cluster, "REACH_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = f"127.0.0.1:{server.getsockname()[1]}"
    for address in (where, "no.such.host.invalid:6379"):
        joined = cluster.joined(VerlStack("verl", ray_address=address), "cpu", {}, tmp_path, Watchdog())
        said = rf"stack\.ray_address={address}: nothing answers there within 0\.2 s: .*host:port"
        with pytest.raises(ValueError, match=said), joined:
            pass
    monkeypatch.setenv(cluster.VARIABLE, where)
    joined = cluster.joined(VerlStack("verl"), "cpu", {}, tmp_path, Watchdog())
    with pytest.raises(ValueError, match=f"{cluster.VARIABLE}={where}: nothing answers"), joined:
        pass


def test_a_cluster_that_goes_away_ends_the_run_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr(cluster, "GONE_SECONDS", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address=where))
        with watching() as watchdog:
            watch = threading.Thread(target=cluster._watch_cluster, args=(watchdog, left := threading.Event()), daemon=True)
            watch.start()
            for _ in range(2):
                server.accept()[0].close()
            left.set()
            watch.join()
            assert watchdog.error is None
    with pytest.raises(Broken, match=f"the Ray cluster at {where} is gone"), watching() as watchdog:
        cluster._watch_cluster(watchdog, threading.Event())
        signal.pause()


def test_a_start_that_took_too_long_is_made_again(tmp_path: Path) -> None:
    done = _driven("slow", tmp_path)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "[False, True]", done.stdout + done.stderr
