"""The entry of every run: ``python -m pth_exp.worker --frozen PATH --sha256 HASH``.

The worker composes nothing. It applies the frozen environment, verifies the frozen file and the inputs that it names, takes
the run's lease, runs the stack, and verifies what the stack drew.

Exit codes: 0 completed; 1 failed; 2 refused (bad input, a changed input, a run that is completed); 3 preempted: stopped at an
update boundary by SIGTERM or SIGINT, with a checkpoint from which the next attempt goes on, or before it began; 4 another worker
has the run: it was running it already, or has taken it over.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from pth_exp import changes, disk, freeze, lifecycle
from pth_exp.exits import COMPLETED, FAILED, HELD, PREEMPTED, REFUSED
from pth_exp.lifecycle import Lease, LeaseHeld, LeaseLost, LifecycleError, State
from pth_exp.redraw import RedrawError, verify_first_batches
from pth_exp.refusal import Refusal
from pth_exp.tracking import console
from pth_exp.tracking.process import tracked

STACKS = {"trainer": "pth_exp.trainer.loop:run", "verl": "pth_exp.verl_stack.host:run"}
"""Name of a stack to its ``run(config, recorder, checkpoints, should_stop)``, which returns ``completed`` or ``preempted``."""

_EXITS = {State.COMPLETED: COMPLETED, State.PREEMPTED: PREEMPTED}


class Stop:
    """Whether the run is to end at its next update boundary, and why.

    SIGTERM and SIGINT ask for that; a second SIGINT does not wait for the boundary. So does the end of the launcher that started
    this process as its child and said so in PTH_LAUNCHER_PID: a run does not outlive it unseen.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self._launcher = os.environ.get("PTH_LAUNCHER_PID")
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._receive)

    def asked(self) -> bool:
        if self.reason is None and self._launcher is not None and os.getppid() != int(self._launcher):
            self.reason = f"the launcher, pid {self._launcher}, is gone"
        return self.reason is not None

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if self.reason is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.reason = f"{signal.Signals(number).name} received"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pth_exp.worker", description="Run one frozen run.")
    parser.add_argument("--frozen", type=Path, required=True, help="the run's frozen.yaml")
    parser.add_argument("--sha256", required=True, help="the hash that the frozen file must have")
    chosen = parser.parse_args(arguments)
    stop = Stop()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    run_dir = chosen.frozen.parent
    try:
        frozen = freeze.load(chosen.frozen, chosen.sha256)
        os.environ.update(frozen.environment)
        accepted = freeze.verify_inputs(frozen)
        config = frozen.config
        if stop.asked():  # nothing was begun that would have to be ended in order
            if lifecycle.state(run_dir)[0] not in (State.RUNNING, State.COMPLETED):
                lifecycle.note(run_dir, State.PREEMPTED, "worker", f"{stop.reason} before it began")
            _say(f"preempted: {stop.reason} before it began")
            return PREEMPTED
        disk.require(run_dir, 2 * disk.Reserve.SIZE, "the first files of an attempt")
        with disk.explained(run_dir, "the first files of an attempt"):
            lease = lifecycle.claim(
                run_dir,
                heartbeat_every=config.lease.heartbeat_every,
                lost_after=config.lease.lost_after,
                place=os.environ.get("PTH_PLACE", "by hand"),
                job_id=os.environ.get("PTH_JOB_ID") or os.environ.get("SLURM_JOB_ID"),
            )
    except disk.DiskFull as full:
        _say(f"error: {full}")
        return FAILED
    except LeaseHeld as error:
        _say_refused(error)
        return HELD
    except LifecycleError as error:
        return _say_refused(error)
    except (freeze.FrozenError, Refusal, ValueError) as error:
        if not (run_dir.is_dir() and _is_bad_input(error)):
            raise
        if lifecycle.state(run_dir)[0] not in (State.RUNNING, State.COMPLETED):
            lifecycle.note(run_dir, State.FAILED, "worker", f"refused: {error}")
        return _say_refused(error)
    if lease.took_over is not None:
        logging.warning(lease.took_over)
    return _attempt(lease, frozen, accepted, stop)


def _attempt(lease: Lease, frozen: freeze.FrozenRun, accepted: Sequence[freeze.Difference], stop: Stop) -> int:
    """Run the stack under the lease; every way out but a lost lease or a dead file system ends in a state."""
    try:
        with tracked(frozen.config.tracking, lease.run_dir, lease.attempt.attempt):
            return _in_a_state(lease, frozen, accepted, stop)
    except LeaseLost as lost:
        lease.abandon()
        _say(f"error: {lost}")
        return HELD


def _in_a_state(lease: Lease, frozen: freeze.FrozenRun, accepted: Sequence[freeze.Difference], stop: Stop) -> int:
    reserve = disk.Reserve(lease.run_dir)

    def end(state: State, reason: str = "") -> None:
        try:
            lease.end(state, reason)
        except OSError as error:
            if not disk.is_full(error):
                raise
            reserve.give_back()
            lease.end(state, reason)

    try:
        reserve.take()
        state, reason = _run(lease, frozen, accepted, stop)
        end(state, reason)
        _say(f"{state.lower()}{f': {reason}' if reason else ''}")
        return _EXITS[state]
    except LeaseLost:
        raise
    except KeyboardInterrupt:
        reason = f"{stop.reason}, then SIGINT once more: no checkpoint was written; the last one holds"
        end(State.PREEMPTED, reason)
        _say(reason)
        return PREEMPTED
    except BaseException as error:  # whatever a stack raises, SystemExit included, the run has to be seen to have failed
        lease.check()  # who takes a run over also takes the files from under the one before
        if disk.is_full(error):
            full = disk.explain(error, lease.run_dir, "a file of the run")
            reserve.give_back()
            if not isinstance(error, disk.DiskFull):
                _say(traceback.format_exc())
            end(State.FAILED, str(full))
            _say(f"error: {full}")
            return FAILED
        if _is_bad_input(error) or isinstance(error, RedrawError):
            _say(f"error: {error}")
            end(State.FAILED, str(error))
            return FAILED if isinstance(error, RedrawError) else REFUSED
        _say(traceback.format_exc())
        end(State.FAILED, f"{type(error).__name__}: {error}".strip(": "))
        return FAILED
    finally:
        reserve.give_back()


def _say(text: str) -> None:
    """Into the log, which may lie on a full disk: what it has no room for must not change how a run ends."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr)


def _run(lease: Lease, frozen: freeze.FrozenRun, accepted: Sequence[freeze.Difference], stop: Stop) -> tuple[State, str]:
    from pth_exp.provenance import provenance
    from pth_exp.records.writer import RunRecorder

    hashes = {"frozen_sha256": frozen.sha256, "config_id": frozen.config_id, "inputs": frozen.inputs}
    facts = {"format": 1, "run": frozen.run} | hashes | provenance()
    with disk.explained(lease.run_dir, "manifest.json"):
        lease.describe(facts)
        _record_changes(lease, frozen, accepted, facts)

    def should_stop() -> bool:
        lease.check()
        stop.reason = stop.reason or lease.stop_asked()
        return stop.asked()

    if should_stop():  # rather than load a model first
        return State.PREEMPTED, stop.reason or ""
    stack = _stack(frozen.config.stack.name)
    shown = [console.show] if "console" in frozen.config.tracking.backends else []
    with RunRecorder(lease.run_dir, lease.attempt.attempt, lease.check, *shown) as recorder:
        outcome = stack(frozen.config, recorder, lease.run_dir / "checkpoint", should_stop)
    if outcome == "preempted":
        return State.PREEMPTED, stop.reason or ""
    if outcome != "completed":
        raise RuntimeError(f"the stack {frozen.config.stack.name} ended as {outcome!r}, neither completed nor preempted")
    verify_first_batches(lease.run_dir, frozen.config)
    return State.COMPLETED, ""


def _record_changes(
    lease: Lease, frozen: freeze.FrozenRun, accepted: Sequence[freeze.Difference], facts: Mapping[str, Any]
) -> None:
    """Put on record what this attempt has that is not as frozen, or as the attempt before had it, and from which update on."""
    from pth_exp.checkpoint import CheckpointStore, update_of
    from pth_exp.provenance import moved

    edits = changes.edits_of_the_frozen_file(lease.run_dir) if frozen.accepted.get(freeze.FILE) == frozen.sha256 else []
    found = [*edits, *(change for difference in accepted for change in difference.each())]
    before = lease.facts_before()
    found += moved(before, facts) if before else []
    if not found and not changes.in_force(lease.run_dir):
        return
    newest = CheckpointStore(lease.run_dir / "checkpoint", frozen.config.stack.keep_checkpoints).newest()
    told = changes.begin(lease.run_dir, lease.attempt.attempt, 0 if newest is None else update_of(newest), found)
    logging.warning(told)
    lease.remark(told)
    lease.describe({"changes": changes.rows(lease.run_dir)})


def _stack(name: str) -> Callable[..., Any]:
    module, _, function = STACKS[name].partition(":")
    stack: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return stack


def _is_bad_input(error: BaseException) -> bool:
    """Whether an error tells the user what to change: one of our own refusals, or a ValueError raised by our own code.

    A ValueError out of a library is a bug, and its traceback belongs into the log.
    """
    if isinstance(error, (freeze.FrozenError, Refusal)):
        return True
    if not isinstance(error, ValueError) or error.__traceback__ is None:
        return False
    frame = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][-1]
    return str(frame.f_globals.get("__name__", "")).startswith("pth_exp.")


def _say_refused(error: Exception) -> int:
    _say(f"refused: {error}")
    return REFUSED


if __name__ == "__main__":
    sys.exit(main())
