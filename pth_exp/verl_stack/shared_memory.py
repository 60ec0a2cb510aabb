"""Shared memory that a job's processes leave behind when they are ended: named segments outlive their makers."""

from __future__ import annotations

import os
from pathlib import Path

from pth_exp import leftovers, machine


def held(variable: str, value: str) -> set[Path]:
    """Segments that this process, and those with ``variable=value`` in their environment have mapped now."""
    # what a process sets in its environment itself is not seen
    return set().union(*map(leftovers.mapped, {os.getpid(), *machine.carrying(variable, value)}))


def remove(segments: set[Path]) -> None:
    """Unlink what is still there."""
    for segment in segments:
        segment.unlink(missing_ok=True)
