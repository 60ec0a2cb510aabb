"""Shared memory that a job's processes leave behind when they are ended: named segments outlive their makers."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from pth_exp import machine

FOLDER = "/dev/shm/"


def held(variable: str, value: str) -> set[Path]:
    """Segments that this process, and those with ``variable=value`` in their environment have mapped now."""
    found: set[Path] = set()
    for pid in {os.getpid(), *machine.carrying(variable, value)}:  # what a process sets in its environment itself is not seen
        with contextlib.suppress(OSError):  # a process that ended meanwhile
            found |= {Path(FOLDER + line.split(FOLDER, 1)[1]) for line in _mapped(pid) if FOLDER in line}
    return found


def remove(segments: set[Path]) -> None:
    """Unlink what is still there."""
    for segment in segments:
        segment.unlink(missing_ok=True)


def _mapped(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/maps").read_text().splitlines()
