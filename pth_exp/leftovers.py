"""What a killed attempt leaves on its machine, noted while it lives, so that it can be removed when it does no longer.

A SIGKILL of the process that drives a Ray cluster of its own takes Ray's servers with it, and their workers follow within
seconds; but two agents of Ray's stay for minutes, and named shared memory and the temporary folder for ever.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pth_exp import machine
from pth_exp.runfiles import write_json

FILE = ".leftovers.json"
"""In the run's directory while an attempt lives, and after one that was killed."""

_SHARED_MEMORY = "/dev/shm"


@contextmanager
def scratch(run_dir: Path, prefix: str) -> Iterator[Path]:
    """A temporary folder for the run's processes, which write their output there; what an earlier attempt left goes first."""
    clear(run_dir)
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as folder:
        me = os.getpid()
        owner = {"space": machine.process_space(), "pid": me, "start": machine.process_start(me)}
        write_json(run_dir / FILE, {**owner, "folder": folder, "segments": []})
        try:
            yield Path(folder)
        finally:
            (run_dir / FILE).unlink(missing_ok=True)


def note_segments(run_dir: Path, segments: Iterable[Path]) -> None:
    """Named shared memory that is the run's."""
    noted = json.loads((run_dir / FILE).read_text())
    write_json(run_dir / FILE, {**noted, "segments": sorted(map(str, segments))})


def clear(run_dir: Path) -> None:
    """End the processes of an attempt that was killed on this machine, and remove what it left; nothing while it lives."""
    try:
        noted: dict[str, Any] = json.loads((run_dir / FILE).read_text())
    except FileNotFoundError:
        return
    if noted["space"] is None or noted["space"] != machine.process_space():
        return
    if noted["start"] is not None and machine.process_start(noted["pid"]) == noted["start"]:
        return
    segments = {Path(segment) for segment in noted["segments"]}
    deadline = time.monotonic() + 20
    while (left := writing_to(Path(noted["folder"]))) and time.monotonic() < deadline:
        for pid in left:
            segments |= mapped(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    for segment in segments:
        segment.unlink(missing_ok=True)
    shutil.rmtree(noted["folder"], ignore_errors=True)
    (run_dir / FILE).unlink(missing_ok=True)


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
