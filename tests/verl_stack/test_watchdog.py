"""The guard of a verl job's main thread: it ends what hangs, and says what that was."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from pth_exp.verl_stack import watchdog as guard
from pth_exp.verl_stack.watchdog import Broken, Stalled, watching


def _module(name: str, source: str, **names: Any) -> Any:
    """A module by that name, as far as its functions' frames tell."""
    module = ModuleType(name)
    module.__dict__.update(names)
    exec(compile(source, f"/somewhere/{name}.py", "exec"), module.__dict__)
    return module


def _nested(wait: Callable[[], object]) -> Callable[[], object]:
    """The project's trainer calls verl's manager, which waits in a library."""
    library = _module("ray.worker", "def get(): return wait()", wait=wait)
    verl = _module("verl.checkpoint_engine.base", "def update_weights():\n    return get()", get=library.get)
    ours = _module(
        "pth_exp.verl_stack.trainer", "def _refresh():\n    return update_weights()", update_weights=verl.update_weights
    )
    return ours._refresh  # type: ignore[no-any-return]


def test_what_hangs_is_ended_and_named(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Stalled) as caught, watching() as watchdog:
        _nested(lambda: (watchdog.allow(1e-3, "update 3"), signal.pause()))()  # the clock starts where it is to run out
    assert str(caught.value) == (
        "update 3 took longer than it may (stack.update_timeout=0.001 seconds): waiting in verl's update_weights "
        "(verl.checkpoint_engine.base:2), called by `` (_refresh, pth_exp.verl_stack.trainer.py:2)"
    )
    assert "in _nested" not in str(caught.value) and "update_weights" in capfd.readouterr().err, (
        "every thread's stack is in the log"
    )
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_what_an_event_loop_awaits_is_named() -> None:
    """A suspended coroutine stands in no thread's stack."""
    with pytest.raises(Stalled, match=r"waiting in verl's launch \(verl.utils.ray_utils:2\), called by"), watching() as watchdog:

        async def answer() -> None:
            watchdog.allow(1e-2, "the start", "stack.start_timeout")
            await asyncio.sleep(60)

        source = "async def launch():\n    await answer()\n\ndef wrapper():\n    return run(launch())"
        verl = _module("verl.utils.ray_utils", source, answer=answer, run=asyncio.run)
        _module("pth_exp.verl_stack.host", "def _train():\n    return wrapper()", wrapper=verl.wrapper)._train()


def test_an_interruption_that_is_swallowed_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own reason stands, whatever the way out raises."""
    monkeypatch.setattr(guard, "AGAIN_SECONDS", 0.01)
    swallowed = []
    with pytest.raises(Stalled, match="the start took longer"), watching() as watchdog:
        watchdog.allow(0.01, "the start", "stack.start_timeout")
        while len(swallowed) < 3:
            try:
                signal.pause()
            except KeyboardInterrupt as interruption:
                swallowed.append(interruption)
        raise OSError("a queue could not be closed")


def test_another_thread_can_end_the_work() -> None:
    with pytest.raises(Broken, match="the head is gone"), watching() as watchdog:
        threading.Thread(target=watchdog.fail, args=("the head is gone",)).start()
        while True:
            signal.pause()


def test_work_that_ends_in_time_is_left_alone_and_a_ctrl_c_stays_one() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with watching() as watchdog:
        watchdog.allow(3600, "update 0")
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0) and signal.getsignal(signal.SIGALRM) is before
    with pytest.raises(KeyboardInterrupt), watching():
        raise KeyboardInterrupt
