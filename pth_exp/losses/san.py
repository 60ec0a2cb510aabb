"""Self-anchored normalisation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from pth_exp.losses.aggregate import response_mean
from pth_exp.losses.registry import register
from pth_exp.losses.types import TokenBatch

SURPRISAL_FLOOR: Final = 1e-6
"""Smallest mean surprisal, in nats, that a loss divides by: below it, a float32 log-probability is rounding."""


def anchored_weights(level: Tensor, anchor: Tensor) -> Tensor:
    """[B, T] ``w_t = min(1, anchor/l_t)``, 1 wherever l_t is at most the anchor, zero surprisal included.

    ``level`` is the detached surprisal; ``anchor`` broadcasts against it and is at least 0.
    """
    above = level > anchor
    return torch.where(above, anchor / torch.where(above, level, 1.0), 1.0)


def robust_mean(surprisal: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
    """[B] ``S_rob = sum_t w_t l_t / sum_t w_t`` over the mask; 0 for an empty response. Surprisal is zero outside the mask."""
    total = (weights * mask).sum(dim=1)
    return (weights * surprisal).sum(dim=1) / torch.where(total > 0, total, 1.0)


@register("san")
def san(batch: TokenBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
    """SAN (paper, equation 1): no probability of the sampler enters.

    l_t = -log pi_theta; S = mean_t sg(l_t); w_t = min(1, S/sg(l_t)); S_rob = sum w l / sum w; the loss of a response is
    A S_rob/sg(max(S_rob, 1e-6)), the batch's loss the mean over its responses that have a token. The coefficient on grad l_t
    is A w_t/D with D = sum w l. The floor is this package's, for a response that the learner is certain of.
    """
    surprisal = -batch.logp
    # Rounding can leave a log-probability a hair above 0; an anchor below 0 would turn weights around.
    level = surprisal.detach().clamp(min=0.0)
    anchor = level.sum(dim=1, keepdim=True) / batch.mask.sum(dim=1, keepdim=True).clamp(min=1)
    robust = robust_mean(surprisal, anchored_weights(level, anchor), batch.mask)
    return response_mean(batch.advantage * robust / robust.detach().clamp(min=SURPRISAL_FLOOR), batch.mask, batch.totals), {}
