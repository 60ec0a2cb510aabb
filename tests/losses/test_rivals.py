"""The rivals on examples small enough to work out by hand; the arithmetic stands in the comments."""

from __future__ import annotations

import dataclasses
from math import exp, log, sqrt
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_golden_losses import F64, NAN, ppo_batch, tensor

from pth_exp.losses import TokenBatch, Totals, get_loss
from pth_exp.losses.ratio import geometric_log_ratio, product_log_ratio

MASKED = "rollout_corr/rollout_rs_masked_fraction"
MASKED_RESPONSES = "rollout_corr/rollout_rs_seq_masked_fraction"

# ppo_batch: A = 2 with r 1.1, 1.5; A = -1 with 0.5; A = -1 with 4. pi_old/q is 0.5, 3; 1; 0.25.
# Its PPO terms are -2.2, -2.4 (clipped); 0.8 (clipped); 4, or 3 under the dual clip. Only the first has a gradient, 2.2; and
# without the dual clip the last, -4.


def value(name: str, **parameters: Any) -> float:
    return get_loss(name, **parameters)(ppo_batch()).loss.item()


def coef(name: str, **parameters: Any) -> torch.Tensor:
    return get_loss(name, **parameters)(ppo_batch()).token_coef


def test_tis_seq_weights_a_response_by_its_product() -> None:
    # products 0.5 x 3 = 1.5; 1; 0.25
    assert value("tis_seq") == pytest.approx((-2.2 * 1.5 - 2.4 * 1.5 + 0.8 + 3 * 0.25) / 4)
    torch.testing.assert_close(coef("tis_seq"), tensor([[2.2 * 1.5 / 4, 0.0], [0.0, 0.0], [0.0, 0.0]]))
    assert value("tis_seq", cap=1.2) == pytest.approx((-2.2 * 1.2 - 2.4 * 1.2 + 0.8 + 3 * 0.25) / 4)
    assert value("tis_seq", aggregation="seq_mean_token_sum") == pytest.approx((-4.6 * 1.5 + 0.8 + 3 * 0.25) / 3)


def test_decoupled_ppo_truncates_nothing_unless_told() -> None:
    # weights 0.5, 3; 1; 0.25, and no dual clip
    assert value("decoupled_ppo") == pytest.approx((-2.2 * 0.5 - 2.4 * 3 + 0.8 + 4 * 0.25) / 4)
    torch.testing.assert_close(coef("decoupled_ppo"), tensor([[2.2 * 0.5 / 4, 0.0], [0.0, 0.0], [-4 * 0.25 / 4, 0.0]]))
    assert value("decoupled_ppo", cap=2.0) == pytest.approx(value("tis_ppo", dual_clip=None))


@pytest.mark.parametrize(
    ("parameters", "expected", "first_coef"),
    [
        # 3 exceeds 2: weights 0.5, rejected; 1; 0.25
        ({}, (-1.1 + 0.8 + 0.75) / 4, 1.1 / 4),
        ({"count_rejected": False}, (-1.1 + 0.8 + 0.75) / 3, 1.1 / 3),
        ({"weighted": False}, (-2.2 + 0.8 + 3) / 4, 2.2 / 4),
        ({"weighted": False, "count_rejected": False}, (-2.2 + 0.8 + 3) / 3, 2.2 / 3),
        ({"aggregation": "seq_mean_token_mean"}, (-1.1 / 2 + 0.8 + 0.75) / 3, 1.1 / 6),
        ({"aggregation": "seq_mean_token_mean", "count_rejected": False}, (-1.1 + 0.8 + 0.75) / 3, 1.1 / 3),
        ({"aggregation": "seq_mean_token_sum"}, (-1.1 + 0.8 + 0.75) / 3, 1.1 / 3),
        ({"aggregation": "seq_mean_token_sum_norm", "norm_tokens": 10}, (-1.1 + 0.8 + 0.75) / 30, 1.1 / 30),
        ({"upper": None}, (-1.1 - 2.4 * 3 + 0.8 + 0.75) / 4, 1.1 / 4),
        ({"upper": 3.0 + 1e-9}, (-1.1 - 2.4 * 3 + 0.8 + 0.75) / 4, 1.1 / 4),
    ],
)
def test_mis_rejects_tokens_above_its_bound(parameters: dict[str, Any], expected: float, first_coef: float) -> None:
    assert value("mis", **parameters) == pytest.approx(expected)
    torch.testing.assert_close(coef("mis", **parameters), tensor([[first_coef, 0.0], [0.0, 0.0], [0.0, 0.0]]))


def test_rejected_tokens_and_responses_are_counted_in_the_metrics() -> None:
    metrics = get_loss("mis")(ppo_batch()).metrics
    assert (metrics[MASKED], metrics[MASKED_RESPONSES]) == (pytest.approx(1 / 4), pytest.approx(1 / 3))
    metrics = get_loss("mis_geo")(ppo_batch()).metrics  # geometric means 1.22, 1, 0.25: the first and the last go
    assert (metrics[MASKED], metrics[MASKED_RESPONSES]) == (pytest.approx(3 / 4), pytest.approx(2 / 3))


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        # 0.5 and 3 lie within [0.5, 5], 0.25 does not: the last response loses its only token
        ({}, ((-1.1 - 7.2) / 2 + 0.8 + 0) / 3),
        ({"count_rejected": False}, ((-1.1 - 7.2) / 2 + 0.8) / 2),  # and is no response any more
        ({"lower": 0.0}, ((-1.1 - 7.2) / 2 + 0.8 + 4 * 0.25) / 3),
        ({"lower": 0.6}, ((0 - 7.2) / 2 + 0.8) / 3),
        ({"upper": 2.0, "lower": 0.6, "count_rejected": False}, 0.8),
    ],
)
def test_icepop_rejects_on_both_sides(parameters: dict[str, Any], expected: float) -> None:
    assert value("icepop", **parameters) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({}, (-2.2 * 1.5 - 2.4 * 1.5 + 0.8 + 0.75) / 4),  # products 1.5, 1, 0.25 are all within 2
        ({"upper": 1.4}, (0.8 + 0.75) / 4),
        ({"upper": 1.4, "count_rejected": False}, (0.8 + 0.75) / 2),
        ({"upper": 1.4, "count_rejected": False, "aggregation": "seq_mean_token_sum"}, (0.8 + 0.75) / 2),
        ({"lower": 0.5}, (-2.2 * 1.5 - 2.4 * 1.5 + 0.8) / 4),
    ],
)
def test_mis_seq_rejects_responses(parameters: dict[str, Any], expected: float) -> None:
    assert value("mis_seq", **parameters) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        # geometric means sqrt(1.5) = 1.2247, 1, 0.25: the second response alone is kept
        ({}, 0.8),
        ({"count_rejected": True}, 0.8 / 4),
        ({"upper": 1.23}, (-2.2 - 2.4 + 0.8) / 3),
        ({"upper": 1.23, "weighted": True}, (-4.6 * sqrt(1.5) + 0.8) / 3),
        ({"upper": 1.23, "lower": 0.2}, (-2.2 - 2.4 + 0.8 + 3) / 4),
    ],
)
def test_mis_geo_rejects_by_the_mean_log_ratio(parameters: dict[str, Any], expected: float) -> None:
    assert value("mis_geo", **parameters) == pytest.approx(expected)


@pytest.mark.parametrize("count_rejected", [True, False])
@pytest.mark.parametrize("name", ["mis", "mis_seq", "mis_geo", "icepop"])
def test_where_everything_is_rejected_the_loss_is_zero(name: str, count_rejected: bool) -> None:
    batch = ppo_batch()
    assert batch.old_logp is not None
    far = dataclasses.replace(batch, sampler_logp=batch.old_logp - 3)  # every ratio e^3 = 20
    out = get_loss(name, count_rejected=count_rejected)(far)
    assert out.loss.item() == 0.0
    assert torch.equal(out.token_coef, torch.zeros(3, 2, dtype=F64))
    assert (out.metrics[MASKED], out.metrics[MASKED_RESPONSES]) == (1.0, 1.0)


def test_counts_of_what_is_kept_need_the_whole_batch() -> None:
    part = dataclasses.replace(ppo_batch(), totals=Totals(8, 6))
    assert get_loss("mis")(part).loss.item() == pytest.approx((-1.1 + 0.8 + 0.75) / 8)
    for loss in (get_loss("mis", count_rejected=False), get_loss("mis_geo"), get_loss("m2po")):
        with pytest.raises(ValueError, match="needs the whole batch"):
            loss(part)


@pytest.mark.parametrize("length", [10, 1000])
@pytest.mark.parametrize("drift", [0.05, -0.05])
def test_a_sequence_ratio_is_what_its_name_says(length: int, drift: float) -> None:
    """A constant log-ratio d: the geometric mean is e^d at any length, the product e^(T d) up to the clamp at 20."""
    mask = torch.arange(length + 3)[None, :] < length
    anchor = torch.full((1, length + 3), -2.0, dtype=F64) * mask
    logp = (anchor + drift) * mask
    assert geometric_log_ratio(logp, anchor, mask).exp().item() == pytest.approx(exp(drift))
    product = exp(max(-20.0, min(20.0, length * drift)))
    assert product_log_ratio(logp, anchor).exp().item() == pytest.approx(product)
    batch = TokenBatch(logp, torch.ones(1, dtype=F64), mask, sampler_logp=anchor, old_logp=logp)
    for name, expected in (("tis_seq", min(2.0, product)), ("decoupled_ppo", exp(drift))):
        assert get_loss(name)(batch).loss.item() == pytest.approx(-expected)
    against_sampler = dataclasses.replace(batch, old_logp=anchor)
    assert get_loss("gspo", clip_low=0.9, clip_high=9.0)(against_sampler).loss.item() == pytest.approx(-exp(drift))


def gspo_batch() -> TokenBatch:
    """A = 2: log-ratios .0002, .0004. A = -1: -.001. A = -1: .01. A = 2: .001."""
    old = tensor([[-1.0, -2.0], [-3.0, NAN], [-4.0, NAN], [-0.5, NAN]])
    logp = old + tensor([[0.0002, 0.0004], [-0.001, NAN], [0.01, NAN], [0.001, NAN]])
    mask = torch.tensor([[True, True], [True, False], [True, False], [True, False]])
    return TokenBatch(logp.requires_grad_(), torch.tensor([2.0, -1.0, -1.0, 2.0], dtype=F64), mask, old_logp=old)


def test_gspo_clips_one_ratio_a_response() -> None:
    out = get_loss("gspo")(gspo_batch())
    # s = e^.0003, below 1.0004: free. e^-.001 with A < 0, below .9997: clipped. e^.01 with A < 0: free, above 1.0004 as it is.
    # e^.001 with A > 0, above 1.0004: clipped.
    assert out.loss.item() == pytest.approx((-2 * exp(0.0003) + 0.9997 + exp(0.01) - 2 * 1.0004) / 4, rel=1e-12)
    # d s / d logp_t = s/T, so A s / (T R) on each surprisal: the two tokens of the first response share it
    first, third = 2 * exp(0.0003) / (2 * 4), -exp(0.01) / 4
    torch.testing.assert_close(out.token_coef, tensor([[first, first], [0.0, 0.0], [third, 0.0], [0.0, 0.0]]))
    assert out.metrics["actor/pg_clipfrac"] == pytest.approx(2 / 5)  # shares are of tokens
    assert out.metrics["actor/ppo_kl"] == pytest.approx(-(0.0002 + 0.0004 - 0.001 + 0.01 + 0.001) / 5)


def test_cispo_bounds_the_weight_and_keeps_the_gradient() -> None:
    out = get_loss("cispo")(ppo_batch())
    # r 1.1, 1.5; 0.5; 4 become 1.1, 1.2; 0.5; 1.2. logp is old + log r.
    logp = [-1 + log(1.1), -2 + log(1.5), -3 + log(0.5), -4 + log(4)]
    terms = [-1.1 * 2 * logp[0], -1.2 * 2 * logp[1], 0.5 * logp[2], 1.2 * logp[3]]
    assert out.loss.item() == pytest.approx(sum(terms) / 4)
    torch.testing.assert_close(out.token_coef, tensor([[2.2, 2.4], [-0.5, 0.0], [-1.2, 0.0]]) / 4)
    assert out.metrics["actor/pg_clipfrac"] == pytest.approx(2 / 4)
    torch.testing.assert_close(coef("cispo", clip_low=0.3)[1, 0], torch.tensor(-0.7 / 4, dtype=F64))


def m2po_batch() -> TokenBatch:
    """A = 1 with log-ratios .1, .3; A = -1 with -.2; A = -1 with .6."""
    old = tensor([[-1.0, -2.0], [-3.0, NAN], [-4.0, NAN]])
    logp = old + tensor([[0.1, 0.3], [-0.2, NAN], [0.6, NAN]])
    mask = torch.tensor([[True, True], [True, False], [True, False]])
    return TokenBatch(logp.requires_grad_(), torch.tensor([1.0, -1.0, -1.0], dtype=F64), mask, old_logp=old)


def test_m2po_masks_the_largest_squares() -> None:
    out = get_loss("m2po")(m2po_batch())
    # squares .01 .09 .04 .36: mean .125; without .36 .14/3 = .047; without .09 .05/2 = .025, which is at most .04
    assert out.loss.item() == pytest.approx((-exp(0.1) + exp(-0.2)) / 4)
    torch.testing.assert_close(out.token_coef, tensor([[exp(0.1), 0.0], [-exp(-0.2), 0.0], [0.0, 0.0]]) / 4)
    assert out.metrics["m2po/M2"] == pytest.approx(0.125) and out.metrics["m2po/M2_after"] == pytest.approx(0.025)
    assert out.metrics[MASKED] == pytest.approx(2 / 4)


def test_m2po_may_spare_what_a_clip_would_not_stop() -> None:
    out = get_loss("m2po", harmful_only=True)(m2po_batch())
    # .6 with A < 0 is not considered; of .01 .09 .04, mean .047, .09 goes
    assert out.loss.item() == pytest.approx((-exp(0.1) + exp(-0.2) + exp(0.6)) / 4)
    assert out.metrics["m2po/M2"] == pytest.approx(0.14 / 3) and out.metrics[MASKED] == pytest.approx(1 / 4)


def test_m2po_masks_nothing_that_its_budget_allows_and_everything_that_it_does_not() -> None:
    assert get_loss("m2po", threshold=0.1251)(m2po_batch()).metrics[MASKED] == 0.0
    out = get_loss("m2po", threshold=0.0099)(m2po_batch())
    assert (out.metrics[MASKED], out.loss.item()) == (1.0, 0.0)


def masked_by_force(squares: list[float], threshold: float) -> list[bool]:
    """Takes the largest away, with all that are as large, until the mean of the rest is small enough."""
    kept = list(squares)
    while kept and sum(kept) / len(kept) > threshold:
        kept = [s for s in kept if s < max(kept)]
    return [s not in kept for s in squares]


@settings(max_examples=200, deadline=None)
@given(shifts=st.lists(st.sampled_from([0.0, 0.125, -0.125, 0.25, -0.25, 0.5, -1.0]), min_size=1, max_size=8))
def test_m2po_masks_what_brute_force_masks(shifts: list[float]) -> None:
    """Powers of two, so that squares and means are exact and ties are ties."""
    old = torch.full((len(shifts), 1), -2.0, dtype=F64)
    logp = old + torch.tensor(shifts, dtype=F64)[:, None]
    batch = TokenBatch(logp, torch.ones(len(shifts), dtype=F64), torch.ones_like(old, dtype=torch.bool), old_logp=old)
    found = get_loss("m2po", threshold=0.0625)(batch).token_coef[:, 0] == 0
    assert found.tolist() == masked_by_force([float(np.square(s)) for s in shifts], 0.0625)


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("tis_seq", {"cap": 0.0}, "cap is 0.0"),
        ("decoupled_ppo", {"cap": -1.0}, "cap is -1.0"),
        ("mis", {"upper": 0.9}, "upper is 0.9"),
        ("icepop", {"lower": 1.1}, "lower is 1.1"),
        ("mis_geo", {"lower": -0.1}, "lower is -0.1"),
        ("mis_seq", {"lower": NAN}, "lower is nan"),
        ("mis", {"clip_low": 1.0}, "clip_low is 1.0"),
        ("gspo", {"clip_high": -1e-4}, "clip_high is -0.0001"),
        ("cispo", {"clip_low": 1.0}, "clip_low is 1.0"),
        ("m2po", {"threshold": 0.0}, "threshold is 0.0"),
        ("m2po", {"aggregation": "seq_mean_token_sum_norm"}, "norm_tokens is None"),
    ],
)
def test_impossible_parameters_are_named(name: str, parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_loss(name, **parameters)
