"""Small files in a run's directory, written so that a kill at any instant and several machines do no harm.

Modes follow the umask (``mkstemp``, which closes its files to other users of a cluster, is not used).
"""

from __future__ import annotations

import contextlib
import errno
import getpass
import json
import os
import secrets
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pth_exp import machine


def create(path: Path, content: bytes) -> None:
    """Write a new file to the disk itself; raises FileExistsError."""
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    with os.fdopen(fd, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(fd)


def sync(folder: Path) -> None:
    """Force what a folder lists to the disk itself."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file in one step."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        create(temporary, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """Append one row in one write; a line that a kill has torn stays a line of its own.

    Not forced to the disk: a power cut may take back a run's last state, and resuming then repeats its last step.
    """
    fd = os.open(path, os.O_CREAT | os.O_APPEND | os.O_RDWR, 0o666)
    try:
        size = os.fstat(fd).st_size
        torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
        line = b"\n" * torn + json.dumps(row).encode() + b"\n"
        if os.write(fd, line) != len(line):
            raise OSError(errno.ENOSPC, "the row was written in part; is the disk full?", str(path))
    finally:
        os.close(fd)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The whole rows of a file; none when there is no file. A torn line is left out: what was written before it holds."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    rows = []
    for line in lines:
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def stamp(role: str) -> dict[str, str]:
    """Who writes a row, and when."""
    user = str(os.getuid())
    with contextlib.suppress(KeyError, OSError):  # a container's user need not have a name
        user = getpass.getuser()
    at = datetime.now(UTC).isoformat(timespec="milliseconds")
    return {"at": at, "by": f"{role} {user}@{machine.host()}, pid {os.getpid()}"}


def server_time(directory: Path) -> float:
    """Now, by the clock of the file server that holds ``directory``; by this machine's where one may not write."""
    probe = directory / f".clock-{secrets.token_hex(4)}"
    try:
        fd = os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    except OSError:
        return time.time()
    try:
        return os.fstat(fd).st_mtime
    finally:
        os.close(fd)
        probe.unlink(missing_ok=True)
