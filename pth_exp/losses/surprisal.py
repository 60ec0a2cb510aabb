"""Surprisals l_t = -log pi(y_t), and the token weights that a loss takes from them."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

SURPRISAL_FLOOR: Final = 1e-6
"""Smallest mean surprisal, in nats, that a loss divides by: below it, a float32 log-probability is rounding.

A loss that divides by a sum of surprisals has this floor times the weight in the sum: times T, or times the sum of w_t.
"""


def surprisal_level(logp: Tensor) -> Tensor:
    """[B, T] ``sg(l_t)``, at least 0: rounding can leave a log-probability a hair above 0, which would turn weights around."""
    return (-logp.detach()).clamp(min=0.0)


def token_average(values: Tensor, mask: Tensor) -> Tensor:
    """[B] mean over a response's tokens of [B, T] values that are zero outside the mask; 0 for an empty response."""
    return values.sum(dim=1) / mask.sum(dim=1).clamp(min=1)


def anchored_weights(level: Tensor, anchor: Tensor) -> Tensor:
    """[B, T] ``w_t = min(1, anchor/l_t)``, 1 wherever l_t is at most the anchor, zero surprisal included.

    ``level`` is the detached surprisal; ``anchor`` broadcasts against it and is at least 0. An anchor that is NaN gives NaN.
    """
    return torch.where(level <= anchor, 1.0, anchor / torch.where(level > 0, level, 1.0))


def robust_mean(surprisal: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
    """[B] ``S_rob = sum_t w_t l_t / sum_t w_t`` over the mask, 0 where no token has a weight. Surprisal is zero outside it."""
    total = (weights * mask).sum(dim=1)
    return (weights * surprisal).sum(dim=1) / torch.where(total > 0, total, 1.0)
