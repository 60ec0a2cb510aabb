"""The process beside a worker that sends its records on: ``python -m pth_exp.tracking.beside RUN_DIR ATTEMPT``.

It reads the records as they are written, and ends when the worker does: when its standard input is closed. Lines on its
standard output are sentences for the run's log, but for those that begin with ``@``: ``@asks`` when it asks a server, ``@open
MODE`` once it can send, and ``@at STEP``.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import TextIO

import psutil

from pth_exp import freeze
from pth_exp.schema import TrackingMode
from pth_exp.tracking.history import History
from pth_exp.tracking.to_wandb import Wandb, settings_of

EVERY = 1.0
"""Seconds between two looks at the records."""

_GRACE = 2.0
"""Seconds beyond ``tracking.close_timeout`` that this process ends itself after, should the worker be gone."""


class _Worker:
    """The worker whose child this process is: whether it has ended, and its log."""

    def __init__(self, out: TextIO, patience: float) -> None:
        self.ended = threading.Event()
        self._out, self._patience = out, patience
        threading.Thread(target=self._watch, daemon=True).start()

    def tell(self, line: str) -> None:
        """A worker that is gone hears nothing."""
        try:
            print(line, file=self._out, flush=True)
        except OSError:
            self._out = open(os.devnull, "w")  # noqa: SIM115

    def _watch(self) -> None:
        while os.read(sys.stdin.fileno(), 64):
            pass
        timer = threading.Timer(self._patience + _GRACE, _end)
        timer.daemon = True
        timer.start()
        self.ended.set()


def main(run_dir: Path, attempt: int, mode: TrackingMode | None = None) -> int:
    """Exit code 0 when everything was sent, or written; 1 when a sentence says why not."""
    os.nice(10)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # a cluster tells all processes of a job; the worker decides what follows
    descriptor = os.dup(sys.stdout.fileno())
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what wandb and its service print goes nowhere
    frozen = freeze.load(run_dir / freeze.FILE)
    tracking = settings_of(frozen)
    worker = _Worker(os.fdopen(descriptor, "w"), tracking.close_timeout)
    secret = os.environ.get(tracking.key_variable, "")
    mode = mode or tracking.mode
    if mode is TrackingMode.online and not secret:
        worker.tell(f"wandb: tracking.mode=online, and {tracking.key_variable} is not set: kept offline")
        mode = TrackingMode.offline
    try:
        history, tracker = History(run_dir, attempt), Wandb(frozen, mode, lambda: worker.tell("@asks"))
        worker.tell(f"@open {mode}")
        ended = False
        while not ended:
            ended = worker.ended.wait(EVERY)
            for step, numbers in history.steps(ended):
                tracker.log(step, numbers)
                worker.tell(f"@at {step}")
        tracker.finish()
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        why = why.replace(secret, "***") if secret else why
        if mode is TrackingMode.offline:
            worker.tell(f"wandb: {why}")
            return 1
        worker.tell(f"wandb: {why}; kept offline")
        os.dup2(descriptor, sys.stdout.fileno())
        _end_children()
        os.environ.pop("WANDB_SERVICE", None)  # of the service just ended
        os.execv(sys.executable, [sys.executable, "-P", "-m", "pth_exp.tracking.beside", str(run_dir), str(attempt), "offline"])
    return 0


def _end_children() -> None:
    children = psutil.Process().children(recursive=True)
    for child in children:
        child.kill()
    psutil.wait_procs(children, timeout=5)


def _end() -> None:
    _end_children()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), *map(TrackingMode, sys.argv[3:4])))
