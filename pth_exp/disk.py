"""A full disk: told apart from other failures, named for people, and survived by a run's last word."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT)


class DiskFull(Exception):
    """There is no room for what is to be written; one sentence with the file system, what is free on it, and the remedy."""


def is_full(error: BaseException) -> bool:
    """Whether an error, or one that it came from, says that a disk or a quota is full."""
    return any(isinstance(e, DiskFull) or (isinstance(e, OSError) and e.errno in _FULL) for e in _causes(error))


def explain(error: BaseException, where: Path, doing: str) -> DiskFull:
    """The sentence about an error for which `is_full` holds; its own, if it has one.

    ``where`` is a file or folder on the disk in question, unless the error names one; ``doing`` what was to be written.
    """
    chain = list(_causes(error))
    told = next((e for e in chain if isinstance(e, DiskFull)), None)
    if told is not None:
        return told
    full = next((e for e in chain if isinstance(e, OSError) and e.errno in _FULL), None)
    if full is not None and isinstance(full.filename, str):
        where = Path(full.filename)
    quota = full is not None and full.errno == errno.EDQUOT
    return _sentence(where, doing, "the quota is used up" if quota else "no space is left")


@contextlib.contextmanager
def explained(where: Path, doing: str) -> Iterator[None]:
    """Raises `DiskFull` where the block fails because the disk is full; lets any other error through.

    Args:
        where: a file or folder on the disk that is written to.
        doing: what the block writes, as in "while writing ...".
    """
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        raise explain(error, where, doing) from error


def require(where: Path, needed: int, doing: str) -> None:
    """Raises `DiskFull` unless the file system says that ``needed`` bytes are free for this user. A quota it does not see."""
    free, total = _space(where)
    if total > 0 and free < needed:  # some network file systems tell nothing, and say 0
        raise _sentence(where, f"{doing}, which takes {_size(needed)}", "there is too little space")


def has_room(folder: Path, size: int = 1 << 16) -> bool:
    """Whether ``size`` bytes can be written into a folder: for errors of libraries that do not say that the disk is full."""
    probe = folder / f".probe.{os.getpid()}"
    try:
        _fill(probe, size)
        return True
    except OSError as error:
        return error.errno not in _FULL
    finally:
        probe.unlink(missing_ok=True)


class Reserve:
    """Space that a run holds in its directory, given back when the disk is full so that its last state can be written.

    Args:
        run_dir: the run's directory; one attempt at a time has its lease, and so its reserve.
    """

    SIZE = 1 << 16
    """Bytes; a manifest with a hundred attempts takes half of it."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / ".reserve"

    def take(self) -> None:
        """Raises `DiskFull`."""
        try:
            with explained(self._path, "setting aside space for the run's last state"):
                _fill(self._path, self.SIZE)
        except DiskFull:
            self.give_back()
            raise

    def give_back(self) -> None:
        """May be called again."""
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__cause__ or error.__context__


def _fill(path: Path, size: int) -> None:
    """A file that takes ``size`` bytes of the disk itself: of bytes that no file system compresses, and not in a cache alone."""
    with path.open("wb", buffering=0) as file:
        content = memoryview(os.urandom(size))
        while content:
            content = content[file.write(content) :]
        os.fsync(file.fileno())


def _space(where: Path) -> tuple[int, int]:
    """Bytes that this user may still write, and bytes in all."""
    found = os.statvfs(_existing(where))
    return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize


def _sentence(where: Path, doing: str, what: str) -> DiskFull:
    free, total = _space(where)
    mount = next(p for p in [_existing(where).resolve(), *_existing(where).resolve().parents] if os.path.ismount(p))
    return DiskFull(
        f"{what} on the file system {mount} ({_size(free)} of {_size(total)} free) for {doing}; what was written before holds: "
        "make room, then `pth resume`"
    )


def _existing(path: Path) -> Path:
    return next(p for p in [path, *path.absolute().parents] if p.exists())


def _size(count: int) -> str:
    size, unit = float(count), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
