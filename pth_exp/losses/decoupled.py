"""Decoupled PPO: the policy that the clip is taken around is not the one that drew the data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pth_exp.losses.aggregate import aggregate
from pth_exp.losses.ppo import check_ppo, clipped_terms
from pth_exp.losses.ratio import log_ratio
from pth_exp.losses.registry import register, required
from pth_exp.losses.types import TokenBatch
from pth_exp.schema import Aggregation


def _check_decoupled(*, cap: float | None, **ppo: Any) -> None:
    if cap is not None and not cap > 0:
        raise ValueError(f"cap is {cap!r}; it must be above 0, or be null for none")
    check_ppo(**ppo)


@register("decoupled_ppo", check=_check_decoupled)
def decoupled_ppo(
    batch: TokenBatch,
    *,
    cap: float | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    aggregation: Aggregation | str = Aggregation.token_mean,
    norm_tokens: float | None = None,
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Decoupled PPO (Hilton et al., 2021, arXiv 2110.00641; for language models AReaL, 2025, arXiv 2505.24298).

    term_t = sg(exp(clamp(old_logp - sampler_logp, -20, 20))) x the term of ``ppo_clip``, whose ratio is against ``old_logp``.
    ``old_logp`` is the proximal policy, the centre of the clip; ``sampler_logp`` is the behaviour policy.

    Choices that the sources leave open: the proximal policy is the learner's at the start of the update, as AReaL recomputes it
    (Hilton et al. average past weights), so that with one step a batch the ratio is 1 and the weight alone corrects. The weight
    is not truncated but for the clamp of its log-ratio; with a ``cap`` it is, and the loss is then that of ``tis_ppo``. AReaL's
    cap drops a token instead, which is ``mis``. No dual clip, as in the papers.

    Raises ``ValueError`` if the batch has no ``old_logp`` or no ``sampler_logp``.
    """
    terms, metrics = clipped_terms(batch, clip_low, clip_high, dual_clip)
    weight = log_ratio(required(batch, "old_logp"), required(batch, "sampler_logp")).exp()
    if cap is not None:
        weight = weight.clamp(max=cap)
    return aggregate(weight * terms, batch.mask, aggregation, norm_tokens, batch.totals), metrics
