"""Identity of a training batch, and a histogram of its ratios."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import torch

from pth_exp.losses.types import TokenBatch
from pth_exp.probes.ratio import log_policy_over_sampler

_STEPS = (0.001, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0)
HISTOGRAM_EDGES: Final = (*(-e for e in reversed(_STEPS)), *_STEPS)
"""Edges of the bins of ``log pi_theta - log q``, in nats; the same in every record, so that histograms add up."""


def batch_id(rows: Iterable[tuple[str, Sequence[int]]]) -> str:
    """sha256 of the sorted (prompt ID, response tokens) rows of a batch: the same whatever order the rows stand in.

    Each row enters as the length of its prompt ID, the ID in UTF-8, the number of tokens and the tokens, all numbers as
    little-endian 64-bit integers; no two batches share an encoding.
    """
    digest = hashlib.sha256()
    for row in sorted(_encoded(prompt_id, tokens) for prompt_id, tokens in rows):
        digest.update(row)
    return digest.hexdigest()


def _encoded(prompt_id: str, tokens: Sequence[int]) -> bytes:
    name = prompt_id.encode()
    return len(name).to_bytes(8, "little") + name + np.array([len(tokens), *tokens], dtype="<i8").tobytes()


def generation_id(draw: int, sampler_version: int) -> str:
    """Names the act of generation: which draw it was, and the version of the weights that made it."""
    return f"{draw}:{sampler_version}"


def ratio_histogram(batch: TokenBatch) -> dict[str, Any] | None:
    """``{"edges": [...], "counts": [...]}`` of ``log pi_theta - log q``: edges in nats, counts in tokens, one fewer than edges.

    A bin holds its lower edge; values beyond the outermost edges, at 20 nats either way, count in the outermost bins. None if q
    was not recorded or there is no token.
    """
    values = log_policy_over_sampler(batch)
    if values is None:
        return None
    inner = torch.tensor(HISTOGRAM_EDGES[1:-1], dtype=values.dtype, device=values.device)
    counts = torch.bincount(torch.bucketize(values, inner, right=True), minlength=len(HISTOGRAM_EDGES) - 1)
    return {"edges": list(HISTOGRAM_EDGES), "counts": counts.tolist()}
