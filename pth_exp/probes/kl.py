"""How far the learner has moved from the sampler."""

from __future__ import annotations

import torch
from torch import Tensor

from pth_exp.losses.ratio import LOG_RATIO_LIMIT
from pth_exp.probes.ratio import Entries


def kl_entries(log_ratio: Tensor | None) -> Entries:
    """KL(q || pi) from sampled tokens, under verl's names, and the mean shift.

    ``log_ratio`` is [n] ``log pi - log q`` at the first optimiser step, whose policy is the one at the start of the update: the
    recomputed pi_old. k1 is the mean of its negative; k3 the mean of exp(x) - x - 1, with x clamped at 20 nats either way so
    that it stays finite (verl does not clamp here).
    """
    if log_ratio is None:
        return {"rollout_corr/kl": None, "rollout_corr/k3_kl": None, "rollout_corr/mean_abs_shift": None}
    x = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return {
        "rollout_corr/kl": float(-log_ratio.mean()),
        "rollout_corr/k3_kl": float((torch.expm1(x) - x).mean()),
        "rollout_corr/mean_abs_shift": float(log_ratio.abs().mean()),
    }
