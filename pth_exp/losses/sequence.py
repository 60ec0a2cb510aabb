"""SAN taken apart (paper, appendix A, Table 4): normalisation by the response's surprisal, with and without token weights.

Each divides a response's surprisal, weighted or not, by a detached sum: S = sum l or D = sum w l, with SAN's weights
w_t = min(1, mean sg(l)/sg(l_t)). The table gives the coefficient on grad l_t alone; the loss is the one that has it. Floors are
this package's, SAN's own in each sum: 1e-6 T for S, 1e-6 sum w for D. Each loss is the mean over the responses that have a token.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pth_exp.losses.aggregate import response_mean
from pth_exp.losses.registry import register
from pth_exp.losses.san import self_anchored_weights
from pth_exp.losses.surprisal import SURPRISAL_FLOOR, token_average
from pth_exp.losses.types import TokenBatch


def _floored(total: Tensor, weight: Tensor) -> Tensor:
    """[B] ``sg(max(total, 1e-6 weight))``; 1 for an empty response, which has no weight."""
    return torch.where(weight > 0, torch.maximum(total.detach(), SURPRISAL_FLOOR * weight), 1.0)


@register("seq_norm")
def seq_norm(batch: TokenBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Plain sequence normalisation: coefficient A/S on every grad l_t (paper, Table 4).

    The loss of a response is A sum l / sg(max(sum l, 1e-6 T)).
    """
    total = -batch.logp.sum(dim=1)
    terms = batch.advantage * total / _floored(total, batch.mask.sum(dim=1, dtype=total.dtype))
    return response_mean(terms, batch.mask, batch.totals), {}


@register("seq_gain")
def seq_gain(batch: TokenBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Sequence gain only: coefficient A/D on every grad l_t, SAN's without its weights (paper, Table 4).

    The loss of a response is A sum l / sg(max(sum w l, 1e-6 sum w)).
    """
    weights = self_anchored_weights(batch)
    gain = _floored((weights * -batch.logp).sum(dim=1), (weights * batch.mask).sum(dim=1))
    return response_mean(batch.advantage * -batch.logp.sum(dim=1) / gain, batch.mask, batch.totals), {}


@register("token_weights")
def token_weights(batch: TokenBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Token weights only: coefficient A w_t/S, plain normalisation with SAN's weights (paper, Table 4).

    The loss of a response is A sum w l / sg(max(sum l, 1e-6 T)).
    """
    weighted = (self_anchored_weights(batch) * -batch.logp).sum(dim=1)
    total = -batch.logp.sum(dim=1)
    terms = batch.advantage * weighted / _floored(total, batch.mask.sum(dim=1, dtype=total.dtype))
    return response_mean(terms, batch.mask, batch.totals), {}


def _check_floor(*, floor: float) -> None:
    if not floor > 0:
        raise ValueError(f"floor is {floor!r}; it must be above 0")


@register("asympo_reading", check=_check_floor)
def asympo_reading(batch: TokenBatch, *, floor: float = SURPRISAL_FLOOR) -> tuple[Tensor, Mapping[str, Tensor]]:
    """A reading of ASymPO (arXiv 2606.03070), not the method: its abstract has each response's token loss normalised by the
    response's current average token negative log-probability.

    Read here as A mean l / sg(max(mean l, floor)) for a response. The stop-gradient (without it the loss would be the constant
    A), the floor and the mean over responses are this reading's. Its gradient is that of ``seq_norm``: A/S on every grad l_t.
    The "stabilised loss" of the paper's Table 4 is not published in full, and ended elsewhere than plain normalisation did.
    """
    level = token_average(-batch.logp, batch.mask)
    return response_mean(batch.advantage * level / level.detach().clamp(min=floor), batch.mask, batch.totals), {}
