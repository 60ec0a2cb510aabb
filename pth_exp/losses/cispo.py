"""CISPO: REINFORCE with a clipped, detached ratio."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from pth_exp.losses.aggregate import aggregate, check_aggregation, token_share
from pth_exp.losses.ratio import log_ratio
from pth_exp.losses.registry import register, required
from pth_exp.losses.types import TokenBatch
from pth_exp.schema import Aggregation


def _check_cispo(*, clip_low: float | None, clip_high: float, aggregation: Aggregation | str, norm_tokens: float | None) -> None:
    if clip_low is not None and not 0 <= clip_low < 1:
        raise ValueError(f"clip_low is {clip_low!r}; it must be at least 0 and below 1, or be null for no lower bound")
    if not clip_high >= 0:
        raise ValueError(f"clip_high is {clip_high!r}; it must be at least 0")
    check_aggregation(aggregation, norm_tokens)


@register("cispo", check=_check_cispo)
def cispo(
    batch: TokenBatch,
    *,
    clip_low: float | None = None,
    clip_high: float = 0.2,
    aggregation: Aggregation | str = Aggregation.token_mean,
    norm_tokens: float | None = None,
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """CISPO (MiniMax-M1, 2025, arXiv 2506.13585, equations 4 and 5).

    r_t = exp(clamp(logp - old_logp, -20, 20)); term_t = -sg(clip(r_t, 1 - clip_low, 1 + clip_high)) A log pi_theta, averaged
    over the batch's tokens. A clipped token keeps its gradient: the clip bounds the weight and drops nothing.

    The paper takes the mean over the tokens of each prompt's responses, then over prompts; here it is over the batch's tokens, as
    everywhere in this package, and a prompt with long responses counts for more.

    Choices that the source leaves open: it uses no lower bound (``clip_low`` null), and what it set ``clip_high`` to could not be
    established; 0.2 is PPO's. Its optional mask of tokens is not here.

    A reading: the paper's old policy generated the responses, so the arm takes ``old_logp`` from the sampler (see ``gspo``).

    Raises ``ValueError`` if the batch has no ``old_logp``.
    """
    log_r = log_ratio(batch.logp, required(batch, "old_logp"))
    ratio = log_r.detach().exp()
    weight = ratio.clamp(0.0 if clip_low is None else 1 - clip_low, 1 + clip_high)
    terms = -weight * batch.advantage[:, None] * batch.logp
    return aggregate(terms, batch.mask, aggregation, norm_tokens, batch.totals), {
        "actor/pg_clipfrac": token_share(weight != ratio, batch.mask, batch.totals),
        "actor/ppo_kl": aggregate(-log_r, batch.mask, Aggregation.token_mean, totals=batch.totals),
    }
