"""What a loss does to each token, and whether the sampler's probability has a part in it (check 1)."""

from __future__ import annotations

import dataclasses
from typing import Final

from torch import Tensor

from pth_exp.losses.types import Loss, TokenBatch
from pth_exp.probes.ratio import QUANTILES, Entries, at_tokens, quantiles
from pth_exp.schema import OldPolicy

NEAR_ZERO: Final = 0.01
"""A token hardly trains if its coefficient is smaller than this part of the mean size."""


def coefficient_entries(batch: TokenBatch, token_coef: Tensor) -> Entries:
    """Size of d loss / d surprisal over the batch's tokens, and its distribution.

    ``coef/over_mean_abs/q..`` are quantiles of the signed coefficient over ``coef/mean_abs``, so that arms whose losses differ by
    a scale can be compared; the product of the two is absolute. None where all coefficients are zero.

    ``coef/near_zero_share`` counts among tokens of responses whose advantage is not 0, against their own mean size, so that it
    tells what the loss does to tokens and not how many groups had equal rewards; None if there are none.
    """
    entries: Entries = {"coef/mean_abs": None, "coef/max_abs": None, "coef/near_zero_share": None}
    entries |= {f"coef/over_mean_abs/q{p:02d}": None for p in QUANTILES}
    if not bool(batch.mask.any()):
        return entries
    coef = at_tokens(token_coef, batch.mask)
    size = coef.abs()
    entries |= {"coef/mean_abs": float(size.mean()), "coef/max_abs": float(size.max())}
    if bool(size.mean() > 0):
        values = quantiles(coef / size.mean())
        entries |= {f"coef/over_mean_abs/q{p:02d}": v for p, v in zip(QUANTILES, values, strict=True)}
    trained = size[(batch.advantage != 0)[:, None].expand_as(batch.mask)[batch.mask]]
    if len(trained) > 0:
        entries["coef/near_zero_share"] = float((trained < NEAR_ZERO * trained.mean()).double().mean())
    return entries


def sampler_response(loss: Loss, batch: TokenBatch, token_coef: Tensor, old_policy: OldPolicy) -> float | None:
    """``||coef(q := pi_theta) - coef|| / ||coef||``: how the coefficients change when pi_theta replaces q everywhere q enters.

    q enters as ``sampler_logp``, and as ``old_logp`` too if the arm's old policy is the sampler. 0 for a loss that q has no part
    in, whatever the clip fraction; None where q was not recorded or all coefficients are zero.
    """
    size = at_tokens(token_coef, batch.mask).norm()
    if batch.sampler_logp is None or not bool(size > 0):
        return None
    policy = batch.logp.detach()
    old = policy if old_policy is OldPolicy.sampler else batch.old_logp
    replaced = loss(dataclasses.replace(batch, logp=policy, sampler_logp=policy, old_logp=old)).token_coef
    return float(at_tokens(replaced - token_coef, batch.mask).norm() / size)
