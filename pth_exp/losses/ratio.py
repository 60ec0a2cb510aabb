"""Log-ratios of two policies, of a token and of a response, with the one clamp that all losses share."""

from __future__ import annotations

from typing import Final

from torch import Tensor

LOG_RATIO_LIMIT: Final = 20.0
"""Log-ratios are clamped to plus and minus this many nats before ``exp``, as in verl; a clamped token gets no gradient."""


def log_ratio(logp: Tensor, anchor: Tensor) -> Tensor:
    """[B, T] ``clamp(logp - anchor, -20, 20)`` in nats, differentiable in both arguments inside the clamp."""
    return (logp - anchor).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def product_log_ratio(logp: Tensor, anchor: Tensor) -> Tensor:
    """[B, 1] ``clamp(sum_t (logp - anchor), -20, 20)``: its exponential is the ratio of the responses' probabilities.

    Both arguments are zero outside the mask. The sum is clamped, not its terms; an empty response has 0.
    """
    return (logp - anchor).sum(dim=1, keepdim=True).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def geometric_log_ratio(logp: Tensor, anchor: Tensor, mask: Tensor) -> Tensor:
    """[B, 1] ``clamp(mean_t (logp - anchor), -20, 20)``: its exponential is the geometric mean of the tokens' ratios.

    Both arguments are zero outside the mask. The mean is clamped, not its terms; an empty response has 0.
    """
    tokens = mask.sum(dim=1, keepdim=True).clamp(min=1)
    return ((logp - anchor).sum(dim=1, keepdim=True) / tokens).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
