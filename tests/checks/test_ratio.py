"""Check 1 on records made by the writer: what must fail, what must not, and what was not measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sweeps

from pth_exp.checks import ratio
from pth_exp.checks.result import Outcome, Verdict
from pth_exp.records.reader import Sweep


def judge(tmp_path: Path, config: dict[str, Any], mutate: sweeps.Mutate | None = None, updates: int | None = None) -> Verdict:
    mutations = {"run": mutate} if mutate else {}
    cut = {"run": updates} if updates is not None else {}
    sweep = Sweep.load(sweeps.make(tmp_path / "sweep", {"run": config}, mutate=mutations, updates=cut))
    return ratio.check(sweep.runs[0])


def setting(column: str, value: Any, on: Callable[[int], bool] = lambda update: True) -> sweeps.Mutate:
    """Replaces one column of ``updates``."""
    return lambda kind, row: row | {column: value} if kind == "updates" and on(row["update"]) else row


@pytest.mark.parametrize("arm", sorted(sweeps.CORRECTION))
def test_at_age_zero_all_is_quiet(tmp_path: Path, arm: str) -> None:
    verdict = judge(tmp_path, sweeps.config(arm))
    assert verdict.outcome == Outcome.passed
    assert "age 0" in verdict.number


@pytest.mark.parametrize("lag", [{"refresh_interval": 6}, {"replay_age": 3}, {"refresh_interval": 4, "replay_age": 2}])
@pytest.mark.parametrize(
    ("arm", "outcome"),
    [
        ("grpo", "warn"),
        ("ppo_clip", "pass"),
        ("tis_ppo", "pass"),
        ("tis_reinforce", "pass"),
        ("san", "pass"),
        ("mis_geo", "pass"),
    ],
)
def test_healthy_arms_under_lag(tmp_path: Path, arm: str, outcome: str, lag: dict[str, int]) -> None:
    assert judge(tmp_path, sweeps.config(arm, **lag)).outcome == outcome


def test_the_uncorrected_arm_shows_the_papers_signature(tmp_path: Path) -> None:
    verdict = judge(tmp_path, sweeps.config("grpo", refresh_interval=96, updates=100))
    text = " ".join((verdict.reason, *verdict.details))
    assert "No correction for the sampler's lag (uncorrected)" in text
    assert "Clip fraction exactly 0 on 100 of 100 updates" in text
    # shift(lag) = .002 lag^1.5 and the KL is half of it: .001 at update 1; .001 * 95^1.5 = .926 at update 95
    assert "grows from 0.001 (update 1) to 0.926 nats (update 95), ×926" in text
    assert "Ratio identically 1 on 100 of 100 updates" in text
    assert verdict.number == "0 on 100/100"


def test_two_steps_a_batch_move_the_clip_and_correct_nothing(tmp_path: Path) -> None:
    def two_steps(kind: str, row: dict[str, Any]) -> dict[str, Any]:
        return row | {"actor/pg_clipfrac": 0.02, "ratio/clipfrac_by_step": [0.0, 0.04]} if kind == "updates" else row

    verdict = judge(tmp_path, sweeps.config("grpo", refresh_interval=6, optimizer__steps_per_batch=2), two_steps)
    assert verdict.outcome == Outcome.warned
    text = " ".join((verdict.reason, *verdict.details))
    assert "No correction for the sampler's lag" in text
    assert "Clip fraction exactly 0 on 0 of 12 updates, up to 0.02" in text
    assert "of 2 steps a batch the first has clip fraction 0 on 12 of 12, later ones up to 0.04" in text


def test_a_ratio_against_the_learner_fails(tmp_path: Path) -> None:
    """The paper's fault: the arm claims a ratio to the sampler, and takes it to its own recomputed probabilities."""
    config = sweeps.config("ppo_clip", refresh_interval=6, arm__old_policy="recomputed")

    def against_learner(kind: str, row: dict[str, Any]) -> dict[str, Any]:
        return row | {"coef/sampler_response": 0.0, "actor/pg_clipfrac": 0.0} if kind == "updates" else row

    verdict = judge(tmp_path, config, against_learner)
    assert verdict.outcome == Outcome.failed
    assert verdict.number == "0 on 10/10"  # ages 0..5 twice: 12 updates, 2 of them at age 0
    assert "No correction for the sampler" in verdict.reason


def test_a_weight_missing_on_some_updates_fails(tmp_path: Path) -> None:
    """verl skips importance weights silently where the sampler's log-probabilities are absent."""
    verdict = judge(
        tmp_path, sweeps.config("tis_ppo", refresh_interval=6), setting("coef/sampler_response", 0.0, lambda u: u == 4)
    )
    assert (verdict.outcome, verdict.number) == (Outcome.failed, "0 on 1/10")


@pytest.mark.parametrize("arm", ["grpo", "san"])
def test_an_arm_that_claims_not_to_read_q_and_does(tmp_path: Path, arm: str) -> None:
    verdict = judge(tmp_path, sweeps.config(arm, refresh_interval=6), setting("coef/sampler_response", 1e-9, lambda u: u == 3))
    assert verdict.outcome == Outcome.failed
    assert "update 3" in verdict.reason


REJECTED = "rollout_corr/rollout_rs_masked_fraction"


def several(age: int, **columns: Any) -> sweeps.Mutate:
    """Replaces columns of updates of at least this age; ``__`` stands for the slash."""
    values = {name.replace("__", "/"): value for name, value in columns.items()}
    return lambda kind, row: row | values if kind == "updates" and row["data/age"] >= age else row


def test_rejection_says_what_it_rejected(tmp_path: Path) -> None:
    """Ages 0 to 5 twice: 10 lagged updates. 2e-3 lag^1.5 of the tokens are rejected: .002 at lag 1, .0224 at lag 5."""
    verdict = judge(tmp_path, sweeps.config("mis_geo", refresh_interval=6))
    assert (verdict.outcome, verdict.number) == (Outcome.passed, "rejects on 10/10")
    assert "share of tokens rejected 0.002 to 0.0224" in verdict.reason


def test_a_response_without_a_rejection_fails(tmp_path: Path) -> None:
    """An arm that claims only to reject, and weights by q as well."""
    verdict = judge(tmp_path, sweeps.config("mis_geo", refresh_interval=6), setting(REJECTED, 0.0, lambda u: u == 4))
    assert (verdict.outcome, verdict.number) == (Outcome.failed, "0.0144 on 1/12")  # .9 * .002 * 4^1.5
    assert "update 4, where nothing was rejected" in verdict.reason


def test_a_rejection_that_never_responds_fails(tmp_path: Path) -> None:
    """What is rejected is not decided by the sampler."""
    verdict = judge(tmp_path, sweeps.config("mis_geo", refresh_interval=6), setting("coef/sampler_response", 0.0))
    assert (verdict.outcome, verdict.number) == (Outcome.failed, "0 on 10/10")
    assert "what it rejects does not depend on the sampler" in verdict.reason


def test_rejected_tokens_of_no_advantage_need_not_respond(tmp_path: Path) -> None:
    verdict = judge(
        tmp_path, sweeps.config("mis_geo", refresh_interval=6), setting("coef/sampler_response", 0.0, lambda u: u == 4)
    )
    assert verdict.outcome == Outcome.passed


def test_an_arm_that_never_rejects_is_uncorrected(tmp_path: Path) -> None:
    config = sweeps.config("mis_geo", refresh_interval=6)
    verdict = judge(tmp_path, config, several(1, rollout_corr__rollout_rs_masked_fraction=0.0, coef__sampler_response=0.0))
    assert (verdict.outcome, verdict.number) == (Outcome.warned, "0 of 10")
    assert "Nothing was rejected" in verdict.reason


@pytest.mark.parametrize(
    ("age", "outcome", "number"), [(1, "warn", "all on 10/10"), (3, "warn", "all on 6/10"), (4, "pass", "rejects on 6/10")]
)
def test_an_arm_that_rejects_everything_is_warned_of(tmp_path: Path, age: int, outcome: str, number: str) -> None:
    """Bounds made for rounding, and a sampler that lags: from some age on nothing is left to train on."""
    gone = several(age, rollout_corr__rollout_rs_masked_fraction=1.0, coef__sampler_response=None, coef__max_abs=0.0)
    verdict = judge(tmp_path, sweeps.config("mis_geo", refresh_interval=6), gone)
    assert (verdict.outcome, verdict.number) == (outcome, number)


def test_rejection_without_its_share_is_not_measured(tmp_path: Path) -> None:
    verdict = judge(tmp_path, sweeps.config("mis_geo", refresh_interval=6), setting(REJECTED, None, lambda u: u == 5))
    assert verdict.outcome == Outcome.not_measured and REJECTED in verdict.reason


def test_old_policy_is_measured(tmp_path: Path) -> None:
    config = sweeps.config("ppo_clip", refresh_interval=6)
    verdict = judge(tmp_path / "a", config, setting("ratio/old_sampler_max_abs", 0.3, lambda u: u == 5))
    assert verdict.outcome == Outcome.failed
    assert "arm.old_policy=sampler, but old_logp is not what the sampler recorded" in verdict.reason
    config = sweeps.config("grpo", refresh_interval=6)
    verdict = judge(tmp_path / "b", config, setting("ratio/old_sampler_max_abs", 0.0, lambda u: u == 5))
    assert verdict.outcome == Outcome.failed
    assert "arm.old_policy=recomputed, but old_logp is what the sampler recorded" in verdict.reason


def test_a_q_that_is_not_the_policys_fails(tmp_path: Path) -> None:
    """A leaked top_p or temperature: with equal weights log q is off by far more than rounding."""
    verdict = judge(tmp_path, sweeps.config("san"), setting("rollout_corr/mean_abs_shift", 0.04))
    assert verdict.outcome == Outcome.failed
    assert "the recorded q is not the probability under the policy" in verdict.reason


def test_q_not_recorded_is_not_measured(tmp_path: Path) -> None:
    verdict = judge(tmp_path, sweeps.config("grpo", refresh_interval=6, stack__record_sampler_logp=False))
    assert verdict.outcome == Outcome.not_measured
    assert "stack.record_sampler_logp=false" in verdict.reason


@pytest.mark.parametrize("arm", ["grpo", "tis_ppo", "san"])
@pytest.mark.parametrize("column", ["coef/sampler_response", "rollout_corr/mean_abs_shift", "sampler/version"])
@pytest.mark.parametrize("missing", [lambda u: u == 5, lambda u: True])
def test_missing_values_are_not_measured(tmp_path: Path, arm: str, column: str, missing: Callable[[int], bool]) -> None:
    verdict = judge(tmp_path, sweeps.config(arm, refresh_interval=6), setting(column, None, missing))
    assert verdict.outcome == Outcome.not_measured


@pytest.mark.parametrize("arm", sorted(sweeps.CORRECTION))
def test_a_run_under_way_is_not_measured(tmp_path: Path, arm: str) -> None:
    verdict = judge(tmp_path, sweeps.config(arm, refresh_interval=6), updates=9)
    assert verdict.outcome == Outcome.not_measured
    assert "9 of 12 updates are recorded" in verdict.reason


def test_a_fault_shows_while_the_run_is_under_way(tmp_path: Path) -> None:
    config = sweeps.config("tis_ppo", refresh_interval=6)
    assert judge(tmp_path, config, setting("coef/sampler_response", 0.0), updates=4).outcome == Outcome.failed


def test_a_row_missing_in_the_middle_is_not_measured(tmp_path: Path) -> None:
    verdict = judge(tmp_path, sweeps.config("san", refresh_interval=6), lambda kind, row: row if row["update"] != 7 else None)
    assert verdict.outcome == Outcome.not_measured


@pytest.mark.parametrize("arm", ["tis_ppo", "ppo_clip", "san"])
def test_a_lag_that_drowns_in_noise_is_not_measured(tmp_path: Path, arm: str) -> None:
    """Sampler and learner in different types: at age 0 the shift is as large as it ever gets."""
    config = sweeps.config(arm, refresh_interval=6, model__dtype="bfloat16")
    verdict = judge(tmp_path, config, setting("rollout_corr/mean_abs_shift", 0.03))
    assert verdict.outcome == Outcome.not_measured
    assert "drown" in verdict.reason


def test_equal_rewards_leave_nothing_to_respond(tmp_path: Path) -> None:
    """Where all coefficients are 0 a relative change is not defined; that is no missing measurement."""

    def all_equal(kind: str, row: dict[str, Any]) -> dict[str, Any]:
        flat = kind == "updates" and row["update"] in (2, 3)
        return row | {"coef/max_abs": 0.0, "coef/sampler_response": None} if flat else row

    verdict = judge(tmp_path, sweeps.config("tis_ppo", refresh_interval=6), all_equal)
    assert (verdict.outcome, verdict.values["judged"]) == (Outcome.passed, 8)


def test_where_nothing_can_respond_the_reason_is_said(tmp_path: Path) -> None:
    verdict = judge(tmp_path, sweeps.config("tis_ppo", refresh_interval=6), setting("coef/max_abs", 0.0))
    assert verdict.outcome is Outcome.not_measured and "All coefficients are 0 on every update" in verdict.reason


def test_equal_rewards_at_age_zero_raise_no_alarm(tmp_path: Path) -> None:
    """The shift was measured and is rounding: there was nothing to correct, whatever the coefficients could have shown."""

    def all_equal(kind: str, row: dict[str, Any]) -> dict[str, Any]:
        return row | {"coef/max_abs": 0.0, "coef/sampler_response": None} if kind == "updates" else row

    assert judge(tmp_path / "equal", sweeps.config("tis_ppo"), all_equal).outcome is Outcome.passed
    unmeasured = setting("rollout_corr/mean_abs_shift", None, on=lambda update: update == 3)
    assert judge(tmp_path / "unmeasured", sweeps.config("tis_ppo"), unmeasured).outcome is Outcome.not_measured


def test_the_noise_floor_is_measured_and_shown(tmp_path: Path) -> None:
    """Three times the largest shift at age 0, which is 2e-6 in these records; updates 0 and 6 have age 0."""
    verdict = judge(tmp_path, sweeps.config("tis_ppo", refresh_interval=6))
    assert verdict.values["noise_floor"] == pytest.approx(6e-6)
    assert "3 times the largest mean |log q − log π_θ| at age 0 (updates measured: 2)" in verdict.details[-1]
