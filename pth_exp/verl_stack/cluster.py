"""The Ray cluster of a verl job: the one that its place names, or one of its own that goes with it.

What this starts, Ray's and verl's processes and vLLM's, holds on when a stop signal reaches it: the worker hears the same one,
stops at its next update, and ends them.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pth_exp import machine, marked, steadfast
from pth_exp.schema import VerlStack
from pth_exp.verl_stack import frozen
from pth_exp.verl_stack.watchdog import Watchdog

VARIABLE = "PTH_RAY_ADDRESS"
"""Set by a place that runs the job on a cluster: what ``ray.init`` is to join."""
LOGICAL_CPUS, OF_A_RANK = 16, 3
"""That verl's processes ask for, and each rank besides; they are not what they use."""
SHUTDOWN_SECONDS = 30.0
REACH_SECONDS = 15.0
"""For a cluster's address to answer."""
GONE_SECONDS = 20.0
"""A cluster whose address has not answered for so long is gone; a machine that fails answers nothing at all."""
ATTEMPTS = 3
_SLOW = "timed out during startup"
"""What Ray says of a node that was not up within 30 s, of which a busy machine may need more."""


def address(stack: VerlStack) -> str | None:
    """Of the cluster to join; None for one of the run's own."""
    return stack.ray_address or os.environ.get(VARIABLE)


@contextmanager
def joined(
    stack: VerlStack, device: str, environment: dict[str, str], scratch: Path, watchdog: Watchdog
) -> Iterator[tuple[int, int]]:
    """Connected to the cluster; over how many of its nodes the learner's ranks are laid out, and how many each has.

    Raises ValueError for a cluster that does not answer or refuses this job, and for one with fewer GPUs than ``stack.ranks``,
    real ones or stand-ins.
    """
    where = address(stack)
    if where is None:
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # what makes Ray stay on loopback; read when it is imported
        if device == "cuda":
            layout(stack.ranks, [len(machine.visible_gpus())], device)
    else:
        _reach(where)
    if "SLURM_JOB_ID" in os.environ:  # what bounds this job's memory; Ray would end processes when others fill the machine's
        os.environ |= {"RAY_memory_monitor_refresh_ms": "0"}
    os.environ["RAY_OVERRIDE_JOB_RUNTIME_ENV"] = "1"  # inside a job that has an environment of its own
    import ray
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

    runtime: dict[str, Any] = get_ppo_ray_runtime_env(None)
    runtime["env_vars"] = {**runtime["env_vars"], **environment, "TRANSFER_QUEUE_ENABLE": "1"}
    runtime["worker_process_setup_hook"] = steadfast.HOOK
    arguments: dict[str, Any] = {"runtime_env": runtime, "log_to_driver": True}
    if where is not None:
        arguments["address"] = where
        runtime["env_vars"].pop("TMPDIR")  # a folder of this machine; each node of the cluster has one of its own
    else:
        cpus = LOGICAL_CPUS + OF_A_RANK * stack.ranks
        arguments |= {"include_dashboard": False, "_temp_dir": f"{scratch}/ray", "num_cpus": cpus, "address": "local"}
        if device == "cpu":
            arguments["num_gpus"] = stack.ranks  # stand-ins: verl places its workers by GPU
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        _init(arguments)
    except Exception as error:
        if where is None:
            raise
        raise _refused(where, str(error).strip().partition("\n")[0] or type(error).__name__) from error
    for number, handler in handlers.items():
        signal.signal(number, handler)  # Ray ends the driver at once; the run stops at an update
    left = threading.Event()
    watch = _watch_head if where is None else _watch_cluster
    threading.Thread(target=watch, args=(watchdog, left), name="ray head", daemon=True).start()
    try:
        gpus = [int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]]
        yield (1, stack.ranks) if where is None else layout(stack.ranks, gpus, device)
    finally:
        watchdog.rest()
        left.set()
        _leave()


def layout(ranks: int, gpus: Sequence[int], device: str) -> tuple[int, int]:
    """How many nodes, and ranks on each: the fewest that hold them in equal parts. ``gpus``: how many each node has.

    Raises ValueError where they do not.
    """
    for nodes in range(1, ranks + 1):
        if ranks % nodes == 0 and sum(there >= ranks // nodes for there in gpus) >= nodes:
            return nodes, ranks // nodes
    there = f"{sum(gpus)}" if len(gpus) == 1 else f"{' + '.join(map(str, gpus))} on its {len(gpus)} nodes"
    if sum(gpus) >= ranks:
        there += ", which do not hold them in equal parts"
    stand_ins = f"start it with --num-gpus={ranks}: on CPUs they are stand-ins"
    remedy = "take more GPUs, or fewer ranks" if device == "cuda" else stand_ins
    raise ValueError(f"stack.ranks: {ranks} ranks take a GPU each, and the Ray cluster has {there}; {remedy}")


def _reach(where: str) -> None:
    """Raises ValueError when nothing listens at ``host:port``. Ray itself waits for minutes, and then ends the process."""
    host, colon, port = where.rpartition(":")
    if not (colon and port.isdigit()):
        return
    deadline = time.monotonic() + REACH_SECONDS
    while (why := _unreachable(host, int(port))) is not None:
        if time.monotonic() > deadline:
            raise _refused(where, f"nothing answers there within {REACH_SECONDS:g} s: {why}")
        time.sleep(0.5)


def _unreachable(host: str, port: int) -> str | None:
    """Why no connection comes about; None where one does."""
    try:
        socket.create_connection((host.strip("[]"), port), timeout=5).close()
    except OSError as error:
        return str(error)
    return None


def _refused(where: str, why: str) -> ValueError:
    field = VARIABLE if os.environ.get(VARIABLE) == where else "stack.ray_address"
    remedy = (
        "name a running cluster's address as host:port; one that asks for a token wants RAY_AUTH_MODE=token and RAY_AUTH_TOKEN"
    )
    return ValueError(f"{field}={where}: {why}; {remedy}")


def _init(arguments: dict[str, Any]) -> None:
    """``ray.init``, and again where its own node was slow; a start that fails leaves nothing."""
    import ray

    for attempt in range(1, ATTEMPTS + 1):
        try:
            with steadfast.children():
                ray.init(**arguments)
            return
        except Exception as error:
            _leave()
            if _SLOW not in str(error) or attempt == ATTEMPTS:
                raise


def _watch_cluster(watchdog: Watchdog, left: threading.Event) -> None:
    """Tell the watchdog when the cluster that was joined is gone. Ray would end this process, without a word."""
    import ray

    host, _, port = str(ray.get_runtime_context().gcs_address).rpartition(":")
    answered = time.monotonic()
    while not left.wait(2.0):
        if (why := _unreachable(host, int(port))) is None:
            answered = time.monotonic()
        elif time.monotonic() - answered > GONE_SECONDS:
            watchdog.fail(f"the Ray cluster at {host}:{port} is gone: {why}")
            return


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
