"""A verl job's Ray cluster when something in it stops answering, or dies: real Ray, and each case in a process of its own.

A process imports verl once, for a CPU or not; the job's processes do when they start.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="not verl's environment: make verl")

from pth_exp import marked
from pth_exp.freeze import HASH_FILE
from pth_exp.schema import VerlStack
from pth_exp.verl_stack import frozen, host

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


def test_a_start_that_took_too_long_is_made_again(tmp_path: Path) -> None:
    done = _driven("slow", tmp_path)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "[False, True]", done.stdout + done.stderr
