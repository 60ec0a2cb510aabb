"""What ``pth check`` says of shadow arms: which names are one method on the batches trained on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pytest
import sweeps

from pth_exp.cli import main
from pth_exp.records.fields import KINDS

Measure = Callable[[int], tuple[float | None, float | None]]


def swept(root: Path, measure: Measure) -> Path:
    def with_pair(kind: str, row: dict[str, Any]) -> dict[str, Any]:
        if kind != "updates":
            return row
        cosine, ratio = measure(row["update"])
        return row | {"shadow/pairs": [{"a": "asympo_reading", "b": "seq_norm", "cosine": cosine, "norm_ratio": ratio}]}

    return sweeps.make(root, {"san": sweeps.config("san")}, mutate={"san": with_pair})


SAID: list[tuple[Measure, bool, float | None, str]] = [
    (lambda u: (1.0 - 1e-15, 56.0), True, 56.0, "differ by one scale: asympo_reading is 56 times seq_norm"),
    (lambda u: (1.0, 1.0 + 1e-7), True, 1.0, "They differ in nothing"),
    (lambda u: (1.0, 1.0 + u), True, None, "by a scale that varies between updates"),
    (lambda u: (1.0 if u else None, 2.0 if u else None), True, 2.0, "on every update measured (11)"),
    (lambda u: (1.0 - 1e-9 if u == 7 else 1.0, 1.0), False, None, ""),
    (lambda u: (-1.0, 1.0), False, None, ""),
    (lambda u: (float("nan"), float("nan")), False, None, ""),
]


@pytest.mark.parametrize(("measure", "one", "scale", "sentence"), SAID)
def test_one_method_or_two(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], measure: Measure, one: bool, scale: float | None, sentence: str
) -> None:
    root = swept(tmp_path / "s", measure)
    main(["check", str(root), "--no-figure"])
    out = " ".join(capsys.readouterr().out.split())
    assert ("one method on these batches" in out) == one and sentence in out
    main(["check", str(root), "--no-figure", "--json"])
    (pair,) = json.loads(capsys.readouterr().out)["shadows"]
    assert pair["one_method"] == one
    assert pair["scale"] == (pytest.approx(scale) if scale is not None else None)


def test_a_run_without_shadows_says_nothing_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["check", str(sweeps.make(tmp_path / "s", {"san": sweeps.config("san")})), "--no-figure"])
    assert "Shadow" not in capsys.readouterr().out


def test_duckdb_reads_the_pairs(tmp_path: Path) -> None:
    segment = next(swept(tmp_path / "s", lambda u: (1.0, float(u) if u else float("nan"))).glob("*/updates.0001.jsonl"))
    columns = {column.name: column.type for column in KINDS["updates"]}
    query = """SELECT "update", "shadow/pairs"->0->>'b', ("shadow/pairs"->0->>'norm_ratio')::DOUBLE
               FROM read_json(?, format = 'newline_delimited', columns = ?) ORDER BY 1"""
    rows = duckdb.execute(query, [str(segment), columns]).fetchall()
    assert rows[3] == (3, "seq_norm", 3.0) and rows[0][2] != rows[0][2]
