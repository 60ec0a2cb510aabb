"""Checkpoints: written whole or not at all, verified when read."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger(__name__)

_NAME = re.compile(r"update-(\d+)-([0-9a-f]{64})\.pt")


class CheckpointStore:
    """The checkpoints of one run, in one folder.

    A checkpoint's name holds the sha256 of its bytes, so one atomic rename publishes the file together with its hash: there is no
    instant at which a reader sees half of either.

    Args:
        folder: created when needed.
        keep: older checkpoints kept beside the newest.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep

    def save(self, update: int, state: dict[str, Any]) -> Path:
        """Writes ``state`` (plain values and tensors) of a run that has done ``update`` updates; drops the oldest ones."""
        self._folder.mkdir(parents=True, exist_ok=True)
        temporary = self._folder / f".update-{update}.{os.getpid()}.tmp"
        try:
            with temporary.open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            path = self._folder / f"update-{update:08d}-{_sha256(temporary)}.pt"
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        _sync_folder(self._folder)
        for old in self._newest_first()[self._keep + 1 :]:
            old.unlink()
        return path

    def load(self) -> dict[str, Any] | None:
        """The newest intact state, or None if there is none. A damaged file is set aside, with a warning in the log."""
        for path in self._newest_first():
            expected = path.stem[-64:]
            found = _sha256(path)
            if found == expected:
                state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
                return state
            path.rename(path.with_suffix(".damaged"))
            log.warning("checkpoint %s is damaged (its sha256 is %s); falling back to the one before", path, found)
        return None

    def _newest_first(self) -> list[Path]:
        found = [(int(match[1]), path) for path in self._folder.glob("*.pt") if (match := _NAME.fullmatch(path.name))]
        return [path for _, path in sorted(found, reverse=True)]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_folder(folder: Path) -> None:
    """Makes the rename itself durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
