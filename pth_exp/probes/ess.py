"""Effective sample size of the importance weights, and the share of them that is truncated."""

from __future__ import annotations

import math
from typing import Final

from torch import Tensor

from pth_exp.losses.ratio import LOG_RATIO_LIMIT

CAP: Final = 2.0
"""Where an arm truncates nothing, the paper's cap tells how much one would (section 2)."""


def effective_sample_share(log_ratio: Tensor) -> float:
    """``(sum w)^2 / (n sum w^2)`` of the token weights w = pi_theta/q, in (0, 1]; 1 when all weights are equal.

    ``log_ratio`` is [n] ``log pi_theta - log q``, clamped at 20 nats either way. The weights are not truncated: verl's
    ``rollout_is_eff_sample_size`` is that of the truncated ones, and only where an arm has any.
    """
    x = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    w = (x - x.max()).exp()
    return float(w.sum().square() / (len(w) * w.square().sum()))


def truncated_share(log_ratio: Tensor, cap: float) -> float:
    """Share of tokens whose pi_theta/q exceeds ``cap``; ``log_ratio`` is [n] ``log pi_theta - log q``."""
    return float((log_ratio > math.log(cap)).double().mean())
