"""The penalty to the reference policy, with an estimator, a clamp and an aggregation of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from pth_exp.losses.aggregate import aggregate
from pth_exp.losses.ratio import log_ratio
from pth_exp.losses.types import Totals
from pth_exp.schema import Aggregation, KlEstimator


def kl_penalty(
    logp: Tensor,
    ref_logp: Tensor,
    mask: Tensor,
    estimator: KlEstimator | str,
    clamp: float | None,
    aggregation: Aggregation | str,
    totals: Totals | None = None,
) -> Tensor:
    """Scalar estimate of KL(policy || reference) in nats, differentiable in ``logp``.

    With x = clamp(ref_logp - logp, -20, 20), a token's estimate is k1 = -x, k2 = x^2/2 or k3 = exp(x) - x - 1 (Schulman,
    "Approximating KL divergence", 2020), then clamped to +-``clamp`` unless that is None. A token at either clamp gets no
    gradient, which decides whether a collapsed token is pulled back: verl's ``low_var_kl`` is k3 with clamp 10. (verl clamps x
    for k3 alone.)

    Args:
        logp: [B, T] of the learner, carries the gradient.
        ref_logp: [B, T] of the reference policy.
        mask: [B, T] bool; what stands outside changes nothing.
        estimator: k1, k2 or k3.
        clamp: bound of a token's estimate in nats, or None.
        aggregation: how the tokens' estimates become one number.
        totals: counts of the batch that this is a part of; None: this is all of it.

    Raises ``ValueError`` for an unknown estimator or aggregation, or a clamp that is not above 0.
    """
    if clamp is not None and not clamp > 0:
        raise ValueError(f"clamp is {clamp!r}; it must be above 0, or null for none")
    x = log_ratio(ref_logp.detach().masked_fill(~mask, 0.0), logp.masked_fill(~mask, 0.0))
    match KlEstimator(estimator):
        case KlEstimator.k1:
            estimate = -x
        case KlEstimator.k2:
            estimate = x.square() / 2
        case KlEstimator.k3:
            # expm1 keeps the difference of nearly equal terms for small x
            estimate = torch.expm1(x) - x
    if clamp is not None:
        estimate = estimate.clamp(-clamp, clamp)
    return aggregate(estimate, mask, aggregation, totals=totals)
