"""Stacks that do in an instant what a trainer does in hours: complete, stop, break, misdraw."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from pth_exp import lifecycle
from pth_exp.checkpoint import CheckpointStore, is_due, update_of
from pth_exp.records.writer import RunRecorder
from pth_exp.redraw import first_batches
from pth_exp.schema import Config

Stop = Callable[[], bool]


def completes(config: Config, recorder: RunRecorder, checkpoints: Path, should_stop: Stop) -> str:
    recorder.first_batches(first_batches(config))
    for update in range(config.updates):
        assert not should_stop()
        recorder.update({"update": update})
    return "completed"


def stops_at_a_checkpoint(config: Config, recorder: RunRecorder, checkpoints: Path, should_stop: Stop) -> str:
    """Three updates further, with a checkpoint, and stopped there."""
    store = CheckpointStore(checkpoints, 1, recorder.settle)
    newest = store.newest()
    done = (0 if newest is None else update_of(newest)) + 3
    recorder.first_batches(first_batches(config))
    for update in range(done - 3, done):
        recorder.update({"update": update})
    with store.writing(done) as folder:
        (folder / "state.pt").write_text(f"{done}")
    return "preempted"


def tells_its_environment(config: Config, recorder: RunRecorder, checkpoints: Path, should_stop: Stop) -> str:
    checkpoints.with_name("environment.txt").write_text(os.environ["PTH_TEST_WORD"])
    return completes(config, recorder, checkpoints, should_stop)


def misdraws(config: Config, recorder: RunRecorder, checkpoints: Path, should_stop: Stop) -> str:
    seeded_wrongly = dataclasses.replace(config, seeds=dataclasses.replace(config.seeds, data=12345))
    recorder.first_batches(first_batches(seeded_wrongly))
    return "completed"


def draws_too_little(config: Config, recorder: RunRecorder, checkpoints: Path, should_stop: Stop) -> str:
    recorder.first_batches(first_batches(config)[:-1])
    return "completed"


def writes_no_draws(config: Config, recorder: RunRecorder, checkpoints: Path, should_stop: Stop) -> str:
    return "completed"


def is_terminated(config: Config, recorder: RunRecorder, checkpoints: Path, should_stop: Stop) -> str:
    for update in range(config.updates):
        if should_stop():
            return "preempted"
        if update == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        recorder.update({"update": update})
    return "completed"


def is_interrupted_twice(config: Config, recorder: RunRecorder, checkpoints: Path, should_stop: Stop) -> str:
    os.kill(os.getpid(), signal.SIGINT)
    recorder.update({"update": 0})
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
    return "completed"


def divides_by_zero(config: Config, recorder: RunRecorder, checkpoints: Path, should_stop: Stop) -> str:
    recorder.update({"update": 0, "actor/loss": 1 / 0})
    return "completed"


def exits(config: Config, recorder: RunRecorder, checkpoints: Path, should_stop: Stop) -> str:
    sys.exit("gave up")


def names_a_bad_field(config: Config, recorder: RunRecorder, checkpoints: Path, should_stop: Stop) -> str:
    from pth_exp.trainer.build import build

    build(dataclasses.replace(config, model=dataclasses.replace(config.model, path="/nowhere/to/be/found")))
    return "completed"


def ends_strangely(config: Config, recorder: RunRecorder, checkpoints: Path, should_stop: Stop) -> str:
    return "tired"


def is_taken_over(config: Config, recorder: RunRecorder, checkpoints: Path, should_stop: Stop) -> str:
    """Loses its lease to another attempt, as if it had been suspended for an hour."""
    recorder.update({"update": 0})
    _take_over(checkpoints.parent)
    recorder.update({"update": 1})
    return "completed"


def is_taken_over_in_a_checkpoint(config: Config, recorder: RunRecorder, checkpoints: Path, should_stop: Stop) -> str:
    store = CheckpointStore(checkpoints, 1, recorder.settle)
    with store.writing(1) as folder:
        _take_over(checkpoints.parent)
        store.newest()  # as the new owner does
        (folder / "state.pt").write_text("late")
    return "completed"


def _take_over(run_dir: Path) -> None:
    heartbeat = next((run_dir / "attempts").glob("0001.*.heartbeat"))
    old = time.time() - 3600
    os.utime(heartbeat, (old, old))
    lifecycle.claim(run_dir, heartbeat_every=5.0, lost_after=60.0, place="elsewhere", job_id=None)


def saves(config: Config, recorder: RunRecorder, checkpoints: Path, should_stop: Stop) -> str:
    """All that a trainer writes, in an instant: every number follows from the ones before, through a checkpoint as well."""
    store = CheckpointStore(checkpoints, config.stack.keep_checkpoints, recorder.settle)
    recorder.received({f"field.{n}": n for n in range(1000)})
    newest = store.newest()
    start, chain = (update_of(newest), (newest / "chain").read_bytes()) if newest is not None else (0, b"")
    for update in range(start, config.updates):
        if update == 0:
            recorder.first_batches(first_batches(config))
        chain = hashlib.sha512(chain).digest()
        recorder.batch({"update": update, "batch_id": chain.hex() * 9})
        recorder.update({"update": update, "actor/loss": chain[0] / 256})
        done = update + 1
        if is_due(done, config.stack.checkpoint_every, config.updates):
            with store.writing(done) as folder:
                (folder / "chain").write_bytes(chain)
                (folder / "weights").write_bytes(chain * 400)
    return "completed"


def breaks_once(config: Config, recorder: RunRecorder, checkpoints: Path, should_stop: Stop) -> str:
    """Validates every four updates, and fails in update 7 of its first attempt; the next goes on from update 6."""
    store = CheckpointStore(checkpoints, keep=0, settle=recorder.settle)
    newest = store.newest()
    for update in range(update_of(newest) if newest is not None else 0, config.updates + 1):
        if newest is None or update != update_of(newest):
            recorder.first_batches(first_batches(config))
            if update == 6:
                with store.writing(update):
                    pass
            if update % 4 == 0:
                recorder.evaluation({"update": update, "accuracy": update / 100, "correct": [1, 0]})
        if update < config.updates:
            loss = float("nan") if update == 3 else update / 7
            recorder.update({"update": update, "actor/loss": loss, "actor/grad_clipped": update % 2 == 0, "data/age": None})
        if update == 7 and newest is None:
            raise RuntimeError("the power went")
    return "completed"
