"""The worker's side of its trackers: a process that is started, listened to, and not waited for longer than promised."""

from __future__ import annotations

import contextlib
import logging
import math
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from pth_exp import steadfast
from pth_exp.schema import TrackingConfig, TrackingMode
from pth_exp.tracking.backends import separate

log = logging.getLogger(__name__)


@contextlib.contextmanager
def tracked(tracking: TrackingConfig, run_dir: Path, attempt: int) -> Iterator[None]:
    """Trackers send the attempt's records on while the block runs; whatever becomes of them, the block does not notice.

    Afterwards they have ``tracking.close_timeout`` seconds, and none if a server has left them without an answer for as long
    already. Then they are ended, and the log says what may be missing where.
    """
    process = _Beside(run_dir, attempt, tracking) if separate(tracking.backends) else None
    try:
        yield
    finally:
        if process is not None:
            try:
                process.close()
            except (Exception, KeyboardInterrupt) as error:
                log.warning("tracking: given up: %s", error or type(error).__name__)


class _Beside:
    def __init__(self, run_dir: Path, attempt: int, tracking: TrackingConfig) -> None:
        self._run_dir, self._tracking = run_dir, tracking
        self._open, self._asked = False, math.inf
        self._at: str | None = None
        self._process: subprocess.Popen[str] | None = None
        try:
            with steadfast.children():
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "pth_exp.tracking.beside", str(run_dir), str(attempt)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # what ends the worker's session, as a second Ctrl-C does, leaves it to end by itself
                    text=True,
                )
        except OSError as error:
            log.warning("tracking: not started: %s", error)
            return
        self._listener = threading.Thread(target=self._listen, args=(self._process,), name="tracking", daemon=True)
        self._listener.start()

    def close(self) -> None:
        if self._process is None:
            return
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        timeout = self._tracking.close_timeout
        waits = not self._open and self._asked < math.inf
        try:
            code = self._process.wait(max(0.0, self._asked + timeout - time.monotonic()) if waits else timeout)
            self._listener.join(1)
            why = None if code == 0 else f"it ended with exit code {code}"
        except subprocess.TimeoutExpired:
            online = self._tracking.mode is TrackingMode.online and not self._open
            why = "its server has not answered" if online else f"it was not done within {timeout:g} s"
        finally:
            _kill(self._process)
        if why is not None:
            sent = "nothing" if self._at is None else f"the steps up to {self._at}"
            log.warning(
                "tracking: %s was handed to wandb: %s. All is in the records: `pth track %s` sends it again",
                sent,
                why,
                self._run_dir,
            )

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            word, _, rest = line.rstrip("\n").partition(" ")
            if word == "@asks":
                self._asked = time.monotonic()
            elif word == "@open":
                self._open = True
            elif word == "@at":
                self._at = rest
            else:
                log.warning("tracking: %s", line.rstrip("\n"))


def _kill(process: subprocess.Popen[str]) -> None:
    """It and what it started, of which wandb puts its service into a session of its own."""
    if process.poll() is not None:
        return
    children = psutil.Process(process.pid).children(recursive=True)
    for each in (process, *children):
        with contextlib.suppress(psutil.Error, OSError):
            each.kill()
    process.wait()
