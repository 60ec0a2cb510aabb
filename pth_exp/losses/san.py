"""Self-anchored normalisation."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from pth_exp.losses.aggregate import response_mean
from pth_exp.losses.registry import register
from pth_exp.losses.surprisal import SURPRISAL_FLOOR, anchored_weights, robust_mean, surprisal_level, token_average
from pth_exp.losses.types import TokenBatch


def self_anchored_weights(batch: TokenBatch) -> Tensor:
    """[B, T] ``w_t = min(1, S/sg(l_t))`` with S the mean surprisal of the token's own response."""
    level = surprisal_level(batch.logp)
    return anchored_weights(level, token_average(level, batch.mask)[:, None])


@register("san")
def san(batch: TokenBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
    """SAN (paper, equation 1): no probability of the sampler enters.

    l_t = -log pi_theta; S = mean_t sg(l_t); w_t = min(1, S/sg(l_t)); S_rob = sum w l / sum w; the loss of a response is
    A S_rob/sg(max(S_rob, 1e-6)), the batch's loss the mean over its responses that have a token. The coefficient on grad l_t
    is A w_t/D with D = sum w l. The floor is this package's, for a response that the learner is certain of.
    """
    robust = robust_mean(-batch.logp, self_anchored_weights(batch), batch.mask)
    terms = batch.advantage * robust / robust.detach().clamp(min=SURPRISAL_FLOOR)
    return response_mean(terms, batch.mask, batch.totals), {}
