"""How token terms become one number: a weighted sum whose weights depend on the mask alone."""

from __future__ import annotations

import torch
from torch import Tensor

from pth_exp.losses.types import Totals
from pth_exp.schema import Aggregation


def check_aggregation(aggregation: Aggregation | str, norm_tokens: float | None) -> None:
    """Raises ``ValueError`` for an unknown aggregation, and for a constant that is asked for and is not a number above 0."""
    if Aggregation(aggregation) is Aggregation.seq_mean_token_sum_norm and (norm_tokens is None or not norm_tokens > 0):
        raise ValueError(f"norm_tokens is {norm_tokens!r}; seq_mean_token_sum_norm divides by it: give a number above 0")


def aggregation_weights(
    mask: Tensor,
    aggregation: Aggregation | str,
    norm_tokens: float | None = None,
    totals: Totals | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """[B, T] weight of each token term in the aggregate; zero outside the mask.

    Every aggregation is linear in the terms, so the aggregates of a batch's parts, each taken with the batch's ``totals``, add up
    to the batch's. With n tokens in the batch, T_i in response i and R responses that have a token:
    ``token_mean`` 1/n, ``seq_mean_token_mean`` 1/(R T_i), ``seq_mean_token_sum`` 1/R,
    ``seq_mean_token_sum_norm`` 1/(R norm_tokens) (Dr. GRPO's constant; the others ignore it). Responses without a token count in
    none of them, as in verl; where nothing counts, all weights are zero.

    Raises ``ValueError`` for an unknown aggregation, and for a constant that is asked for and not given.
    """
    check_aggregation(aggregation, norm_tokens)
    present = mask.to(dtype)
    whole = totals or Totals.of(mask)
    responses = max(whole.responses, 1)
    match Aggregation(aggregation):
        case Aggregation.token_mean:
            return present / max(whole.tokens, 1)
        case Aggregation.seq_mean_token_mean:
            return present / (responses * present.sum(dim=1, keepdim=True).clamp(min=1))
        case Aggregation.seq_mean_token_sum:
            return present / responses
        case Aggregation.seq_mean_token_sum_norm:
            assert norm_tokens is not None
            return present / (responses * norm_tokens)


def aggregate(
    terms: Tensor,
    mask: Tensor,
    aggregation: Aggregation | str,
    norm_tokens: float | None = None,
    totals: Totals | None = None,
) -> Tensor:
    """Scalar aggregate of [B, T] token terms; what stands outside the mask changes neither it nor its gradient."""
    weights = aggregation_weights(mask, aggregation, norm_tokens, totals, terms.dtype)
    return (weights * terms.masked_fill(~mask, 0.0)).sum()


def response_mean(terms: Tensor, mask: Tensor, totals: Totals | None = None) -> Tensor:
    """Scalar mean of [B] response terms over the responses that have a token; zero if none has one."""
    whole = totals or Totals.of(mask)
    return terms.masked_fill(~mask.any(dim=1), 0.0).sum() / max(whole.responses, 1)


def token_share(hit: Tensor, mask: Tensor, totals: Totals | None = None) -> Tensor:
    """Scalar share of the batch's tokens at which the bool [B, T] ``hit`` holds; zero for an empty mask."""
    whole = totals or Totals.of(mask)
    return (hit & mask).sum().double() / max(whole.tokens, 1)
