"""Checkpoints: folders, written whole or not at all, verified when read.

On disk a run has at most its newest checkpoint, ``keep`` older ones, and the one that is being written.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from pth_exp import disk

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
"""In each checkpoint: the sha256 of every other file in it, by its path."""

_NAME = re.compile(r"update-(\d+)-([0-9a-f]{64})")
_UNFINISHED, _DAMAGED = ".tmp", ".damaged"
_BLOCK = 4096


def is_due(done: int, every: int | None, updates: int) -> bool:
    """Whether what happens every so many updates, and after the last, happens after ``done`` of them; None: never."""
    return every is not None and (done % every == 0 or done == updates)


class CheckpointStore:
    """The checkpoints of one run, in one folder.

    A checkpoint is a folder whose name holds the sha256 of its manifest, so one atomic rename publishes all its files together
    with their hashes: there is no instant at which a reader sees a part of it.

    Args:
        folder: created when needed.
        keep: older checkpoints kept beside the newest.
        settle: called before a checkpoint is published; it makes the records last that the checkpoint goes on from, and raises
            when another attempt has taken the run over, whose checkpoints these then are.
    """

    def __init__(self, folder: Path, keep: int, settle: Callable[[], None] = lambda: None) -> None:
        self._folder = folder.absolute()
        self._keep = keep
        self._settle = settle

    @contextmanager
    def writing(self, update: int) -> Iterator[Path]:
        """A folder to be filled with the state of a run that has done ``update`` updates, by this process or any other.

        When the block ends the checkpoint is published and the oldest ones go; when it raises, nothing has happened. Raises
        `disk.DiskFull` before the block when the disk has no room for one of the last one's size, or when it fills up.
        """
        doing = f"the checkpoint of update {update}"
        unfinished = self._folder / f".update-{update}.{os.getpid()}{_UNFINISHED}"
        for last in self._newest_first()[:1]:
            disk.require(self._folder, _size(last), doing)
        try:
            with disk.explained(self._folder, doing):
                unfinished.mkdir(parents=True)
            yield unfinished
            sealed = _seal(unfinished)
            self._settle()
            path = self._folder / f"update-{update:08d}-{sealed}"
            if not path.exists():  # as it does when an attempt stops where it began
                unfinished.rename(path)
        except Exception as error:
            # torch does not say why it could not write; another process's error may not say it either
            if disk.is_full(error) or (unfinished.is_dir() and not disk.has_room(unfinished)):
                raise disk.explain(error, self._folder, doing) from error
            raise
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        _sync(self._folder)
        again = [other for other in self._newest_first() if other != path and update_of(other) == update]
        kept = [other for other in self._newest_first() if other not in again][: self._keep + 1]
        for gone in [other for other in self._folder.glob("update-*") if other not in kept]:
            _drop(gone)

    def newest(self) -> Path | None:
        """The newest intact checkpoint, or None; to be called before any is written.

        A damaged one is set aside, with a warning in the log, until the next is written. What killed attempts left is removed.
        Raises RuntimeError for one that the file system fails to read: it may come back, so it is not given up.
        """
        for unfinished in self._folder.glob(f".*{_UNFINISHED}"):
            shutil.rmtree(unfinished)
        for path in self._newest_first():
            try:
                wrong = _damage(path)
            except OSError as error:
                raise RuntimeError(
                    f"checkpoint {path} cannot be read: {error}; resume when the disk answers again, or remove that folder to go "
                    "on from the checkpoint before"
                ) from error
            if wrong is None:
                return path
            path.rename(path.with_name(path.name + _DAMAGED))
            log.warning("checkpoint %s is damaged: %s; falling back to the one before", path, wrong)
        return None

    def _newest_first(self) -> list[Path]:
        found = [(int(match[1]), path) for path in self._folder.glob("update-*") if (match := _NAME.fullmatch(path.name))]
        return [path for _, path in sorted(found, reverse=True)]


def update_of(checkpoint: Path) -> int:
    """How many updates a checkpoint's run had done."""
    match = _NAME.fullmatch(checkpoint.name)
    if match is None:
        raise ValueError(f"{checkpoint} is not a checkpoint: its name is not of the form update-NUMBER-SHA256")
    return int(match[1])


def _seal(folder: Path) -> str:
    """Write the manifest, force everything to the disk; the manifest's sha256."""
    content = json.dumps(_hashes(folder), indent=1).encode()
    (folder / MANIFEST).write_bytes(content)
    for path in [*folder.rglob("*"), folder]:
        _sync(path)
    return hashlib.sha256(content).hexdigest()


def _damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint; None: nothing. Raises OSError when it cannot be told."""
    try:
        content = (checkpoint / MANIFEST).read_bytes()
    except FileNotFoundError as error:
        return f"{MANIFEST}: {error.strerror}"
    found = hashlib.sha256(content).hexdigest()
    if not checkpoint.name.endswith(found):
        return f"{MANIFEST} has sha256 {found}"
    expected, held = json.loads(content), _hashes(checkpoint)
    for name in sorted(expected.keys() | held.keys()):
        if name not in held:
            return f"{name} is missing"
        if name not in expected:
            return f"{name} does not belong to it"
        if held[name] != expected[name]:
            return f"{name} has sha256 {held[name]} and should have {expected[name]}"
    return None


def _size(folder: Path) -> int:
    """Bytes that a folder's files take, in whole blocks."""
    return sum(-(-path.stat().st_size // _BLOCK) * _BLOCK for path in folder.rglob("*") if path.is_file())


def _hashes(folder: Path) -> dict[str, str]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)
    with ThreadPoolExecutor() as threads:
        return {str(path.relative_to(folder)): sha256 for path, sha256 in zip(paths, threads.map(_sha256, paths), strict=True)}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Force a file, or what a folder lists, to the disk itself."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _drop(checkpoint: Path) -> None:
    """Remove a checkpoint; under another name, so that a kill in between leaves none that looks damaged."""
    going = checkpoint.with_name(f".{checkpoint.name}{_UNFINISHED}")
    checkpoint.rename(going)
    shutil.rmtree(going)
