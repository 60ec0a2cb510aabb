"""What goes into a loss and what comes out of it. Log-probabilities are in nats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, Self

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts of a whole batch, given along with a part of it (a micro-batch, a data-parallel rank's share).

    Attributes:
        tokens: response tokens.
        responses: responses that have a token.
    """

    tokens: int
    responses: int

    @classmethod
    def of(cls, mask: Tensor) -> Self:
        """The counts of a [B, T] bool mask."""
        return cls(int(mask.sum()), int(mask.any(dim=1).sum()))


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """One batch of responses, padded to a common width T. Slots outside ``mask`` may hold anything, NaN included.

    Attributes:
        logp: [B, T] log-probability of each response token under the learner; carries the gradient.
        advantage: [B] group-normalised advantage of each response.
        mask: [B, T] bool, true at response tokens.
        sampler_logp: [B, T] log q, as the sampler recorded it when it drew the token.
        old_logp: [B, T] the denominator of the PPO ratio: the sampler's or the recomputed old policy's (``arm.old_policy``).
        ref_logp: [B, T] log-probability under the reference policy.
        totals: counts of the batch that this is a part of; None: this is all of it.
    """

    logp: Tensor
    advantage: Tensor
    mask: Tensor
    sampler_logp: Tensor | None = None
    old_logp: Tensor | None = None
    ref_logp: Tensor | None = None
    totals: Totals | None = None


@dataclass(frozen=True, slots=True)
class LossOutput:
    """Result of a loss.

    Attributes:
        loss: scalar to minimise.
        token_coef: [B, T] d loss / d surprisal of each token, detached; zero outside the mask.
        metrics: the loss's own scalars, under verl's names where verl has one.

    Over the parts of a batch, each given the batch's ``totals``, the losses and the metrics add up to those of the whole, and the
    coefficients are the whole's.
    """

    loss: Tensor
    token_coef: Tensor
    metrics: Mapping[str, float]


class Loss(Protocol):
    """A pure function of a batch."""

    def __call__(self, batch: TokenBatch) -> LossOutput: ...
