"""What the ratio is taken against: the distribution of pi_theta/q, and how far old_logp is from either policy (check 1)."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from pth_exp.losses.types import TokenBatch

QUANTILES: Final = (0, 1, 5, 25, 50, 75, 95, 99, 100)
"""Per cent, as recorded."""

Entries = dict[str, float | None]
"""Part of an update's row; None: not measured."""


def at_tokens(values: Tensor, mask: Tensor) -> Tensor:
    """[n] the values at the mask's tokens, detached, in float64."""
    return values.detach()[mask].double()


def log_policy_over_sampler(batch: TokenBatch) -> Tensor | None:
    """[n] ``log pi_theta - log q`` of each token in nats, not clamped; None if q was not recorded or there is no token."""
    if batch.sampler_logp is None or not bool(batch.mask.any()):
        return None
    return at_tokens(batch.logp, batch.mask) - at_tokens(batch.sampler_logp, batch.mask)


def quantiles(values: Tensor, percents: tuple[int, ...] = QUANTILES) -> list[float]:
    """Quantiles of [n] values, n at least 1, linear between order statistics; any n (``torch.quantile`` stops at 16 million)."""
    ordered = values.sort().values
    place = torch.tensor(percents, dtype=torch.float64, device=values.device) / 100 * (len(ordered) - 1)
    low = place.floor().long()
    high = place.ceil().long()
    result: list[float] = torch.where(low == high, ordered[low], ordered[low].lerp(ordered[high], place - low)).tolist()
    return result


def ratio_entries(batch: TokenBatch) -> Entries:
    """The row's ``ratio/`` entries but the clip fractions; ``batch`` is that of the first optimiser step."""
    entries: Entries = {
        "ratio/exactly_one_share": None,
        "ratio/old_policy_max_abs": None,
        "ratio/old_sampler_max_abs": None,
        **{f"ratio/log_policy_over_sampler/q{p:02d}": None for p in QUANTILES},
    }
    log_ratio = log_policy_over_sampler(batch)
    if log_ratio is not None:
        values = quantiles(log_ratio)
        entries |= {f"ratio/log_policy_over_sampler/q{p:02d}": v for p, v in zip(QUANTILES, values, strict=True)}
    if batch.old_logp is not None and bool(batch.mask.any()):
        old, mask = at_tokens(batch.old_logp, batch.mask), batch.mask
        shift = (at_tokens(batch.logp, mask) - old).abs()
        entries["ratio/exactly_one_share"] = float((shift == 0).double().mean())
        entries["ratio/old_policy_max_abs"] = float(shift.max())
        if batch.sampler_logp is not None:
            entries["ratio/old_sampler_max_abs"] = float((old - at_tokens(batch.sampler_logp, mask)).abs().max())
    return entries
