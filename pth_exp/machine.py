"""What a machine says about itself: identity, processes, cores, GPUs, free memory. Nothing here imports torch."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import shutil
import socket
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


@cache
def host() -> str:
    return socket.gethostname()


@cache
def process_space() -> str | None:
    """Names the set of processes among which a pid means something: one boot and one pid namespace.

    Containers share their host's boot id, sometimes its name too, but not its pids. ``None`` where the kernel does not tell;
    nobody can then be declared dead by pid.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def process_start(pid: int) -> int | None:
    """Start of a living process, in clock ticks since boot, which tells it from a later one with the same pid.

    ``None`` when no such process runs; a zombie does not run.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the command's name may hold spaces and brackets
    return None if fields[0] in "ZX" else int(fields[19])


def is_gone(pid: int, start: int) -> bool:
    """Whether the process with this pid and `process_start` has ended. False where the kernel hides other users' processes."""
    found = process_start(pid)
    if found is None:
        with contextlib.suppress(ProcessLookupError):
            try:
                os.kill(pid, 0)
            except PermissionError:
                return False
    return found != start


def cores() -> int:
    """Cores this process may use: its CPU affinity, bounded by its control group's quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = (_CGROUP / "cpu.max").read_text().split()
        return max(1, min(allowed, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no control group, or its quota is "max"
        return allowed


def available_memory() -> int:
    """Bytes that new processes can take without swapping, bounded by the control group's limit."""
    import psutil

    available = int(psutil.virtual_memory().available)
    try:
        limit, used = (int((_CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no control group, or its limit is "max"
        return available
    return max(0, min(available, limit - used + int(stat.get("inactive_file", 0))))


def carrying(variable: str, value: str) -> set[int]:
    """Processes that were started with ``variable=value`` in their environment, as far as this user may look."""
    marker, found = f"{variable}={value}\0".encode(), set[int]()
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):  # one that ended meanwhile, or is another user's
                if marker in Path(f"/proc/{name}/environ").read_bytes() + b"\0":
                    found.add(int(name))
    return found


def descendants(pid: int) -> set[int]:
    """A process with its children, and theirs; not those that have made themselves independent."""
    import psutil

    try:
        return {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}
    except psutil.Error:
        return {pid}


def held_memory(pids: Iterable[int]) -> int:
    """Bytes that processes hold together: what each has alone, and once the most that one shares (libraries, shared memory)."""
    import psutil

    alone, shared = 0, 0
    for pid in pids:
        try:
            memory = psutil.Process(pid).memory_info()
        except psutil.Error:
            continue
        common = getattr(memory, "shared", 0)
        alone, shared = alone + memory.rss - common, max(shared, common)
    return alone + shared


def visible_gpus() -> list[str]:
    """GPUs this process may use, as CUDA_VISIBLE_DEVICES would name them."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [gpu.strip() for gpu in chosen.split(",") if gpu.strip() not in ("", "-1", "NoDevFiles")]
    return [str(i) for i in range(len(gpu_names()))]


@cache
def gpu_names() -> list[str]:
    """The machine's GPUs, as ``nvidia-smi`` lists them; empty without the tool."""
    if shutil.which("nvidia-smi") is None:
        return []
    done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    names = [line.partition(":")[2].partition("(")[0].strip() for line in done.stdout.splitlines() if line.startswith("GPU ")]
    return names if done.returncode == 0 else []


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
