"""The log-ratio of two policies, with the one clamp that all losses share."""

from __future__ import annotations

from typing import Final

from torch import Tensor

LOG_RATIO_LIMIT: Final = 20.0
"""Log-ratios are clamped to plus and minus this many nats before ``exp``, as in verl; a clamped token gets no gradient."""


def log_ratio(logp: Tensor, anchor: Tensor) -> Tensor:
    """[B, T] ``clamp(logp - anchor, -20, 20)`` in nats, differentiable in both arguments inside the clamp."""
    return (logp - anchor).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
