"""PPO's clipped loss with verl's dual clip."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pth_exp.losses.aggregate import aggregate, check_aggregation, token_share
from pth_exp.losses.ratio import log_ratio
from pth_exp.losses.registry import register, required
from pth_exp.losses.types import TokenBatch
from pth_exp.schema import Aggregation


def check_clip(*, clip_low: float, clip_high: float) -> None:
    """Raises ``ValueError`` unless 0 <= clip_low < 1 and clip_high >= 0."""
    if not 0 <= clip_low < 1:
        raise ValueError(f"clip_low is {clip_low!r}; it must be at least 0 and below 1")
    if not clip_high >= 0:
        raise ValueError(f"clip_high is {clip_high!r}; it must be at least 0")


def check_ppo(
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    aggregation: Aggregation | str,
    norm_tokens: float | None,
) -> None:
    """Raises ``ValueError`` unless 0 <= clip_low < 1, clip_high >= 0 and dual_clip > 1, and the aggregation can be taken."""
    check_clip(clip_low=clip_low, clip_high=clip_high)
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip is {dual_clip!r}; it must exceed 1, or be null for none")
    check_aggregation(aggregation, norm_tokens)


def clipped_terms(
    batch: TokenBatch, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """[B, T] terms of the clipped loss, before aggregation, and verl's metrics of them."""
    log_r = log_ratio(batch.logp, required(batch, "old_logp"))
    r = log_r.exp()
    advantage = batch.advantage[:, None]
    free = -advantage * r
    clipped = -advantage * r.clamp(1 - clip_low, 1 + clip_high)
    terms = torch.maximum(free, clipped)
    bounded = torch.zeros_like(batch.mask)
    if dual_clip is not None:
        bound = -advantage * dual_clip
        bounded = (advantage < 0) & (terms > bound)
        terms = torch.where(advantage < 0, torch.minimum(terms, bound), terms)
    return terms, {
        "actor/pg_clipfrac": token_share(clipped > free, batch.mask, batch.totals),
        "actor/pg_clipfrac_lower": token_share(bounded, batch.mask, batch.totals),
        "actor/ppo_kl": aggregate(-log_r, batch.mask, Aggregation.token_mean, totals=batch.totals),
    }


@register("grpo", "ppo_clip", check=check_ppo)
def ppo_clip(
    batch: TokenBatch,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
    aggregation: Aggregation | str = Aggregation.token_mean,
    norm_tokens: float | None = None,
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """PPO's clipped loss (Schulman et al., 2017) with the dual clip (Ye et al., 2020), as in verl.

    r_t = exp(clamp(log pi_theta - old_logp, -20, 20));
    term_t = max(-A r_t, -A clip(r_t, 1 - clip_low, 1 + clip_high)), and for A < 0 at most -A dual_clip.

    The ratio is against ``old_logp``, whoever that is: the sampler's for the arm ``ppo_clip``, the learner's own recomputed ones
    for ``grpo``, where r is identically 1 with one step a batch and nothing corrects for the sampler (paper, section 4.1).

    The mean over the batch's tokens is verl's default; GRPO's own (Shao et al., 2024) is ``seq_mean_token_mean``.

    Raises ``ValueError`` if the batch has no ``old_logp``.
    """
    terms, metrics = clipped_terms(batch, clip_low, clip_high, dual_clip)
    return aggregate(terms, batch.mask, aggregation, norm_tokens, batch.totals), metrics


@register("dr_grpo", check=check_ppo)
def dr_grpo(
    batch: TokenBatch,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
    aggregation: Aggregation | str = Aggregation.seq_mean_token_sum_norm,
    norm_tokens: float | None = None,
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Dr. GRPO (Liu et al., 2025, arXiv 2503.20783): the loss ``grpo``, summed over tokens and divided by a constant.

    The constant ``norm_tokens`` stands in place of a response's length and has no default; the arm takes the longest response
    allowed. The other half of the method, advantages without the group's standard deviation, is ``arm.advantage``. The dual clip
    is verl's and not the paper's; it acts from the second step on a batch, and ``dual_clip`` null takes it away.

    Raises ``ValueError`` if the batch has no ``old_logp``.
    """
    return ppo_clip(
        batch, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip, aggregation=aggregation, norm_tokens=norm_tokens
    )
