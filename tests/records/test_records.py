"""The record files: what a reader gets back from what was written, whatever instant the writer died at."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import duckdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pth_exp.cli import main
from pth_exp.records.fields import KINDS
from pth_exp.records.reader import NothingToRead, RunRecords, Sweep, spans
from pth_exp.records.writer import RecordError, RunRecorder


def duckdb_columns(kind: str) -> dict[str, str]:
    """The ``columns`` argument of DuckDB's ``read_json``."""
    return {column.name: column.type for column in KINDS[kind]}


def mine() -> None:
    pass


def new_run(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "frozen.yaml").write_text("run: {label: x}\nconfig: {}\n")
    return path


def write(path: Path, attempt: int, rows: list[dict[str, Any]]) -> None:
    with RunRecorder(path, attempt, mine) as recorder:
        for row in rows:
            recorder.update(row)


floats = st.floats(allow_nan=True, allow_infinity=True)


@given(values=st.lists(st.one_of(st.none(), floats), min_size=1, max_size=6))
@settings(max_examples=50, deadline=None)
def test_numbers_come_back_as_written(values: list[float | None], tmp_path_factory: pytest.TempPathFactory) -> None:
    run = new_run(tmp_path_factory.mktemp("run"))
    write(run, 1, [{"update": i, "actor/loss": v, "ratio/clipfrac_by_step": [v]} for i, v in enumerate(values)])
    read = RunRecords.load(run)
    for got, want in zip(read.column("actor/loss"), values, strict=True):
        assert got is None if want is None else (math.isnan(got) if math.isnan(want) else got == want)
    assert [p for p in read.problems if p.kind != "gap"] == []


def test_truncated_at_every_byte(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    write(run, 1, [{"update": u, "actor/loss": u / 3, "sampler/fingerprint": 'a"b\\n\n'} for u in range(3)])
    segment = run / "updates.0001.jsonl"
    whole = segment.read_bytes()
    ends = [i for i, byte in enumerate(whole) if byte == ord("\n")]
    for size in range(ends[0] - 2, len(whole) + 1):  # every byte of the last two rows
        segment.write_bytes(whole[:size])
        read = RunRecords.load(run)
        complete = sum(size >= end for end in ends)  # the row is whole once its closing brace is there
        start = 0 if complete == 0 else ends[complete - 1] + 1
        assert [row["update"] for row in read.updates] == list(range(complete))
        torn = [p for p in read.problems if p.kind == "torn"]
        if size > start:
            assert [(p.file, p.offset) for p in torn] == [("updates.0001.jsonl", start)]
        else:
            assert torn == []


@given(
    lengths=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 6)), min_size=1, max_size=5),
)
@settings(max_examples=60, deadline=None)
def test_newest_attempt_wins(lengths: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory) -> None:
    """Attempt a resumes at some update that an earlier one had reached, and writes some rows."""
    run = new_run(tmp_path_factory.mktemp("run"))
    expected: dict[int, int] = {}
    for attempt, (start, count) in enumerate(lengths, 1):
        first = min(start, len(expected))
        write(run, attempt, [{"update": u} for u in range(first, first + count)])
        expected.update({u: attempt for u in range(first, first + count)})
    read = RunRecords.load(run)
    assert {row["update"]: row["attempt"] for row in read.updates} == expected
    assert {(p.kind, p.file) for p in read.problems} <= {("gap", "batches.*.jsonl")}  # no batches were written at all


WRITER = """
import sys
from pathlib import Path
from pth_exp.records.writer import RunRecorder
recorder = RunRecorder(Path(sys.argv[1]), 1, lambda: None)
for update in range(10**9):
    recorder.batch({"update": update, "prompt_ids": ["train:%d:abc" % i for i in range(200)]})
    recorder.update({"update": update, "actor/loss": update / 7})
    if update == 20:
        print("writing", flush=True)
"""


@pytest.mark.parametrize("repeat", range(3))
def test_killed_while_writing(tmp_path: Path, repeat: int) -> None:
    run = new_run(tmp_path / "run")
    child = subprocess.Popen([sys.executable, "-c", WRITER, str(run)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"writing\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    read = RunRecords.load(run)
    reached = len(read.updates)
    assert reached > 20
    assert read.column("actor/loss") == [u / 7 for u in range(reached)]
    assert len(read.batches) in (reached, reached + 1)
    assert {p.kind for p in read.problems} <= {"torn"}


def test_gaps_duplicates_and_foreign_rows_are_named(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    write(run, 1, [{"update": u} for u in (0, 1, 3, 7)])
    segment = run / "updates.0001.jsonl"
    segment.write_bytes(segment.read_bytes() + b'{"update":7,"attempt":1}\n{"update":8,"attempt":2}\nnonsense\n{"attempt":1}\n')
    problems = {(p.kind, p.file): p for p in RunRecords.load(run).problems}
    assert "update 2, 4-6" in problems["gap", "updates.*.jsonl"].message
    assert "update 0-8" in problems["gap", "batches.*.jsonl"].message
    assert "update 7" in problems["duplicate", "updates.0001.jsonl"].message
    assert "attempt 2" in problems["foreign", "updates.0001.jsonl"].message
    assert problems["unreadable", "updates.0001.jsonl"].offset == segment.read_bytes().index(b'{"attempt":1}')


def test_duckdb_reads_the_files(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    write(run, 1, [{"update": 0, "actor/loss": 1.5, "actor/grad_clipped": True}, {"update": 1, "actor/loss": None}])
    write(run, 2, [{"update": 1, "actor/loss": float("nan"), "ratio/clipfrac_by_step": [0.0, float("inf")]}])
    segment = run / "updates.0002.jsonl"
    segment.write_bytes(segment.read_bytes() + b'{"update":2,"att')  # torn
    rows = duckdb.execute(
        'SELECT "update", attempt, "actor/loss", "actor/grad_clipped", "ratio/clipfrac_by_step" '
        "FROM read_json(?, format = 'newline_delimited', ignore_errors = true, columns = ?) "
        'WHERE "update" IS NOT NULL ORDER BY attempt, "update"',
        [str(run / "updates.*.jsonl"), duckdb_columns("updates")],
    ).fetchall()
    assert rows[0] == (0, 1, 1.5, True, None)
    assert rows[1] == (1, 1, None, None, None)
    assert rows[2][:2] == (1, 2) and math.isnan(rows[2][2]) and rows[2][4] == [0.0, math.inf]
    assert len(rows) == 3


def test_duckdb_reads_every_kind(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    with RunRecorder(run, 1, mine) as recorder:
        recorder.update({"update": 0})
        generated = [{"draw": 0, "prompt_ids": ["train:3:ab"]}]
        recorder.batch({"update": 0, "prompt_ids": ["train:3:ab"], "rows": [["train:3:ab", 0]], "generated": generated})
        recorder.evaluation({"update": 0, "accuracy": 0.5, "correct": [0, 1], "decoding": {"greedy": True}})
        recorder.equation({"update": 0, "float64/gradient_error": 1e-16, "float64/worst": {"input": "x"}})
    for kind in KINDS:
        query = "SELECT count(*) FROM read_json(?, format = 'newline_delimited', columns = ?)"
        assert duckdb.execute(query, [str(run / f"{kind}.*.jsonl"), duckdb_columns(kind)]).fetchall() == [(1,)]


def test_equations_are_kept_of_every_attempt_and_leave_no_gap(tmp_path: Path) -> None:
    """An attempt writes one row, at the update that it goes on from; nothing is due in between."""
    run = new_run(tmp_path)
    for attempt, update, error in ((1, 0, 1e-16), (2, 0, 2e-16), (3, 7, float("inf"))):
        with RunRecorder(run, attempt, mine) as recorder:
            recorder.equation({"update": update, "float64/gradient_error": error, "float64/norm_ratio": [0.5, 1.0]})
    read = RunRecords.load(run)
    assert [(row["update"], row["attempt"], row["float64/gradient_error"]) for row in read.equations] == [
        (0, 2, 2e-16),
        (7, 3, math.inf),
    ]
    assert read.problems == []
    segment = run / "equations.0003.jsonl"
    segment.write_bytes(segment.read_bytes()[:40])  # killed while writing
    read = RunRecords.load(run)
    assert [row["update"] for row in read.equations] == [0] and [p.kind for p in read.problems] == ["torn"]


def test_first_batches_are_written_once(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    drawn = [["train:1:a", "train:2:b"], ["train:3:c", "train:4:d"]]
    RunRecorder(run, 1, mine).first_batches(drawn)
    before = (run / "first_batches.json").stat()
    RunRecorder(run, 2, mine).first_batches(drawn)  # a resumed run draws the same
    assert (run / "first_batches.json").stat().st_mtime_ns == before.st_mtime_ns
    with pytest.raises(RecordError, match="batch 1 was drawn differently"):
        RunRecorder(run, 3, mine).first_batches([drawn[0], ["train:4:d", "train:3:c"]])
    assert RunRecords.load(run).first_batches == drawn
    assert sorted(p.name for p in run.iterdir()) == ["first_batches.json", "frozen.yaml"]


def test_received_keeps_the_newest(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    RunRecorder(run, 1, mine).received({"lr": 1e-5, "seeds.data": None})
    RunRecorder(run, 2, mine).received({"lr": 2e-5, "seeds.data": 42})
    assert RunRecords.load(run).received == {"lr": 2e-5, "seeds.data": 42}


def test_a_rival_stops_the_writer(tmp_path: Path) -> None:
    class Lost(Exception):
        pass

    def lost() -> None:
        raise Lost

    run = new_run(tmp_path)
    recorder = RunRecorder(run, 1, lost)
    for call in (lambda: recorder.update({"update": 0}), lambda: recorder.first_batches([["a"]]), lambda: recorder.received({})):
        with pytest.raises(Lost):
            call()
    assert os.listdir(run) == ["frozen.yaml"]


def test_a_segment_belongs_to_one_recorder(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    write(run, 1, [{"update": 0}])
    with pytest.raises(RecordError, match="claim the next attempt"):
        write(run, 1, [{"update": 1}])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"update": 0, "actor/grad_nrom": 1.0}, "actor/grad_nrom"),
        ({"actor/loss": 1.0}, "update is None"),
        ({"update": True}, "update is True"),
        ({"update": 0, "actor/loss": object()}, "'actor/loss' holds a object"),
        ({"update": 0, "actor/loss": [float("nan"), {"a": object()}]}, "'actor/loss'"),
    ],
)
def test_bad_rows_are_refused(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordError, match=message):
        RunRecorder(new_run(tmp_path), 1, mine).update(row)


def test_rows_are_written_once_in_order(tmp_path: Path) -> None:
    recorder = RunRecorder(new_run(tmp_path), 1, mine)
    recorder.update({"update": 4})
    with pytest.raises(RecordError, match="update 4 after update 4"):
        recorder.update({"update": 4})


def test_extra_columns_are_open(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    write(run, 1, [{"update": 0, "extra/mine": float("-inf")}])
    assert RunRecords.load(run).column("extra/mine") == [-math.inf]


def test_spans() -> None:
    assert spans([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert spans([]) == ""


def test_where_there_is_no_sweep(tmp_path: Path) -> None:
    run = new_run(tmp_path / "sweep" / "000-x")
    with pytest.raises(NothingToRead, match="give its sweep"):
        Sweep.load(run)
    with pytest.raises(NothingToRead, match="pth run"):
        Sweep.load(tmp_path / "nowhere")
    index = {"format": 1, "runs": [{"dir": "000-x", "label": "x"}, {"dir": "001-y", "label": "y"}]}
    (run.parent / "index.json").write_text(json.dumps(index))
    (tmp_path / "latest").symlink_to(run.parent)
    sweep = Sweep.load(tmp_path)
    assert [r.label for r in sweep.runs] == ["x"]
    assert [p.kind for p in sweep.problems] == ["missing"] and "y" in sweep.problems[0].message


@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
@pytest.mark.parametrize("command", ["check", "status", "diff", "resume", "list"])
def test_an_index_that_is_none_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, text: str) -> None:
    (tmp_path / "index.json").write_text(text)
    assert main([command, str(tmp_path)]) == 2
    assert "index.json is not" in capsys.readouterr().err


def test_a_folder_that_is_not_there_is_no_empty_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", str(tmp_path / "nowhere")]) == 2
    assert "no such directory" in capsys.readouterr().err
    assert main(["list", str(tmp_path)]) == 0


@pytest.mark.parametrize(
    ("name", "text"),
    [("received.yaml", "[1]"), ("received.yaml", "[1"), ("first_batches.json", '{"a": 1}'), ("manifest.json", "[]")],
)
def test_a_file_of_another_kind_is_a_problem_and_counts_as_not_there(tmp_path: Path, name: str, text: str) -> None:
    run = new_run(tmp_path)
    (run / name).write_text(text)
    records = RunRecords.load(run)
    assert [(p.kind, p.file) for p in records.problems] == [("unreadable", name)]
    assert (records.received, records.first_batches, records.manifest) == (None, None, None)


def test_an_empty_frozen_file_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "frozen.yaml").write_text("")
    with pytest.raises(NothingToRead, match="is not a frozen run"):
        RunRecords.load(tmp_path)
