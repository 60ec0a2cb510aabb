"""Processes that go on when everything around them is told to stop, because one process knows how to stop them well.

SLURM sends a job's signals to every process of the job, and so do service managers. A verl job is some twenty processes: those
of Ray and vLLM would end at once, before the worker, which hears the same signal, has written a checkpoint. They start with
these signals blocked, which their children inherit, whatever handlers they install.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Final

SIGNALS: Final = frozenset({signal.SIGTERM, signal.SIGUSR2})
"""To stop, and to prepare for the end; the owner ends such processes by SIGKILL."""

HOOK: Final = f"{__name__}.hold"


@contextmanager
def children() -> Iterator[None]:
    """What is started meanwhile holds on. A signal to this process, or rather to this thread, waits until the end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def hold() -> None:
    """What each of Ray's workers does first, where ``HOOK`` is the job's ``worker_process_setup_hook``.

    multiprocessing unblocks SIGTERM when it starts its resource tracker, in the process and so in whatever that starts later.
    """
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
