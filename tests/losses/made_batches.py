"""Batches for tests: random rows of any length, and their padded form."""

import numpy as np
import torch
from hypothesis import strategies as st
from written_losses import Written

from pth_exp.losses import TokenBatch


def random_rows(seed: int, lengths: list[int], spread: float) -> Written:
    """Rows with surprisals up to a few nats; ``spread`` is the standard deviation of the log-ratios to old and sampler.

    Some of the reference's surprisals are 0.
    """
    rng = np.random.default_rng(seed)
    logp = [-rng.gamma(0.7, 1.5, n) for n in lengths]
    return Written(
        logp=logp,
        advantage=list(rng.normal(0.3, 1.0, len(lengths))),  # not centred: a group's sum would hide errors of scale
        sampler=[r + rng.normal(0, spread, len(r)) for r in logp],
        old=[r + rng.normal(0, spread, len(r)) for r in logp],
        ref=[np.minimum(r + rng.normal(0, 0.3, len(r)), 0.0) for r in logp],
    )


@st.composite
def written_batches(draw: st.DrawFn) -> Written:
    lengths = draw(st.lists(st.integers(0, 7), min_size=1, max_size=5))
    return random_rows(draw(st.integers(0, 2**32 - 1)), lengths, draw(st.sampled_from([0.01, 0.3, 2.0])))


def padded(b: Written, extra: int = 0, filler: float = float("nan"), dtype: torch.dtype = torch.float64) -> TokenBatch:
    """The rows as a TokenBatch, ``extra`` columns wider than they need, with ``filler`` in the slots outside the mask."""
    width = max(len(r) for r in b.logp) + extra

    def pad(rows: object) -> torch.Tensor:
        out = torch.full((len(b.logp), width), filler, dtype=dtype)
        for i, row in enumerate(rows):  # type: ignore[call-overload]
            out[i, : len(row)] = torch.tensor(row, dtype=dtype)
        return out

    mask = torch.tensor([[t < len(r) for t in range(width)] for r in b.logp], dtype=torch.bool).reshape(len(b.logp), width)
    advantage = torch.tensor(b.advantage, dtype=dtype)
    return TokenBatch(pad(b.logp).requires_grad_(), advantage, mask, pad(b.sampler), pad(b.old), pad(b.ref))


def unpadded(values: torch.Tensor, b: Written) -> list[np.ndarray]:
    return [values[i, : len(r)].detach().numpy() for i, r in enumerate(b.logp)]
