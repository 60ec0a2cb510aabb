"""What a killed attempt leaves on its machine, noted while it lives, so that it can be removed when it does no longer.

A SIGKILL of the process that drives a Ray cluster of its own takes Ray's servers with it, and their workers follow within
seconds; but two agents of Ray's stay for minutes, and named shared memory and the temporary folder for ever.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pth_exp import machine, marked
from pth_exp.runfiles import write_json

FILE = ".leftovers.json"
"""In the run's directory while an attempt lives, and after one that was killed."""


@contextmanager
def scratch(run_dir: Path, prefix: str) -> Iterator[Path]:
    """A temporary folder for the run's processes, which write their output there; what an earlier attempt left goes first.

    It lies in /tmp where TMPDIR, a batch job's own perhaps, is so long that Ray's sockets below it could not be named.
    """
    clear(run_dir)
    short = tempfile.gettempdir() if len(tempfile.gettempdir()) < 20 else "/tmp"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=short, ignore_cleanup_errors=True) as folder:
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
    segments = marked.end(lambda: marked.writing_to(Path(noted["folder"])))
    marked.remove(segments | {Path(segment) for segment in noted["segments"]})
    shutil.rmtree(noted["folder"], ignore_errors=True)
    (run_dir / FILE).unlink(missing_ok=True)
