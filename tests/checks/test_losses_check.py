"""Check 4 on records made by the writer: what must fail and how it is named, what must not, and what was not measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import sweeps

from pth_exp.checks import losses
from pth_exp.checks.result import Outcome, Verdict
from pth_exp.records.reader import Sweep


def judge(tmp_path: Path, mutate: sweeps.Mutate | None = None, updates: int | None = None, **fields: Any) -> Verdict:
    mutations = {"run": mutate} if mutate else {}
    cut = {"run": updates} if updates is not None else {}
    sweep = sweeps.make(tmp_path / "sweep", {"run": sweeps.config("tis_reinforce", **fields)}, mutate=mutations, updates=cut)
    return losses.check(Sweep.load(sweep).runs[0])


def off(prefix: str, update: int = 0, **columns: Any) -> sweeps.Mutate:
    """Replaces columns of one measurement; of ``backward`` those of one update."""
    kind = "updates" if prefix == "backward" else "equations"
    named = {f"{prefix}/{name}": value for name, value in columns.items()}
    return lambda written, row: {**row, **named} if written == kind and row["update"] == update else row


@pytest.mark.parametrize("arm", sorted(sweeps.CORRECTION))
def test_a_healthy_arm_passes(tmp_path: Path, arm: str) -> None:
    sweep = sweeps.make(tmp_path / "sweep", {"run": sweeps.config(arm)})
    verdict = losses.check(Sweep.load(sweep).runs[0])
    assert (verdict.outcome, verdict.number) == (Outcome.passed, "2.0e-15, backward 2.0e-7")
    assert "20 inputs, 205 responses" in verdict.details[0]
    assert "at update 0-2, 4, 8" in verdict.details[1]


def alike(error: float, cosine: float, ratio: Sequence[float], whole: float | None = None) -> dict[str, Any]:
    columns = sweeps.difference("x", error, cosine, ratio) | {"x/cosine": cosine if whole is None else whole}
    return {name.removeprefix("x/"): value for name, value in columns.items()}


KINDS = [
    (alike(0.5, 1.0, (0.5, 0.5)), "It is a scale (cosine 1): every gradient is 0.5 times the written one"),
    (alike(2.0, -1.0, (1.0, 1.0)), "It is a sign (cosine -1): every gradient is -1 times the written one"),
    (alike(0.43, 1.0, (0.57, 1.0), 0.999), "a scale of each response's own"),
    (alike(0.43, 1.0, (0.57, 1.0), 0.999), "0.57 to 1 times the written one, which turns the batch's (cosine down to 0.999"),
    (alike(0.3, 0.95, (0.9, 1.1)), "It is a direction: within a response the cosine falls to 0.95"),
    (alike(2e-4, 1 - 2e-8, (1.0, 1.0)), "It is a direction"),  # angle 2e-4: all of the error
    (alike(2e-4, 1.0, (1.0002, 1.0002)), "It is a scale (cosine 1): every gradient is 1 times"),
    (alike(float("inf"), 0.9, (0.5, 0.5)), "a gradient where the other has none, or one that is no number"),
    (alike(float("nan"), float("nan"), (0.5, 0.5)), "or one that is no number"),
    ({"value_error": 0.1}, "The gradients agree, and the relative error of the value is 0.1"),
]


@pytest.mark.parametrize(("columns", "said"), KINDS)
@pytest.mark.parametrize("prefix", ["float64", "backward"])
def test_a_difference_fails_and_is_named(tmp_path: Path, prefix: str, columns: dict[str, Any], said: str) -> None:
    verdict = judge(tmp_path, off(prefix, **columns))
    assert verdict.outcome is Outcome.failed
    assert said in verdict.reason
    if "gradient_error" in columns:
        assert "on response 3 (5 tokens) of the input 'policies apart'" in verdict.reason
    where = "At update 0 the backward pass" if prefix == "backward" else "The loss tis_reinforce is not the equation of arm"
    assert where in verdict.reason


def test_the_number_shows_both(tmp_path: Path) -> None:
    assert judge(tmp_path, off("float64", gradient_error=0.4321)).number == "0.43, backward 2.0e-7"


@pytest.mark.parametrize(("prefix", "tolerance"), [("float64", 1e-5), ("backward", 1e-4)])
def test_the_tolerance(tmp_path: Path, prefix: str, tolerance: float) -> None:
    assert judge(tmp_path / "in", off(prefix, gradient_error=0.9 * tolerance)).outcome is Outcome.passed
    assert judge(tmp_path / "out", off(prefix, gradient_error=1.1 * tolerance)).outcome is Outcome.failed


def test_a_later_backward_pass_counts_too(tmp_path: Path) -> None:
    verdict = judge(tmp_path, off("backward", update=4, gradient_error=0.2))
    assert verdict.outcome is Outcome.failed and "At update 4" in verdict.reason


def test_a_loss_imprecise_in_float32_alone_is_a_warning(tmp_path: Path) -> None:
    verdict = judge(tmp_path, off("float32", gradient_error=1e-3))
    assert verdict.outcome is Outcome.warned and "not in float32" in verdict.reason


def test_a_fault_shows_while_the_run_is_under_way(tmp_path: Path) -> None:
    assert judge(tmp_path, off("float64", gradient_error=0.2), updates=0).outcome is Outcome.failed


NOT_MEASURED: list[tuple[sweeps.Mutate | None, dict[str, Any], str]] = [
    (None, {"arm__equation": None}, "arm.equation is null"),
    (lambda kind, row: None if kind == "equations" else row, {}, "no attempt recorded it"),
    (
        lambda kind, row: {"update": 0, "not_measured": "line 1: nonsense"} if kind == "equations" else row,
        {},
        "line 1: nonsense",
    ),
    (off("equation", sha256="0" * 64), {}, "is not the frozen arm.equation"),
    (
        lambda kind, row: {k: v for k, v in row.items() if not k.startswith("backward/")} if kind == "updates" else row,
        {},
        "The backward pass of update 0 was not held against the equation",
    ),
    (
        lambda kind, row: (
            {**row, "backward/gradient_error": None, "backward/not_measured": "no ref_logp"} if kind == "updates" else row
        ),
        {},
        "no ref_logp",
    ),
    (off("float64", gradient_error=None), {}, "computed in float64 was not held against its equation"),
    (off("float32", gradient_error=None), {}, "computed in float32 was not held against its equation"),
    (lambda kind, row: {**row, "responses": 0} if kind == "equations" else row, {}, "no error of it is recorded"),
    (off("equation", sha256=None), {}, "is not the frozen arm.equation"),
    (
        lambda kind, row: {**row, "coef/max_abs": 0.0} if kind == "updates" else row,
        {},
        "The loss had no gradient in the backward pass of update 0-2, 4, 8",
    ),
    (lambda kind, row: first_backward_alone(kind, row), {}, "at update 0 alone, where the penalty has no gradient yet"),
]


def first_backward_alone(kind: str, row: dict[str, Any]) -> dict[str, Any]:
    later = kind == "updates" and row["update"] > 0
    return {k: v for k, v in row.items() if not (later and k.startswith("backward/"))}


@pytest.mark.parametrize(("mutate", "fields", "said"), NOT_MEASURED)
def test_what_was_not_measured_is_no_pass(
    tmp_path: Path, mutate: sweeps.Mutate | None, fields: dict[str, Any], said: str
) -> None:
    verdict = judge(tmp_path, mutate, **fields)
    assert verdict.outcome is Outcome.not_measured
    assert said in verdict.reason


def test_a_run_killed_before_its_first_update_is_not_measured(tmp_path: Path) -> None:
    verdict = judge(tmp_path, updates=0)
    assert verdict.outcome is Outcome.not_measured
    assert "update 0" in verdict.reason and verdict.number == "not held against it"


def test_half_a_measurement_is_no_pass(tmp_path: Path) -> None:
    assert judge(tmp_path, off("float64", value_error=None)).outcome is Outcome.failed


def test_the_first_backward_pass_is_enough_where_there_is_no_penalty_or_no_other_update(tmp_path: Path) -> None:
    assert judge(tmp_path / "a", first_backward_alone, kl__coef=0.0).outcome is Outcome.passed
    assert judge(tmp_path / "b", first_backward_alone, updates=1).outcome is Outcome.passed


def test_a_gradient_in_one_of_the_measured_updates_is_enough(tmp_path: Path) -> None:
    """All rewards of a first batch may be equal."""

    def nothing_at_first(kind: str, row: dict[str, Any]) -> dict[str, Any]:
        return {**row, "coef/max_abs": 0.0} if kind == "updates" and row["update"] == 0 else row

    assert judge(tmp_path, nothing_at_first).outcome is Outcome.passed


def test_a_later_backward_pass_does_not_stand_for_the_first(tmp_path: Path) -> None:
    def without_the_first(kind: str, row: dict[str, Any]) -> dict[str, Any]:
        first = kind == "updates" and row["update"] == 0
        return {key: value for key, value in row.items() if not (first and key.startswith("backward/"))}

    verdict = judge(tmp_path, without_the_first)
    assert verdict.outcome is Outcome.not_measured and "update 0" in verdict.reason
