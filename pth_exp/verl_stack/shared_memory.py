"""Shared memory that a job's processes leave behind when they are ended: named segments outlive their makers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

FOLDER = "/dev/shm/"


def held(variable: str, value: str) -> set[Path]:
    """Segments that this process, and those with ``variable=value`` in their environment have mapped now."""
    marker = f"{variable}={value}\0".encode()
    own = str(os.getpid())  # what a process sets in its environment itself does not show there
    found: set[Path] = set()
    for process in _processes():
        with contextlib.suppress(OSError):  # a process that ended meanwhile, or is another user's
            if process.name == own or marker in (process / "environ").read_bytes() + b"\0":
                found |= {Path(FOLDER + line.split(FOLDER, 1)[1]) for line in _mapped(process) if FOLDER in line}
    return found


def remove(segments: set[Path]) -> None:
    """Unlink what is still there."""
    for segment in segments:
        segment.unlink(missing_ok=True)


def _mapped(process: Path) -> list[str]:
    return (process / "maps").read_text().splitlines()


def _processes() -> Iterator[Path]:
    return (Path("/proc") / name for name in os.listdir("/proc") if name.isdigit())
