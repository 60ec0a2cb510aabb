"""Processes that belong to one owner, and the shared memory that they would leave behind.

A cluster's processes are started by one another and lose their parents. The environment that they inherit stays with them, but
for those that rename themselves and write over it; those print into a file of their owner's folder.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from pth_exp import leftovers, machine


def processes(variable: str, value: str, folder: Path | None = None) -> set[int]:
    """Pids, but for this process's, that started with ``variable=value`` in their environment or print into ``folder``."""
    printing = leftovers.writing_to(folder) if folder is not None else []
    return {*machine.carrying(variable, value), *printing} - {os.getpid()}


def kill(variable: str, value: str, folder: Path | None = None, seconds: float = 20.0) -> set[int]:
    """Kill them, and whatever they start meanwhile; the pids that are still there after so long."""
    deadline = time.monotonic() + seconds
    while (found := processes(variable, value, folder)) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    return found


def held(variable: str, value: str, folder: Path | None = None, own: bool = True) -> set[Path]:
    """Named shared memory that they have mapped, and this process its ``own``; it outlives its makers."""
    pids = processes(variable, value, folder) | ({os.getpid()} if own else set())
    return set[Path]().union(*map(leftovers.mapped, pids))


def remove(segments: set[Path]) -> None:
    """Unlink what is still there."""
    for segment in segments:
        segment.unlink(missing_ok=True)
