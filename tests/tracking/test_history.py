"""A run's numbers as trackers take them, held against the reader of the records."""

from __future__ import annotations

import math
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from pth_exp.records.reader import RunRecords
from pth_exp.records.writer import RunRecorder
from pth_exp.tracking.history import History


def test_numbers_are_what_is_taken(tmp_path: Path) -> None:
    row = {
        "update": 0,
        "actor/loss": float("nan"),
        "actor/grad_norm": float("-inf"),
        "actor/grad_clipped": True,
        "data/age": None,
    }
    with RunRecorder(tmp_path, 1, lambda: None) as recorder:
        recorder.update({**row, "ratio/clipfrac_by_step": [0.5], "sampler/fingerprint": "ab", "extra/mine": 3})
    ((step, numbers),) = History(tmp_path, 1).steps(ended=True)
    assert step == 0 and math.isnan(numbers.pop("actor/loss"))
    assert numbers == {"actor/grad_norm": -math.inf, "actor/grad_clipped": True, "extra/mine": 3}


def test_a_line_that_is_being_written_is_left_for_later(tmp_path: Path) -> None:
    segment = tmp_path / "updates.0001.jsonl"
    history = History(tmp_path, 1)
    assert list(history.steps(ended=False)) == []
    segment.write_bytes(b'{"update":0,"actor/loss":1}\n{"update":1,"actor/lo')
    assert list(history.steps(ended=False)) == [(0, {"actor/loss": 1})]
    with segment.open("ab") as file:
        file.write(b'ss":2}\n')
    assert list(history.steps(ended=False)) == [(1, {"actor/loss": 2})]


def test_a_validation_stands_at_the_step_that_follows_it(tmp_path: Path) -> None:
    history = History(tmp_path, 1)
    with RunRecorder(tmp_path, 1, lambda: None) as recorder:
        recorder.evaluation({"update": 0, "accuracy": 0.1})
        recorder.update({"update": 0, "actor/loss": 1.0})
        assert list(history.steps(ended=False)) == [(0, {"actor/loss": 1.0, "accuracy": 0.1})]
        recorder.evaluation({"update": 1, "accuracy": 0.2})
    assert list(history.steps(ended=False)) == [] and list(history.steps(ended=True)) == [(1, {"accuracy": 0.2})]


@settings(deadline=None, max_examples=40)
@given(attempts=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=3), looks=st.sets(st.integers(0, 50)))
def test_however_often_a_run_resumes_each_step_comes_once_and_as_the_newest_attempt_left_it(
    attempts: list[tuple[int, int]], looks: set[int]
) -> None:
    """Attempts of a run of 12 updates, validated every 3, with a look at the records wherever it happens to fall."""
    with TemporaryDirectory() as folder:
        run_dir, done, written = Path(folder), 0, 0
        (run_dir / "frozen.yaml").write_text("run: {label: a}\nconfig: {}\n")
        for attempt, (start, end) in enumerate([*attempts, (12, 12)], 1):
            start = min(start, done)
            done = max(start, end)
            seen: list[tuple[int, dict[str, Any]]] = []
            history = History(run_dir, attempt)
            with RunRecorder(run_dir, attempt, lambda: None) as recorder:
                for update in range(start, done):
                    number = attempt * 100.0 + update
                    if update == start == 0:
                        recorder.evaluation({"update": 0, "accuracy": number})
                    if (update + 1) % 3 == 0:
                        recorder.evaluation({"update": update + 1, "accuracy": number})
                    recorder.batch({"update": update})
                    recorder.update({"update": update, "actor/loss": number})
                    written += 1
                    if written in looks:
                        seen += history.steps(ended=False)
            seen += history.steps(ended=True)
            steps = [step for step, _ in seen]
            assert steps == sorted(set(steps))
        records = RunRecords.load(run_dir)
        expected: dict[int, dict[str, Any]] = {row["update"]: {"actor/loss": row["actor/loss"]} for row in records.updates}
        for row in records.evaluations:
            expected.setdefault(row["update"], {})["accuracy"] = row["accuracy"]
        assert seen == sorted(expected.items()) and len(expected) == 13
