"""Ratio, KL, effective sample size and coefficients on batches small enough to work out by hand."""

import dataclasses
from math import exp, log

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pth_exp.losses import TokenBatch, get_loss
from pth_exp.probes import probe_update
from pth_exp.probes.ess import effective_sample_share
from pth_exp.probes.ratio import QUANTILES, quantiles
from pth_exp.schema import OldPolicy

NAN = float("nan")
RECORDED = {
    "actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/ppo_kl", "ratio/exactly_one_share", "ratio/clipfrac_by_step",
    "ratio/old_sampler_max_abs", "ratio/old_policy_max_abs", "rollout_corr/kl", "rollout_corr/k3_kl", "rollout_corr/ess",
    "rollout_corr/rollout_rs_masked_fraction", "rollout_corr/rollout_rs_seq_masked_fraction",
    "rollout_corr/mean_abs_shift", "coef/mean_abs", "coef/max_abs", "coef/near_zero_share", "coef/sampler_response",
    "rollout_corr/rollout_is_ratio_fraction_high", "tokens/trained", *(f"coef/over_mean_abs/q{q:02d}" for q in QUANTILES),
    *(f"ratio/log_policy_over_sampler/q{q}" for q in ("00", "01", "05", "25", "50", "75", "95", "99", "100")),
}  # fmt: skip


def batch(log_ratios: list[list[float]], advantage: list[float], old: str = "recomputed") -> TokenBatch:
    """All surprisals 2; ``log_ratios`` are log pi_theta - log q. Rows are padded with NaN."""
    width = max(map(len, log_ratios)) + 1
    mask = torch.tensor([[t < len(r) for t in range(width)] for r in log_ratios])
    shift = torch.tensor([r + [NAN] * (width - len(r)) for r in log_ratios], dtype=torch.float64)
    logp = torch.full(mask.shape, -2.0, dtype=torch.float64).masked_fill(~mask, NAN)
    sampler = logp - shift
    return TokenBatch(
        logp.requires_grad_(), torch.tensor(advantage), mask, sampler, sampler if old == "sampler" else logp.detach()
    )


def probed(name: str, b: TokenBatch, old_policy: OldPolicy, steps: int = 1) -> dict[str, float]:
    loss = get_loss(name)
    return probe_update(loss, b, [loss(b)] * steps, old_policy)


def test_every_entry_of_the_row_is_there() -> None:
    assert set(probed("san", batch([[0.1]], [1.0]), OldPolicy.recomputed)) == RECORDED


def test_metrics_that_only_one_loss_has_are_extra() -> None:
    row = probed("m2po", batch([[0.1, -0.3]], [1.0], "sampler"), OldPolicy.sampler)
    assert row["rollout_corr/rollout_rs_masked_fraction"] == 0.5 and row["rollout_corr/rollout_rs_seq_masked_fraction"] is None
    assert row["extra/m2po/M2"] == pytest.approx(0.05) and row["extra/m2po/M2_after"] == pytest.approx(0.01)


def test_a_recomputed_old_policy_hides_the_lag_that_the_sampler_shows() -> None:
    """Detail 1 of the paper: clip fraction 0 and ratio 1 throughout, beside a KL of 0.85 nats and no response to q."""
    row = probed("grpo", batch([[-1.0, -2.5], [0.1]], [1.0, -1.0]), OldPolicy.recomputed)
    assert row["ratio/exactly_one_share"] == 1.0
    assert row["actor/pg_clipfrac"] == row["actor/pg_clipfrac_lower"] == row["actor/ppo_kl"] == 0.0
    assert row["ratio/clipfrac_by_step"] == [0.0]
    assert row["ratio/old_policy_max_abs"] == 0.0
    assert row["ratio/old_sampler_max_abs"] == pytest.approx(2.5)
    assert row["rollout_corr/kl"] == pytest.approx((1.0 + 2.5 - 0.1) / 3)
    assert row["rollout_corr/mean_abs_shift"] == pytest.approx((1.0 + 2.5 + 0.1) / 3)
    assert row["rollout_corr/k3_kl"] == pytest.approx((exp(-1) + 1 - 1 + exp(-2.5) + 2.5 - 1 + exp(0.1) - 0.1 - 1) / 3)
    weights = [exp(-1), exp(-2.5), exp(0.1)]
    assert row["rollout_corr/ess"] == pytest.approx(sum(weights) ** 2 / (3 * sum(w * w for w in weights)))
    assert row["coef/sampler_response"] == 0.0
    assert row["tokens/trained"] == 3


def test_the_ratio_against_the_sampler_responds_to_it() -> None:
    """pi/q is 1.1 and 0.5 with A = 1: coefficients 1.1/2 and 0.5/2. With q := pi both are 1/2."""
    row = probed("ppo_clip", batch([[log(1.1), log(0.5)]], [1.0], old="sampler"), OldPolicy.sampler)
    change = ((1 - 1.1) ** 2 + (1 - 0.5) ** 2) ** 0.5
    assert row["coef/sampler_response"] == pytest.approx(change / (1.1**2 + 0.5**2) ** 0.5)
    assert row["ratio/exactly_one_share"] == 0.0
    assert row["ratio/old_sampler_max_abs"] == 0.0
    assert row["ratio/old_policy_max_abs"] == pytest.approx(log(2))


def test_a_ratio_that_has_moved_is_still_no_correction_for_the_sampler() -> None:
    """A second step on the batch: r differs from 1 and the clip acts, and q still has no part in the coefficients."""
    b = batch([[-1.0, -2.5]], [1.0])
    moved = dataclasses.replace(b, logp=b.logp.detach() + torch.tensor([0.1, 0.5, 0.0]))
    row = probed("grpo", moved, OldPolicy.recomputed)
    assert row["actor/pg_clipfrac"] == 0.5
    assert row["ratio/exactly_one_share"] == 0.0
    assert row["coef/sampler_response"] == 0.0


def test_weights_respond_to_the_sampler_and_san_does_not() -> None:
    b = batch([[log(1.5), log(0.5)], [log(4.0)]], [1.0, -2.0])
    # coefficients A min(pi/q, 2) over 2 responses: 0.75, 0.25, -2; with q := pi: 0.5, 0.5, -1
    row = probed("tis_reinforce", b, OldPolicy.recomputed)
    assert row["coef/sampler_response"] == pytest.approx(((0.25**2 * 2 + 1) / (0.75**2 + 0.25**2 + 4)) ** 0.5)
    # weights 1.5, 0.5, min(4, 2) = 2 on -A / 3; with q := pi all 1
    tis = probed("tis_ppo", b, OldPolicy.recomputed)
    assert tis["coef/sampler_response"] == pytest.approx(((0.5**2 * 2 + 4) / (1.5**2 + 0.5**2 + 16)) ** 0.5)
    assert probed("san", b, OldPolicy.recomputed)["coef/sampler_response"] == 0.0


def test_a_weight_against_a_sampler_taken_for_the_old_policy_is_one_but_the_ratio_responds() -> None:
    """tis_ppo with old_policy=sampler: weight 1, so it answers to q exactly as ppo_clip does."""
    b = batch([[log(1.1), log(0.5)]], [1.0], old="sampler")
    rows = [probed(name, b, OldPolicy.sampler) for name in ("tis_ppo", "ppo_clip")]
    assert rows[0]["coef/sampler_response"] == rows[1]["coef/sampler_response"] > 0


@pytest.mark.parametrize("name", ["grpo", "ppo_clip", "tis_ppo", "tis_reinforce", "san"])
@pytest.mark.parametrize("old", list(OldPolicy))
def test_without_lag_all_is_quiet(name: str, old: OldPolicy) -> None:
    row = probed(name, batch([[0.0, 0.0], [0.0]], [1.0, -1.0], old=old.value), old)
    assert row["coef/sampler_response"] == 0.0
    assert row["rollout_corr/ess"] == pytest.approx(1.0)
    zero = ["rollout_corr/kl", "rollout_corr/k3_kl", "rollout_corr/mean_abs_shift", "ratio/old_sampler_max_abs"]
    assert [row[k] for k in (*zero, *(f"ratio/log_policy_over_sampler/q{q:02d}" for q in QUANTILES))] == [0.0] * 13


def test_clip_fraction_of_each_step_and_the_mean_over_steps() -> None:
    loss = get_loss("grpo")
    first = batch([[0.0, 0.0, 0.0, 0.0]], [1.0])
    moved = dataclasses.replace(first, logp=first.logp.detach() + torch.tensor([0.5, 0.5, 0.5, 0.0, 0.0]))
    row = probe_update(loss, first, [loss(first), loss(moved)], OldPolicy.recomputed)
    assert row["ratio/clipfrac_by_step"] == [0.0, 0.75]
    assert row["actor/pg_clipfrac"] == pytest.approx(0.375)
    assert row["actor/ppo_kl"] == pytest.approx(-1.5 / 4 / 2)
    assert row["ratio/exactly_one_share"] == 1.0  # of the first step


def test_distribution_of_the_signed_coefficients_over_their_mean_size() -> None:
    """0.75, 0.25 and -2 (see above), whose mean size is 1."""
    row = probed("tis_reinforce", batch([[log(1.5), log(0.5)], [log(4.0)]], [1.0, -2.0]), OldPolicy.recomputed)
    assert [row[f"coef/over_mean_abs/q{q}"] for q in ("00", "50", "75", "100")] == pytest.approx([-2.0, 0.25, 0.5, 0.75])
    double = probed("tis_reinforce", batch([[log(1.5), log(0.5)], [log(4.0)]], [2.0, -4.0]), OldPolicy.recomputed)
    assert double["coef/over_mean_abs/q00"] == pytest.approx(-2.0)
    none = probed("tis_reinforce", batch([[0.1], [0.2]], [0.0, 0.0]), OldPolicy.recomputed)
    assert [none[f"coef/over_mean_abs/q{q:02d}"] for q in QUANTILES] == [None] * 9


@pytest.mark.parametrize(("name", "parameters", "share"), [
    ("tis_reinforce", {}, 1 / 4), ("tis_ppo", {"cap": 1.2}, 3 / 4), ("san", {}, 1 / 4), ("tis_reinforce", {"cap": 5.0}, 0.0),
])  # fmt: skip
def test_share_of_tokens_beyond_the_arm_s_cap_or_2(name: str, parameters: dict[str, float], share: float) -> None:
    """pi/q is 1.5, 0.5, 1.9 and 4."""
    b = batch([[log(1.5), log(0.5), log(1.9)], [log(4.0)]], [1.0, -2.0])
    loss = get_loss(name, **parameters)
    row = probe_update(loss, b, [loss(b)], OldPolicy.recomputed)
    assert row["rollout_corr/rollout_is_ratio_fraction_high"] == pytest.approx(share)
    unknown = dataclasses.replace(b, sampler_logp=None)
    if name == "san":
        assert probed(name, unknown, OldPolicy.recomputed)["rollout_corr/rollout_is_ratio_fraction_high"] is None


def test_sizes_of_coefficients_and_the_share_near_zero() -> None:
    """A min(pi/q, 2) over three responses: 2/3, 1/3 and 0.004/3; the third response has no advantage."""
    row = probed("tis_reinforce", batch([[log(2), 0.0, log(0.004)], [1.0], [0.0]], [1.0, 0.0, 0.0]), OldPolicy.recomputed)
    assert row["coef/mean_abs"] == pytest.approx((2 + 1 + 0.004) / 3 / 5)
    assert row["coef/max_abs"] == pytest.approx(2 / 3)
    assert row["coef/near_zero_share"] == pytest.approx(1 / 3)


def test_what_cannot_be_measured_is_none_and_never_zero() -> None:
    b = batch([[0.3, -0.1]], [1.0])
    unrecorded = probed("san", dataclasses.replace(b, sampler_logp=None, old_logp=None), OldPolicy.recomputed)
    measured = {k for k, v in unrecorded.items() if v is not None}
    shape = {f"coef/over_mean_abs/q{q:02d}" for q in QUANTILES}
    assert measured == {"coef/mean_abs", "coef/max_abs", "coef/near_zero_share", "tokens/trained"} | shape
    quiet = probed("tis_reinforce", batch([[0.3]], [0.0]), OldPolicy.recomputed)
    assert quiet["coef/sampler_response"] is None
    assert quiet["coef/near_zero_share"] is None
    assert quiet["coef/max_abs"] == 0.0


def test_an_empty_batch_measures_nothing() -> None:
    empty = TokenBatch(
        torch.zeros(2, 3), torch.ones(2), torch.zeros(2, 3, dtype=torch.bool), torch.zeros(2, 3), torch.zeros(2, 3)
    )
    row = probed("tis_ppo", empty, OldPolicy.recomputed)
    assert {k for k, v in row.items() if v is not None} <= {
        "tokens/trained", "actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/ppo_kl", "ratio/clipfrac_by_step",
    }  # fmt: skip
    assert row["tokens/trained"] == 0


def test_a_lag_of_50_nats_stays_finite() -> None:
    row = probed("tis_ppo", batch([[50.0, -50.0]], [1.0]), OldPolicy.recomputed)
    assert row["rollout_corr/kl"] == 0.0
    assert row["rollout_corr/k3_kl"] == pytest.approx((exp(20) - 20 - 1 + exp(-20) + 20 - 1) / 2)
    assert row["rollout_corr/ess"] == pytest.approx(0.5)
    assert row["ratio/log_policy_over_sampler/q100"] == 50.0


def test_the_probe_leaves_the_gradient_of_the_batch_alone() -> None:
    b = batch([[0.3, -0.1]], [1.0])
    loss = get_loss("tis_ppo")
    out = loss(b)
    probe_update(loss, b, [out], OldPolicy.recomputed)
    assert b.logp.grad is None
    out.loss.backward()  # type: ignore[no-untyped-call]
    assert b.logp.grad is not None
    assert torch.equal(b.logp.grad, -out.token_coef)


@settings(deadline=None)
@given(st.lists(st.floats(-30, 30), min_size=1, max_size=30))
def test_quantiles_are_numpys(values: list[float]) -> None:
    got = quantiles(torch.tensor(values, dtype=torch.float64))
    np.testing.assert_allclose(got, np.quantile(values, np.array(QUANTILES) / 100), rtol=1e-9, atol=1e-9)


@given(st.integers(1, 20), st.floats(-5, 5))
def test_effective_sample_share_counts_the_tokens_that_weigh(n: int, level: float) -> None:
    """Equal weights: 1, at any level. One token heavier than all others by 20 nats: about 1/n."""
    assert effective_sample_share(torch.full((n,), level, dtype=torch.float64)) == pytest.approx(1.0)
    one = torch.full((n,), -15.0, dtype=torch.float64)
    one[0] = 5.0
    assert effective_sample_share(one) == pytest.approx(1 / n, rel=1e-6)
