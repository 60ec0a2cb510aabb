"""Truncated importance sampling: a detached weight against the sampler's recorded probabilities."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from pth_exp.losses.aggregate import aggregate, check_aggregation
from pth_exp.losses.ppo import check_ppo, clipped_terms
from pth_exp.losses.ratio import log_ratio, product_log_ratio
from pth_exp.losses.registry import register, required
from pth_exp.losses.types import TokenBatch
from pth_exp.schema import Aggregation


def _check_cap(cap: float) -> None:
    if not cap > 0:
        raise ValueError(f"cap is {cap!r}; it must be above 0")


def _check_tis_ppo(
    *,
    cap: float,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    aggregation: Aggregation | str,
    norm_tokens: float | None,
) -> None:
    _check_cap(cap)
    check_ppo(clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip, aggregation=aggregation, norm_tokens=norm_tokens)


def _check_tis_reinforce(*, cap: float, aggregation: Aggregation | str, norm_tokens: float | None) -> None:
    _check_cap(cap)
    check_aggregation(aggregation, norm_tokens)


def truncated_weight(logp: Tensor, sampler_logp: Tensor, cap: float) -> Tensor:
    """[B, T] ``sg min(pi/q, cap)``, the log-ratio clamped at 20 nats either way."""
    return log_ratio(logp.detach(), sampler_logp).exp().clamp(max=cap)


@register("tis_ppo", check=_check_tis_ppo)
def tis_ppo(
    batch: TokenBatch,
    *,
    cap: float = 2.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
    aggregation: Aggregation | str = Aggregation.token_mean,
    norm_tokens: float | None = None,
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """The PPO-clip loss times the detached weight min(pi_old/q, cap) (paper, section 2; Yao et al., 2025), as in verl.

    term_t = sg min(exp(clamp(old_logp - sampler_logp, -20, 20)), cap) x the term of ``ppo_clip``. The weight is a correction
    only if ``old_logp`` is the recomputed policy's; with the sampler's it is 1.

    Raises ``ValueError`` if the batch has no ``old_logp`` or no ``sampler_logp``.
    """
    terms, metrics = clipped_terms(batch, clip_low, clip_high, dual_clip)
    weight = truncated_weight(required(batch, "old_logp"), required(batch, "sampler_logp"), cap)
    return aggregate(weight * terms, batch.mask, aggregation, norm_tokens, batch.totals), metrics


@register("tis_reinforce", check=_check_tis_reinforce)
def tis_reinforce(
    batch: TokenBatch,
    *,
    cap: float = 2.0,
    aggregation: Aggregation | str = Aggregation.seq_mean_token_sum,
    norm_tokens: float | None = None,
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """REINFORCE times the detached weight min(pi_theta/q, cap) (paper, section 2).

    term_t = A sg min(exp(clamp(log pi_theta - sampler_logp, -20, 20)), cap) l_t, with l_t = -log pi_theta. Table 4 gives the
    coefficient A min(pi_theta/q, 2) without 1/T: summed over tokens, averaged over responses, is the default.

    Raises ``ValueError`` if the batch has no ``sampler_logp``.
    """
    weight = truncated_weight(batch.logp, required(batch, "sampler_logp"), cap)
    terms = batch.advantage[:, None] * weight * -batch.logp
    return aggregate(terms, batch.mask, aggregation, norm_tokens, batch.totals), {}


@register("tis_seq", check=_check_tis_ppo)
def tis_seq(
    batch: TokenBatch,
    *,
    cap: float = 2.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
    aggregation: Aggregation | str = Aggregation.token_mean,
    norm_tokens: float | None = None,
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """The PPO-clip loss times one detached weight a response, min(prod_t pi_old/q, cap) (Seq-TIS of Liu, Li et al., "When Speed
    Kills Stability", 2025; verl's ``rollout_is=sequence``).

    term_t = sg min(exp(clamp(sum_t(old_logp - sampler_logp), -20, 20)), cap) x the term of ``ppo_clip``. The sum is clamped, not
    its terms. The cap 2 is verl's default; verl's optional division by the batch's mean weight is not here.

    Raises ``ValueError`` if the batch has no ``old_logp`` or no ``sampler_logp``.
    """
    terms, metrics = clipped_terms(batch, clip_low, clip_high, dual_clip)
    weight = product_log_ratio(required(batch, "old_logp"), required(batch, "sampler_logp")).exp().clamp(max=cap)
    return aggregate(weight * terms, batch.mask, aggregation, norm_tokens, batch.totals), metrics
