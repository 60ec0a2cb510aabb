"""Check 3 on records made by the writer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sweeps

from pth_exp.checks import batches
from pth_exp.checks.result import Outcome, Verdict
from pth_exp.records.reader import Sweep
from pth_exp.staleness.schedule import sampler_version


def judge(tmp_path: Path, config: dict[str, Any], mutate: sweeps.Mutate | None = None, **design: Any) -> Verdict:
    mutations = {"run": mutate} if mutate else {}
    sweep = Sweep.load(sweeps.make(tmp_path / "sweep", {"run": config}, design, mutations))
    return batches.check(sweep.runs[0])


# Computed by hand from section 2 of the paper: sampler version of updates 0, 1, 2, ... for refresh interval N and replay age k.
VERSIONS = {
    (1, 0): [0, 1, 2, 3, 4, 5],
    (4, 0): [0, 0, 0, 0, 4, 4, 4, 4, 8, 8],
    (1, 3): [0, 0, 0, 0, 1, 2, 3],
    (4, 3): [0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 8],
    (96, 32): [0] * 128 + [96],
}


@pytest.mark.parametrize(("interval", "age"), VERSIONS)
def test_the_schedule_against_a_table_by_hand(interval: int, age: int) -> None:
    expected = VERSIONS[interval, age]
    assert [sampler_version(u, age, interval) for u in range(len(expected))] == expected


@pytest.mark.parametrize("lag", [{}, {"refresh_interval": 5}, {"replay_age": 3}, {"refresh_interval": 4, "replay_age": 3}])
def test_healthy_runs_pass(tmp_path: Path, lag: dict[str, int]) -> None:
    verdict = judge(tmp_path, sweeps.config("san", **lag))
    assert (verdict.outcome, verdict.number) == (Outcome.passed, "12 of 12")


def test_the_warm_up_queue_of_the_paper(tmp_path: Path) -> None:
    """Section 4.3: at replay age 32, 100 updates use 68 distinct batches, the first 33 of them batch 0."""
    verdict = judge(tmp_path, sweeps.config("tis_reinforce", queue="warmup", replay_age=32, updates=100))
    assert (verdict.outcome, verdict.number) == (Outcome.failed, "68 of 100")
    assert "33 updates (0-32) on batch 0" in verdict.reason
    assert verdict.values["ages"] == list(range(33))  # the ages are as designed all the while


def test_reuse_is_allowed_by_the_design_alone(tmp_path: Path) -> None:
    config = sweeps.config("tis_reinforce", queue="warmup", replay_age=3)
    verdict = judge(tmp_path, config, allow_reuse=True)
    assert (verdict.outcome, verdict.number) == (Outcome.passed, "9 of 12")


def test_a_batch_reused_behind_a_new_index_fails(tmp_path: Path) -> None:
    """The identity of a batch is its content, not the number that it was drawn under."""
    same = {4: "x" * 64, 9: "x" * 64}
    verdict = judge(
        tmp_path,
        sweeps.config("san"),
        lambda kind, row: row | {"batch_id": same.get(row["update"], row["batch_id"])} if kind == "batches" else row,
    )
    assert (verdict.outcome, verdict.number) == (Outcome.failed, "11 of 12")
    assert "2 updates (4, 9)" in verdict.reason


def aliased(kind: str, row: dict[str, Any]) -> dict[str, Any]:
    """The sampler's snapshot shares storage with the learner: the stamp stands still, the weights move."""
    return row | {"sampler/fingerprint": row["learner/fingerprint"]} if kind == "updates" else row


def test_an_aliased_snapshot_is_caught(tmp_path: Path) -> None:
    verdict = judge(tmp_path, sweeps.config("san", refresh_interval=6), aliased)
    assert verdict.outcome == Outcome.failed
    assert "Sampler version 0 stands for 6 different sets of weights" in verdict.reason


def test_a_snapshot_of_another_moment_is_caught(tmp_path: Path) -> None:
    def late(kind: str, row: dict[str, Any]) -> dict[str, Any]:
        return row | {"sampler/fingerprint": f"w{row['sampler/version'] + 1}"} if kind == "updates" else row

    verdict = judge(tmp_path, sweeps.config("san", refresh_interval=6), late)
    assert "does not hold the weights that the learner had at update 0" in verdict.reason


def test_a_refresh_that_did_not_take_place_is_caught(tmp_path: Path) -> None:
    def stuck(kind: str, row: dict[str, Any]) -> dict[str, Any]:
        return row | {"sampler/fingerprint": "w0", "learner/fingerprint": None} if kind == "updates" else row

    verdict = judge(tmp_path, sweeps.config("san", refresh_interval=6), stuck)
    assert "Sampler versions 0, 6 have the same weights" in verdict.reason


def test_a_learner_that_stands_still_is_no_fault_of_the_sampler(tmp_path: Path) -> None:
    def still(kind: str, row: dict[str, Any]) -> dict[str, Any]:
        return row | {"sampler/fingerprint": "w0", "learner/fingerprint": "w0"} if kind == "updates" else row

    assert judge(tmp_path, sweeps.config("san", refresh_interval=6), still).outcome == Outcome.passed


@pytest.mark.parametrize(
    ("column", "shift"),
    [("sampler/version", 1), ("data/age", 1)],
)
def test_an_age_off_the_schedule_fails(tmp_path: Path, column: str, shift: int) -> None:
    def off(kind: str, row: dict[str, Any]) -> dict[str, Any]:
        return row | {column: row[column] + shift} if kind == "updates" and row["update"] == 7 else row

    verdict = judge(tmp_path, sweeps.config("san", replay_age=3), off)
    assert verdict.outcome == Outcome.failed
    assert "at update 7" in verdict.reason and "give 3" in verdict.reason


def test_a_prefill_that_leaves_the_age_at_k_plus_one(tmp_path: Path) -> None:
    """A well-known slip: k + 1 prefilled batches and then one a round gives age k + 1 forever."""

    def slipped(kind: str, row: dict[str, Any]) -> dict[str, Any]:
        if kind != "updates":
            return row
        version = max(0, row["update"] - 4)
        changed = {"sampler/version": version, "data/age": row["update"] - version, "sampler/fingerprint": f"w{version}"}
        return row | changed

    assert "age off on 8/12" in judge(tmp_path, sweeps.config("san", replay_age=3), slipped).number


def test_validation_that_changes_the_sampler_is_caught(tmp_path: Path) -> None:
    verdict = judge(
        tmp_path,
        sweeps.config("san", refresh_interval=6),
        lambda kind, row: row | {"sampler/fingerprint_after": "w8"} if kind == "evals" and row["update"] == 8 else row,
    )
    assert (verdict.outcome, verdict.number) == (Outcome.failed, "validation changed q")


@pytest.mark.parametrize(
    ("kind", "column"), [("batches", "batch_id"), ("updates", "sampler/version"), ("updates", "sampler/fingerprint")]
)
def test_missing_values_are_not_measured(tmp_path: Path, kind: str, column: str) -> None:
    verdict = judge(
        tmp_path,
        sweeps.config("san"),
        lambda k, row: row | {column: None} if k == kind and row["update"] == 5 else row,
    )
    assert verdict.outcome == Outcome.not_measured
    assert f"{column} was not recorded at update 5" in verdict.reason


def test_missing_rows_are_not_measured(tmp_path: Path) -> None:
    verdict = judge(tmp_path, sweeps.config("san"), lambda kind, row: row if kind != "batches" else None)
    assert (verdict.outcome, verdict.number) == (Outcome.not_measured, "no batch IDs")


@pytest.mark.parametrize("column", ["sampler/fingerprint_before", "sampler/fingerprint_after"])
def test_a_validation_without_fingerprints_is_not_measured(tmp_path: Path, column: str) -> None:
    verdict = judge(tmp_path, sweeps.config("san"), lambda kind, row: row | {column: None} if kind == "evals" else row)
    assert verdict.outcome is Outcome.not_measured and "validation" in verdict.reason and "0, 4, 8, 12" in verdict.reason


def test_a_validation_that_left_no_row_is_not_measured(tmp_path: Path) -> None:
    config = sweeps.config("san", validation__every=5)
    verdict = judge(tmp_path, config, lambda kind, row: None if kind == "evals" and row["update"] == 5 else row)
    assert verdict.outcome is Outcome.not_measured and verdict.reason.endswith("at update 5.")


def test_without_validation_there_is_nothing_of_it_to_measure(tmp_path: Path) -> None:
    assert judge(tmp_path, sweeps.config("san", validation__every=None)).outcome is Outcome.passed


def test_overlap_of_distinct_batches_is_shown(tmp_path: Path) -> None:
    def overlapping(kind: str, row: dict[str, Any]) -> dict[str, Any]:
        names = {3: ["a", "b", "c", "d"], 8: ["x", "b", "c", "d"]}
        return row | {"prompt_ids": names.get(row["update"], row["prompt_ids"])} if kind == "batches" else row

    verdict = judge(tmp_path, sweeps.config("san"), overlapping)
    assert "distinct batches 3 and 8 share 3 of 4 prompts" in " ".join(verdict.details)
