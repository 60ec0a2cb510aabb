"""A run that is stopped and killed at any updates, and gone on with each time, is the run that was left alone."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pth_exp import schema
from pth_exp.records.reader import RunRecords
from pth_exp.records.writer import RunRecorder
from pth_exp.trainer.loop import Outcome, run

from .conftest import Configure, Ran

UPDATES, EPOCH = 8, 3
"""Draws 3, 6, 9 begin an epoch: a run ends within its third or, with a queue that is filled first, its fourth."""


class Killed(BaseException):
    pass


@dataclass(frozen=True)
class Settings:
    queue: schema.Queue
    refresh_interval: int
    replay_age: int
    steps_per_batch: int
    checkpoint_every: int | None
    grad_norm: schema.GradNorm
    every: int | None


def attempts(config: schema.Config, folder: Path, ends: list[tuple[int, bool]]) -> None:
    """One attempt after the other; each but the last ends after so many updates of its own, stopped or (True) killed."""
    (folder / "frozen.yaml").write_text("config: {}\nrun: {label: a}\n")
    for attempt, end in enumerate([*ends, None], start=1):
        asked = 0

        def should_stop(end: tuple[int, bool] | None = end) -> bool:
            nonlocal asked
            asked += 1
            if end is not None and asked > end[0]:
                if end[1]:
                    raise Killed
                return True
            return False

        try:
            with RunRecorder(folder, attempt, lambda: None) as recorder:
                outcome = run(config, recorder, folder / "checkpoint", should_stop)
        except Killed:
            continue
        if outcome is Outcome.completed:
            return


def left(folder: Path) -> dict[str, Any]:
    """The records, and the last checkpoint: its name holds the hash of weights, optimiser, sampler and queue."""
    records = RunRecords.load(folder)
    assert not records.problems
    newest = sorted(path.name for path in (folder / "checkpoint").iterdir())[-1]
    return {**Ran(folder).all(), "checkpoint": newest}


@pytest.fixture(scope="module")
def alone() -> dict[Settings, dict[str, Any]]:
    return {}


drawn = st.builds(
    Settings,
    queue=st.sampled_from(list(schema.Queue)),
    refresh_interval=st.sampled_from([1, 3, 5]),
    replay_age=st.integers(0, 3),
    steps_per_batch=st.sampled_from([1, 2]),
    checkpoint_every=st.sampled_from([1, 2, 3]),
    grad_norm=st.sampled_from(list(schema.GradNorm)),
    every=st.sampled_from([None, 1, 3]),
)
ending = st.tuples(st.integers(0, UPDATES), st.booleans())
PLAIN = Settings(schema.Queue.unique_prefill, 3, 2, 1, 3, schema.GradNorm.clip, 1)


@pytest.mark.slow
@settings(max_examples=7, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn, st.lists(ending, min_size=1, max_size=3))
@example(PLAIN, [(EPOCH, False)])  # at an epoch's boundary
@example(PLAIN, [(EPOCH + 2, False), (0, False)])  # in the second epoch, and again where it went on
@example(PLAIN, [(5, True), (0, True), (2, True)])  # killed past a checkpoint, and before the next
def test_stopped_or_killed_at_any_updates(
    configure: Configure, alone: dict[Settings, dict[str, Any]], chosen: Settings, ends: list[tuple[int, bool]]
) -> None:
    config = configured(configure, chosen)
    with tempfile.TemporaryDirectory() as folder:
        if chosen not in alone:
            whole = Path(folder) / "whole"
            whole.mkdir()
            attempts(config, whole, [])
            alone[chosen] = left(whole)
            assert [row["data/batch_index"] // EPOCH for row in alone[chosen]["updates"]][-1] >= 1, "it trains in a second epoch"
        stopped = Path(folder) / "stopped"
        stopped.mkdir()
        attempts(config, stopped, ends)
        assert left(stopped) == alone[chosen]


def configured(configure: Callable[..., schema.Config], chosen: Settings) -> schema.Config:
    return configure(
        "tis_ppo",
        updates=UPDATES,
        prompts_per_update=2,
        responses_per_prompt=2,
        max_response_tokens=3,
        task__train_problems=2 * EPOCH,
        queue=chosen.queue,
        refresh_interval=chosen.refresh_interval,
        replay_age=chosen.replay_age,
        optimizer__steps_per_batch=chosen.steps_per_batch,
        optimizer__grad_norm=chosen.grad_norm,
        stack__checkpoint_every=chosen.checkpoint_every,
        validation__every=chosen.every,
        validation__problems=2,
    )


def test_a_sampler_that_is_not_put_back_is_seen(configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above can fail: after a resume, the sampler starts from the learner's weights, not from its older ones."""
    config = configured(configure, PLAIN)
    load = torch.load
    for name, ends in (("whole", []), ("stopped", [(5, False)])):
        (tmp_path / name).mkdir()
        attempts(config, tmp_path / name, ends)
        monkeypatch.setattr(torch, "load", lambda *a, **k: (state := load(*a, **k)) | {"sampler": state["learner"]})
    whole, stopped = left(tmp_path / "whole"), left(tmp_path / "stopped")
    differ = [row["update"] for row in whole["updates"] if row not in stopped["updates"]]
    assert differ and min(differ) >= 5
    assert whole["checkpoint"] != stopped["checkpoint"]
