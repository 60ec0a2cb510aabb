"""A fingerprint of weights: equal exactly when every bit of every parameter is, whichever engine holds them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn

_ODD = 0x2545F4914F6CDD1D
"""An odd number of 64 well mixed bits: multiplying by it permutes the integers modulo 2^64."""
_BLOCK = 1 << 22
_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(model: nn.Module) -> str:
    """The fingerprint of a model's own parameters."""
    return fingerprint_of(model.named_parameters())


def fingerprint_of(parameters: Iterable[tuple[str, Tensor]]) -> str:
    """16 hex digits made from every bit of every parameter, with the parameters' names, shapes and types; their order is free.

    Each parameter is reduced where it lives to two 64-bit sums, in which every element has an odd weight made from its
    position. Integer arithmetic modulo 2^64 is exact, so the result depends neither on the device nor on the order of
    summation, and as an odd weight is invertible, no change of a single element can leave the first sum as it was.
    """
    sums = {
        f"{name} {tuple(parameter.shape)} {parameter.dtype}\n": _weighted_sums(parameter.detach().reshape(-1))
        for name, parameter in parameters
    }
    digest = hashlib.blake2b(digest_size=8)
    for described in sorted(sums):
        digest.update(described.encode())
    digest.update(torch.stack([sums[described] for described in sorted(sums)]).cpu().numpy().tobytes())
    return digest.hexdigest()


def _weighted_sums(values: Tensor) -> Tensor:
    """[2] int64, from the bits of ``values`` [n]. Works block by block, so that big parameters need little memory."""
    bits = values.view(_INTEGER_OF_SIZE[values.element_size()])
    total = torch.zeros(2, dtype=torch.int64, device=values.device)
    for start in range(0, len(bits), _BLOCK):
        block = bits[start : start + _BLOCK].to(torch.int64)
        weight = torch.arange(2 * start + 1, 2 * (start + len(block)), 2, device=values.device) * _ODD
        total[0] += (block * weight).sum()
        total[1] += (block * ((weight ^ (weight >> 29)) * _ODD | 1)).sum()
    return total
