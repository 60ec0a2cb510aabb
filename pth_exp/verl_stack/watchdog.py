"""Bounds a verl job's stretches of work in time, and says where one hung."""

from __future__ import annotations

import asyncio
import faulthandler
import linecache
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

AGAIN_SECONDS = 30.0
"""Should whatever waits swallow the interruption, or the way out wait too, it is interrupted again."""


class Stalled(RuntimeError):
    """The job made no progress for too long: a process of verl's that dies in a transfer leaves the others waiting for ever."""


class Broken(RuntimeError):
    """Something that the job cannot do without is gone."""


class _Interruption(KeyboardInterrupt):
    """Ray's calls let nothing else through that a signal's handler raises while they wait."""


class Watchdog:
    """The guard of this process's main thread; `watching` makes one."""

    def __init__(self) -> None:
        self._doing, self._setting, self._seconds = "the start", "stack.start_timeout", 0.0
        self._error: RuntimeError | None = None

    def allow(self, seconds: float, doing: str, setting: str = "stack.update_timeout") -> None:
        """Give the next stretch of work so long."""
        self._doing, self._setting, self._seconds = doing, setting, seconds
        signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_SECONDS)

    def rest(self) -> None:
        """Guard nothing more."""
        signal.setitimer(signal.ITIMER_REAL, 0)

    def fail(self, why: str) -> None:
        """End the main thread's work, from any thread."""
        self._error = self._error or Broken(why)
        os.kill(os.getpid(), signal.SIGALRM)

    def expired(self, _number: int, frame: FrameType | None) -> None:
        if self._error is None:
            where = place(frame)
            limit = f"{self._setting}={self._seconds:g}"
            self._error = Stalled(f"{self._doing} took longer than it may ({limit} seconds): waiting in {where}")
            faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        raise _Interruption

    @property
    def error(self) -> RuntimeError | None:
        return self._error


@contextmanager
def watching() -> Iterator[Watchdog]:
    """Raises `Stalled` or `Broken` in place of whatever the interrupted work raises."""
    watchdog = Watchdog()
    before = signal.signal(signal.SIGALRM, watchdog.expired)
    try:
        yield watchdog
    except BaseException:
        if watchdog.error is not None:
            raise watchdog.error from None
        raise
    finally:
        watchdog.rest()
        signal.signal(signal.SIGALRM, before)


def place(frame: FrameType | None) -> str:
    """What the main thread waits for: the innermost line of the project, and the innermost function of verl's below it."""
    ours = theirs = None
    while frame is not None and ours is None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith("pth_exp."):
            ours = frame
        elif theirs is None and module.startswith("verl."):
            theirs = frame
        frame = frame.f_back
    if ours is None:
        return "code that is neither the project's nor verl's"
    line = linecache.getline(ours.f_code.co_filename, ours.f_lineno).strip()
    said = f"`{line}` ({ours.f_code.co_qualname}, {os.path.basename(ours.f_code.co_filename)}:{ours.f_lineno})"
    waiting = _awaited() or ([_named(theirs)] if theirs is not None else [])
    return f"verl's {' and '.join(waiting[:3])}, called by {said}" if waiting else said


def _awaited() -> list[str]:
    """The innermost functions of verl's that tasks of this thread's event loop await: they stand in no thread's stack."""
    try:
        tasks = asyncio.all_tasks(asyncio.get_running_loop())
    except RuntimeError:
        return []
    names: set[str] = set()
    for task in tasks:
        innermost: str | None = None
        awaited: Any = task.get_coro()
        while awaited is not None:
            frame = getattr(awaited, "cr_frame", None)
            if frame is not None and str(frame.f_globals.get("__name__", "")).startswith("verl."):
                innermost = _named(frame)
            awaited = getattr(awaited, "cr_await", None)
        if innermost is not None:
            names.add(innermost)
    return sorted(names)


def _named(frame: FrameType) -> str:
    return f"{frame.f_code.co_qualname} ({frame.f_globals['__name__']}:{frame.f_lineno})"
