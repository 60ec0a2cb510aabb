"""The Ray cluster of a verl job: the one that its place names, or one of its own that goes with it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pth_exp import marked
from pth_exp.schema import VerlStack
from pth_exp.verl_stack import frozen
from pth_exp.verl_stack.watchdog import Watchdog

VARIABLE = "PTH_RAY_ADDRESS"
"""Set by a place that runs the job on a cluster: what ``ray.init`` is to join."""
LOGICAL_CPUS = 16
"""That verl's processes ask for; they are not what they use."""
SHUTDOWN_SECONDS = 30.0
ATTEMPTS = 3
_SLOW = "timed out during startup"
"""What Ray says of a node that was not up within 30 s, of which a busy machine may need more."""


def address(stack: VerlStack) -> str | None:
    """Of the cluster to join; None for one of the run's own."""
    return stack.ray_address or os.environ.get(VARIABLE)


@contextmanager
def joined(stack: VerlStack, device: str, environment: dict[str, str], scratch: Path, watchdog: Watchdog) -> Iterator[None]:
    """Connected to the cluster. Raises ValueError when it has fewer GPUs than ``stack.ranks``, real ones or stand-ins."""
    where = address(stack)
    if where is None:
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # what makes Ray stay on loopback; read when it is imported
    os.environ["RAY_OVERRIDE_JOB_RUNTIME_ENV"] = "1"  # inside a job that has an environment of its own
    import ray
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

    runtime: dict[str, Any] = get_ppo_ray_runtime_env(None)
    runtime["env_vars"] = {**runtime["env_vars"], **environment, "TRANSFER_QUEUE_ENABLE": "1"}
    arguments: dict[str, Any] = {"runtime_env": runtime, "log_to_driver": True}
    if where is not None:
        arguments["address"] = where
    else:
        arguments |= {"include_dashboard": False, "_temp_dir": f"{scratch}/ray", "num_cpus": LOGICAL_CPUS, "address": "local"}
        if device == "cpu":
            arguments["num_gpus"] = stack.ranks  # stand-ins: verl places its workers by GPU
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    _init(arguments)
    for number, handler in handlers.items():
        signal.signal(number, handler)  # Ray ends the driver at once; the run stops at an update
    left = threading.Event()
    if where is None:
        threading.Thread(target=_watch_head, args=(watchdog, left), name="ray head", daemon=True).start()
    try:
        if where is not None:
            _require_gpus(int(ray.cluster_resources().get("GPU", 0)), stack.ranks, device)
        yield
    finally:
        watchdog.rest()
        left.set()
        _leave()


def _init(arguments: dict[str, Any]) -> None:
    """``ray.init``, and again where its own node was slow; a start that fails leaves nothing."""
    import ray

    for attempt in range(1, ATTEMPTS + 1):
        try:
            ray.init(**arguments)
            return
        except Exception as error:
            _leave()
            if _SLOW not in str(error) or attempt == ATTEMPTS:
                raise


def _require_gpus(there: int, ranks: int, device: str) -> None:
    if there < ranks:
        remedy = "start it with GPUs" if device == "cuda" else f"start it with --num-gpus={ranks}: on CPUs they are stand-ins"
        raise ValueError(f"stack.ranks: {ranks} ranks take a GPU each, and the Ray cluster has {there}; {remedy}")


def _watch_head(watchdog: Watchdog, left: threading.Event) -> None:
    """Tell the watchdog when a process of this run's own head ends: those who wait for it may wait for ever."""
    import psutil

    parts = {process: process.name() for process in psutil.Process().children()}
    while not left.wait(0.5):
        for process, name in parts.items():
            if name in ("gcs_server", "raylet") and (not process.is_running() or process.status() == psutil.STATUS_ZOMBIE):
                watchdog.fail(f"the run's Ray head is broken: its {name}, pid {process.pid}, is gone")
                return


def segments() -> set[Path]:
    """Named shared memory of this job's processes on this machine."""
    return marked.held(frozen.PATH, os.environ[frozen.PATH], Path(os.environ["TMPDIR"]))


def _leave() -> None:
    """Disconnect, within a bound, and end what the job has started and Ray has not ended."""
    import ray

    left = segments()
    shutdown = threading.Thread(target=ray.shutdown, name="ray shutdown", daemon=True)
    shutdown.start()
    shutdown.join(SHUTDOWN_SECONDS)
    left |= marked.end(lambda: marked.processes(frozen.PATH, os.environ[frozen.PATH], Path(os.environ["TMPDIR"])))
    shutdown.join(SHUTDOWN_SECONDS)
    marked.remove(left)
