"""Ctrl-C and its kin, as events of the loop that a place runs."""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def signals_into(events: queue.SimpleQueue[Any]) -> Iterator[None]:
    """Signals that ask this process to end become events; outside the main thread they stay as they are."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {n: signal.signal(n, lambda number, _: events.put(signal.Signals(number))) for n in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def explain(received: signal.Signals, interrupts: int, running: int) -> str:
    runs = f"{running} run{'s' * (running != 1)}"
    if interrupts == 1:
        return f"{received.name}: {runs} to checkpoint at the next update and stop; once more kills"
    return f"{received.name} again: {runs} killed; the last checkpoints hold"
