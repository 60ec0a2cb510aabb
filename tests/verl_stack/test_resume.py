"""A run on verl that is killed, damaged, stopped and resumed, against the same run left alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from pth_exp import leftovers, lifecycle, marked
from pth_exp.checkpoint import update_of
from pth_exp.records.reader import RunRecords, Sweep

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

INTERVAL, UPDATES = 4, 12
KILLED = 9
"""The update in which the worker is killed. The newest checkpoint is then of update 8, on which the sampler was refreshed, and is
damaged; the one before is of update 6, in mid-interval, with a sampler of version 4."""
RUN = [
    *("stack=verl", "arm=tis_ppo", f"refresh_interval={INTERVAL}", f"updates={UPDATES}", "stack.checkpoint_every=2"),
    *("prompts_per_update=4", "responses_per_prompt=4", "max_response_tokens=24", "task.train_problems=12"),
    *("validation.problems=16", "seed=7"),
    "stack.sampler_rows=1",  # one response at a time: rounding then depends on nothing but the weights
]


@dataclass(frozen=True, slots=True)
class Place:
    """A folder in which ``pth`` is called."""

    folder: Path
    verl_python: Path

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "PTH_VERL_PYTHON": str(self.verl_python)}
        command = [sys.executable, "-P", "-m", "pth_exp.cli", *arguments]
        return subprocess.Popen(
            command, cwd=self.folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def run_dir(self) -> Path:
        (run,) = Sweep.load(self.folder / "multirun_outputs").runs
        return run.path


def finished(process: subprocess.Popen[str], code: int) -> str:
    output, _ = process.communicate(timeout=2400)
    assert process.returncode == code, output
    return output


def when(process: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    """Returns as soon as the condition holds; it is about what a running command writes, so its end is the end of waiting."""
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)


def rows_of(run_dir: Path, attempt: int) -> int:
    """How many updates an attempt has on record."""
    segment = run_dir / f"updates.{attempt:04d}.jsonl"
    return segment.read_bytes().count(b"\n") if segment.exists() else 0


def signalled(place: Place, process: subprocess.Popen[str], attempt: int, rows: int, number: int) -> str:
    """Send the worker a signal once an attempt has written so many rows; what the attempt noted of itself until then."""
    when(process, lambda: (place.folder / "multirun_outputs" / "adhoc" / "latest").exists())
    run_dir = place.run_dir()
    when(process, lambda: rows_of(run_dir, attempt) >= rows)
    note = (run_dir / leftovers.FILE).read_text()
    os.kill(lifecycle.read_attempt(run_dir, attempt).pid, number)
    return note


@pytest.fixture(scope="module")
def whole(verl_python: Path, tmp_path_factory: pytest.TempPathFactory) -> RunRecords:
    """Left alone, and never validated."""
    place = Place(tmp_path_factory.mktemp("whole"), verl_python)
    finished(place.start("run", *RUN, "validation.every=null"), 0)
    return RunRecords.load(place.run_dir())


@pytest.fixture(scope="module")
def killed(verl_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Validated after every update, and killed in the ninth."""
    place = Place(tmp_path_factory.mktemp("killed"), verl_python)
    launched = place.start("run", *RUN, "validation.every=1")
    note = signalled(place, launched, attempt=1, rows=KILLED, number=signal.SIGKILL)
    assert "ended by signal 9 (SIGKILL) without a last word" in finished(launched, 1)
    noted = json.loads(note)
    assert marked.writing_to(Path(noted["folder"])) == []
    assert len(noted["segments"]) > 0
    assert [path for path in (noted["folder"], *noted["segments"]) if Path(path).exists()] == []
    return place


@pytest.fixture(scope="module")
def resumed(killed: Place) -> RunRecords:
    """Gone on from the checkpoint before the newest, which is damaged."""
    checkpoints = killed.run_dir() / "checkpoint"
    older, newer = sorted(checkpoints.iterdir())
    assert (update_of(older), update_of(newer)) == (6, 8)
    weights = newer / "sampler" / "worker_0.pt"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    finished(killed.start("resume"), 0)
    log = (killed.run_dir() / "log.txt").read_text()
    assert f"checkpoint {newer} is damaged: sampler/worker_0.pt has sha256" in log
    return RunRecords.load(killed.run_dir())


def same(one: RunRecords, other: RunRecords) -> None:
    """All that was drawn, generated and learnt, row by row and bit by bit; but not how long it took."""
    for kind in ("updates", "batches"):
        rows = [
            [{k: v for k, v in row.items() if k != "attempt" and "timing_s/" not in k} for row in getattr(run, kind)]
            for run in (one, other)
        ]
        for mine, theirs in zip(*rows, strict=True):
            assert {k: (v, theirs[k]) for k, v in mine.items() if v != theirs[k]} == {}, (kind, mine["update"])


def test_the_resumed_run_is_the_uninterrupted_one(whole: RunRecords, resumed: RunRecords) -> None:
    """And validation after every update changes nothing of the training."""
    assert resumed.problems == whole.problems == []
    assert [row["attempt"] for row in resumed.updates] == [1] * 6 + [2] * 6
    assert resumed.column("sampler/version") == [0] * 4 + [4] * 4 + [8] * 4
    assert resumed.column("data/age") == [0, 1, 2, 3] * 3
    learner = resumed.column("learner/fingerprint")
    assert resumed.column("sampler/fingerprint") == [learner[0]] * 4 + [learner[4]] * 4 + [learner[8]] * 4
    assert len(set(learner)) == UPDATES and len({row["batch_id"] for row in resumed.batches}) == UPDATES
    assert resumed.first_batches == whole.first_batches
    same(whole, resumed)


def test_validations_of_a_resumed_run_are_neither_repeated_nor_left_out(whole: RunRecords, resumed: RunRecords) -> None:
    assert whole.evaluations == []
    assert [row["update"] for row in resumed.evaluations] == list(range(UPDATES + 1))
    assert [row["attempt"] for row in resumed.evaluations] == [1] * 7 + [2] * 6
    learner = whole.column("learner/fingerprint")
    for row in resumed.evaluations:
        assert row["sampler/fingerprint_before"] == row["sampler/fingerprint_after"]
        if row["update"] < UPDATES:
            assert row["learner/fingerprint"] == learner[row["update"]]
            fresh = row["update"] % INTERVAL == 0
            assert (row["sampler/fingerprint_after"] == learner[row["update"]]) is fresh, "a refresh comes before its validation"


def test_the_loss_is_held_against_its_equation_at_each_start(resumed: RunRecords) -> None:
    assert [(row["update"], row["attempt"]) for row in resumed.equations] == [(0, 1), (6, 2)]
