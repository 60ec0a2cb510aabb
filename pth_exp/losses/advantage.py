"""Advantages normalised within groups of responses to one prompt."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

STD_OFFSET: Final = 1e-6
"""Added to a group's standard deviation, as in verl."""


def group_advantages(rewards: Tensor, group: Tensor, normalise_std: bool = True) -> Tensor:
    """[B] ``(r - mean) / (std + 1e-6)`` within each group (GRPO, Shao et al., 2024); unbiased std, as in verl.

    Without the standard deviation: ``r - mean`` (Dr. GRPO, Liu et al., 2025, arXiv 2503.20783).

    A group of equal rewards gets exactly 0, where rounding of the mean over the 1e-6 would leave noise.

    Args:
        rewards: [B] float.
        group: [B] integer group IDs; rows of a group may stand anywhere.
        normalise_std: divide by the group's standard deviation.

    Raises ``ValueError`` for a group of one response, whose standard deviation is not defined.
    """
    if rewards.dim() != 1 or rewards.shape != group.shape:
        raise ValueError(f"rewards and group have shapes {tuple(rewards.shape)} and {tuple(group.shape)}, not one [B]")
    ids, member, size = torch.unique(group, return_inverse=True, return_counts=True)
    if bool((size < 2).any()):
        alone = int(ids[size < 2][0])
        raise ValueError(f"group {alone} has one response; group-normalised advantages need at least two a prompt")
    exact = rewards.detach().double()
    zeros = exact.new_zeros(len(ids))
    centred = exact - (zeros.index_add(0, member, exact) / size)[member]
    if normalise_std:
        std = (zeros.index_add(0, member, centred.square()) / (size - 1)).sqrt()
        centred = centred / (std + STD_OFFSET)[member]
    low, high = (zeros.scatter_reduce(0, member, exact, how, include_self=False) for how in ("amin", "amax"))
    advantages: Tensor = centred.masked_fill((low == high)[member], 0.0)
    return advantages.to(rewards.dtype)
