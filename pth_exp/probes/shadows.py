"""Shadow losses: what other arms would do to the tokens of the batch that this arm trains on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from pth_exp.losses.types import Loss, TokenBatch
from pth_exp.probes.likeness import cosine_and_norm_ratio
from pth_exp.schema import OldPolicy


@dataclass(frozen=True, slots=True)
class Shadow:
    """An arm that is evaluated and not trained on.

    Attributes:
        name: the arm's option.
        old_policy: whose log-probabilities are ``old_logp`` to it.
        advantages: makes its [B] advantages of rewards and groups.
    """

    name: str
    loss: Loss
    old_policy: OldPolicy
    advantages: Callable[[Tensor, Tensor], Tensor]


def shadow_pairs(
    arm: str, batch: TokenBatch, token_coef: Tensor, shadows: Sequence[Shadow], rewards: Tensor, group: Tensor
) -> list[dict[str, Any]] | None:
    """``{"a", "b", "cosine", "norm_ratio"}`` of the token coefficients of each pair among an arm and its shadows.

    ``norm_ratio`` is ||a|| / ||b||; both are None where all coefficients of either are zero. No gradient is kept and no random
    stream moves. None without shadows.

    Args:
        arm: name of the arm that trains.
        batch: that of the first optimiser step, at the parameters at the start of the update.
        token_coef: the arm's own, of that step.
        shadows: evaluated on the same batch, each with its own old policy and advantages.
        rewards: [B] of the batch.
        group: [B] each row's group.
    """
    if not shadows:
        return None
    coefficients = {arm: token_coef[batch.mask].cpu().numpy()}
    logp = batch.logp.detach()
    with torch.random.fork_rng(devices=[logp.device] if logp.is_cuda else []):
        for shadow in shadows:
            old = batch.sampler_logp if shadow.old_policy is OldPolicy.sampler else logp
            advantage = shadow.advantages(rewards, group).to(logp.device)
            seen = dataclasses.replace(batch, logp=logp, old_logp=old, advantage=advantage)
            coefficients[shadow.name] = shadow.loss(seen).token_coef[batch.mask].cpu().numpy()
    pairs: list[dict[str, Any]] = []
    for (a, of_a), (b, of_b) in combinations(coefficients.items(), 2):
        cosine, ratio = cosine_and_norm_ratio(of_a, of_b) or (None, None)
        pairs.append({"a": a, "b": b, "cosine": cosine, "norm_ratio": ratio})
    return pairs
