"""Processes that belong to one owner, and the shared memory that they would leave behind.

A cluster's processes are started by one another and lose their parents. The environment that they inherit stays with them, but
for those that rename themselves and write over it; those print into a file of their owner's folder.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from pth_exp import machine

_SHARED_MEMORY = "/dev/shm"


def processes(variable: str, value: str, folder: Path | None = None) -> set[int]:
    """Pids, but for this process's, that started with ``variable=value`` in their environment or print into ``folder``."""
    printing = writing_to(folder) if folder is not None else []
    return {*machine.carrying(variable, value), *printing} - {os.getpid()}


def end(find: Callable[[], Iterable[int]], seconds: float = 20.0) -> set[Path]:
    """Kill the processes that are found, and whatever they start meanwhile, for so long; the shared memory they had mapped."""
    deadline, segments = time.monotonic() + seconds, set[Path]()
    while (found := set(find())) and time.monotonic() < deadline:
        for pid in found:
            segments |= mapped(pid)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    return segments


def held(variable: str, value: str, folder: Path | None = None) -> set[Path]:
    """Named shared memory that they and this process have mapped; it outlives its makers."""
    return set[Path]().union(*map(mapped, processes(variable, value, folder) | {os.getpid()}))


def remove(segments: set[Path]) -> None:
    """Unlink what is still there."""
    for segment in segments:
        segment.unlink(missing_ok=True)


def writing_to(folder: Path) -> list[int]:
    """Pids of processes whose output goes to a file of a folder. Ray's rename themselves, and write over their environment."""
    return [pid for pid in _pids() if any(_output(pid, number).startswith(f"{folder}/") for number in (1, 2))]


def mapped(pid: int) -> set[Path]:
    """Named shared memory and semaphores that a process has mapped; none when it is gone, or is another user's.

    By inode: a semaphore is made under a passing name, which is the one that the kernel shows for its maker.
    """
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    inodes = {line.split()[4] for line in lines if f" {_SHARED_MEMORY}/" in line}
    return {Path(entry.path) for entry in os.scandir(_SHARED_MEMORY) if str(entry.inode()) in inodes}


def _output(pid: int, number: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/fd/{number}")
    except OSError:
        return ""


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid())
