"""SAN anchored to a frozen reference model: each variant as the paper's code has it, and as its draft wrote it.

The reference's surprisal l_ref counts as at least 0, as the learner's does in the weights. S in SAN+'s anchor is equation (1)'s,
a mean of sg(l_t), so a_t is a constant. Floors are this package's. Each loss is the mean over the responses that have a token.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pth_exp.losses.aggregate import response_mean
from pth_exp.losses.registry import register, required
from pth_exp.losses.surprisal import SURPRISAL_FLOOR, anchored_weights, robust_mean, surprisal_level, token_average
from pth_exp.losses.types import TokenBatch


def _plus_anchor(batch: TokenBatch) -> Tensor:
    """[B, T] ``a_t = max(l_ref_t, S)``, zero outside the mask."""
    mean = token_average(surprisal_level(batch.logp), batch.mask)
    return torch.maximum(-required(batch, "ref_logp"), mean[:, None]) * batch.mask


@register("san_plus")
def san_plus(batch: TokenBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
    """SAN+ as implemented (paper, equation 2): the weighted surprisal over the total anchor mass.

    a_t = max(l_ref_t, S); w_t = min(1, a_t/sg(l_t)); the loss of a response is A sum w l / max(sum a, 1e-6 T), and the
    coefficient on grad l_t is A w_t/max(sum a, 1e-6 T).

    Raises ``ValueError`` if the batch has no ``ref_logp``.
    """
    anchor = _plus_anchor(batch)
    weights = anchored_weights(surprisal_level(batch.logp), anchor)
    mass = anchor.sum(dim=1)
    floor = SURPRISAL_FLOOR * batch.mask.sum(dim=1, dtype=mass.dtype).clamp(min=1)
    terms = batch.advantage * (weights * -batch.logp).sum(dim=1) / torch.maximum(mass, floor)
    return response_mean(terms, batch.mask, batch.totals), {}


@register("san_plus_written")
def san_plus_written(batch: TokenBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
    """SAN+ as the draft described it (paper, section 4.4): SAN with another anchor, all else unchanged.

    a_t = max(l_ref_t, S); w_t = min(1, a_t/sg(l_t)); S_rob = sum w l / sum w; the loss of a response is
    A S_rob/sg(max(S_rob, 1e-6)), and the coefficient on grad l_t is A w_t/D with D = sum w l.

    Raises ``ValueError`` if the batch has no ``ref_logp``.
    """
    robust = robust_mean(-batch.logp, anchored_weights(surprisal_level(batch.logp), _plus_anchor(batch)), batch.mask)
    terms = batch.advantage * robust / robust.detach().clamp(min=SURPRISAL_FLOOR)
    return response_mean(terms, batch.mask, batch.totals), {}


def _reference_anchored_mean(batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """[B] S_rob with w_t = min(1, l_ref_t/sg(l_t)), and [B, T] the reference's surprisal."""
    reference = surprisal_level(required(batch, "ref_logp"))
    return robust_mean(-batch.logp, anchored_weights(surprisal_level(batch.logp), reference), batch.mask), reference


@register("san_ref")
def san_ref(batch: TokenBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
    """SAN-ref as implemented (paper, equation 3): the robust mean over the reference's mean surprisal.

    w_t = min(1, l_ref_t/sg(l_t)); S_rob = sum w l / sum w; the loss of a response is A S_rob/max(mean l_ref, 1e-6), and the
    coefficient on grad l_t is A w_t/(sum w max(mean l_ref, 1e-6)).

    A token of which the reference is certain, and the learner is not, has w_t = 0. A response that has no other tokens has no
    S_rob; it is taken as 0, and the response does not train. The paper does not say.

    Raises ``ValueError`` if the batch has no ``ref_logp``.
    """
    robust, reference = _reference_anchored_mean(batch)
    level = token_average(reference, batch.mask)
    return response_mean(batch.advantage * robust / level.clamp(min=SURPRISAL_FLOOR), batch.mask, batch.totals), {}


@register("san_ref_written")
def san_ref_written(batch: TokenBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
    """SAN-ref as the draft described it (paper, section 4.4): SAN with another anchor, all else unchanged.

    w_t = min(1, l_ref_t/sg(l_t)); the loss of a response is A S_rob/sg(max(S_rob, 1e-6)) with S_rob = sum w l / sum w, and the
    coefficient on grad l_t is A w_t/D with D = sum w l. With the learner equal to its reference it is ``san_ref``. Responses
    without any weight are treated as there.

    Raises ``ValueError`` if the batch has no ``ref_logp``.
    """
    robust, _ = _reference_anchored_mean(batch)
    terms = batch.advantage * robust / robust.detach().clamp(min=SURPRISAL_FLOOR)
    return response_mean(terms, batch.mask, batch.totals), {}
