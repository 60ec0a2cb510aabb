"""Masked importance sampling: where old policy and sampler disagree too far, a token or a response is rejected.

All four losses take ``w``, a ratio of pi_old to q, and keep what has ``lower <= w <= upper``. They differ in what w is of: a
token, a response's product of token ratios, or their geometric mean. Two choices differ between the published forms, and are
parameters:

* ``weighted``: the accepted w multiplies the term, as importance sampling asks, or rejects only, as verl's ``rollout_rs`` does.
* ``count_rejected``: what is rejected stays in the denominators, as in IcePop's formula (verl's "ICE-POP only changes IS
  coefficients", pull request 5722) and in AReaL ("denominator consistent"); or it is removed from them, as where verl's
  ``rollout_rs`` changes the response mask: what is kept then counts for more, and a response without a kept token is none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pth_exp.losses.aggregate import aggregate, response_mean, token_share
from pth_exp.losses.ppo import check_ppo, clipped_terms
from pth_exp.losses.ratio import geometric_log_ratio, log_ratio, product_log_ratio
from pth_exp.losses.registry import register, required
from pth_exp.losses.types import TokenBatch
from pth_exp.schema import Aggregation


def _check(*, upper: float | None, lower: float, weighted: bool, count_rejected: bool, **ppo: Any) -> None:
    if not 0 <= lower <= 1:
        raise ValueError(f"lower is {lower!r}; it must be from 0 (no lower bound) to 1, so that a ratio of 1 is kept")
    if upper is not None and not upper >= 1:
        raise ValueError(f"upper is {upper!r}; it must be at least 1, so that a ratio of 1 is kept, or null for no upper bound")
    check_ppo(**ppo)


def _splittable(*, count_rejected: bool, **_: Any) -> bool:
    """How much is kept is known of the whole batch only."""
    return count_rejected


def _masked_ppo(
    batch: TokenBatch,
    log_w: Tensor,
    upper: float | None,
    lower: float,
    weighted: bool,
    count_rejected: bool,
    ppo: tuple[float, float, float | None],
    aggregation: Aggregation | str,
    norm_tokens: float | None,
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """``log_w`` is [B, T], or [B, 1] of whole responses; ``ppo`` are clip_low, clip_high and dual_clip."""
    w = log_w.exp().expand_as(batch.logp)
    rejected = ((w < lower) | (w > (float("inf") if upper is None else upper))) & batch.mask
    weight = w if weighted else torch.where(w.isnan(), w, 1.0)  # where q is missing the loss is NaN, not one of a kept token
    terms, metrics = clipped_terms(batch, *ppo)
    terms = (weight * terms).masked_fill(rejected, 0.0)
    counted, totals = (batch.mask, batch.totals) if count_rejected else (batch.mask & ~rejected, None)
    return aggregate(terms, counted, aggregation, norm_tokens, totals), {
        **metrics,
        "rollout_corr/rollout_rs_masked_fraction": token_share(rejected, batch.mask, batch.totals),
        "rollout_corr/rollout_rs_seq_masked_fraction": response_mean(
            rejected.any(dim=1).to(batch.logp.dtype), batch.mask, batch.totals
        ),
    }


@register("mis", check=_check, splittable=_splittable)
def mis(
    batch: TokenBatch,
    *,
    upper: float | None = 2.0,
    lower: float = 0.0,
    weighted: bool = True,
    count_rejected: bool = True,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
    aggregation: Aggregation | str = Aggregation.token_mean,
    norm_tokens: float | None = None,
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Token-level masked importance sampling on the PPO-clip loss (Liu, Li et al., "When Speed Kills Stability", 2025).

    w_t = exp(clamp(old_logp - sampler_logp, -20, 20)); term_t = 1(lower <= w_t <= upper) w_t x the term of ``ppo_clip``.

    One-sided: large weights are rejected, small ones weigh little by themselves. The bound 2 is verl's default threshold. The
    source writes the estimator as an expectation under the sampler, in which a rejected token is a zero that counts: the default.
    The PPO term and its dual clip are verl's, as in ``tis_ppo``.

    Raises ``ValueError`` if the batch has no ``old_logp`` or no ``sampler_logp``.
    """
    log_w = log_ratio(required(batch, "old_logp"), required(batch, "sampler_logp"))
    ppo = (clip_low, clip_high, dual_clip)
    return _masked_ppo(batch, log_w, upper, lower, weighted, count_rejected, ppo, aggregation, norm_tokens)


@register("mis_seq", check=_check, splittable=_splittable)
def mis_seq(
    batch: TokenBatch,
    *,
    upper: float | None = 2.0,
    lower: float = 0.0,
    weighted: bool = True,
    count_rejected: bool = True,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
    aggregation: Aggregation | str = Aggregation.token_mean,
    norm_tokens: float | None = None,
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Sequence-level masked importance sampling (the same source's Seq-MIS).

    ``mis`` with one weight a response, the product w = exp(clamp(sum_t(old_logp - sampler_logp), -20, 20)).

    Raises ``ValueError`` if the batch has no ``old_logp`` or no ``sampler_logp``.
    """
    log_w = product_log_ratio(required(batch, "old_logp"), required(batch, "sampler_logp"))
    ppo = (clip_low, clip_high, dual_clip)
    return _masked_ppo(batch, log_w, upper, lower, weighted, count_rejected, ppo, aggregation, norm_tokens)


@register("mis_geo", check=_check, splittable=_splittable)
def mis_geo(
    batch: TokenBatch,
    *,
    upper: float | None = 1.001,
    lower: float = 0.999,
    weighted: bool = False,
    count_rejected: bool = False,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
    aggregation: Aggregation | str = Aggregation.token_mean,
    norm_tokens: float | None = None,
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Rejection of responses by the geometric mean of their ratios (the same source, part 3; verl's ``decoupled_geo_rs``).

    w = exp(clamp(mean_t(old_logp - sampler_logp), -20, 20)), one a response whatever its length; the term of ``ppo_clip`` where
    lower <= w <= upper.

    The defaults are verl's: rejection without a weight, taken out of the counts, and bounds for numerical mismatch (1.0001 to
    1.001 in its documentation). Under real lag they reject most responses; a run's
    ``rollout_corr/rollout_rs_seq_masked_fraction`` says how many. verl's separate veto of single tokens is not here.

    Raises ``ValueError`` if the batch has no ``old_logp`` or no ``sampler_logp``.
    """
    log_w = geometric_log_ratio(required(batch, "old_logp"), required(batch, "sampler_logp"), batch.mask)
    ppo = (clip_low, clip_high, dual_clip)
    return _masked_ppo(batch, log_w, upper, lower, weighted, count_rejected, ppo, aggregation, norm_tokens)


@register("icepop", check=_check, splittable=_splittable)
def icepop(
    batch: TokenBatch,
    *,
    upper: float | None = 5.0,
    lower: float = 0.5,
    weighted: bool = True,
    count_rejected: bool = True,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    aggregation: Aggregation | str = Aggregation.seq_mean_token_mean,
    norm_tokens: float | None = None,
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """IcePop (Ling team, "Every Step Evolves", 2025, arXiv 2510.18855): ``mis`` with two sides.

    term_t = M(w_t) x the term of ``ppo_clip``, M(w) = w for lower <= w <= upper, else 0.

    The bounds 0.5 and 5, the mean over a response's tokens, rejected ones counted, then over responses, and the clip without a
    dual clip are the paper's. The old policy is the learner's at the start of the update, as there; reports that put pi_theta in
    its place (INTELLECT-3) differ from it from the second step on a batch.

    Raises ``ValueError`` if the batch has no ``old_logp`` or no ``sampler_logp``.
    """
    log_w = log_ratio(required(batch, "old_logp"), required(batch, "sampler_logp"))
    ppo = (clip_low, clip_high, dual_clip)
    return _masked_ppo(batch, log_w, upper, lower, weighted, count_rejected, ppo, aggregation, norm_tokens)
