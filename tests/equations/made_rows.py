"""Batches for tests of equations, and the equations that the tests take their examples from."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st
from naive import Rows

from pth_exp.equations import WrittenBatch

SAN = """\
l = -logp
level = max(sg(l), 0)
S = mean(level)
w = where(level <= S, 1, S / level)
S_rob = sum(w * l) / sum(w)
loss = mean(A * S_rob / max(sg(S_rob), 1e-6))
"""
PPO = """\
r = exp(clip(logp - old_logp, -20, 20))
clipped = max(-A * r, -A * clip(r, 1 - clip_low, 1 + clip_high))
loss = aggregate(where(A < 0, min(clipped, -A * dual_clip), clipped))
"""
MASKED = """\
log_r = clip(logp - sampler_logp, -20, 20)
r = exp(log_r)
r_seq = exp(clip(mean(log_r), -20, 20))
keep = 0.5 <= sg(r) <= 2 and not sg(r_seq) > 3
loss = aggregate(-A * r, keep)
"""
EVERYTHING = """\
l = -logp  # every function and operator once
x = clip(ref_logp - logp, -0.3, 0.4)
a = where(l > mean(l) or A == 0, log(1 + exp(x)), abs(expm1(-x)) / T)
b = sum(a**3 - 2 * a) / max(min(l, 4, x + 6)) + min(l) * max(l)**0.5
loss = mean(b) - max(b) * min(A) / 7 + sg(mean(sum(l * A))) * aggregate(l) + aggregate(b * x, logp != old_logp)
"""
PARAMETERS: dict[str, Any] = {
    "clip_low": 0.2, "clip_high": 0.3, "dual_clip": 3.0, "aggregation": "token_mean", "norm_tokens": 7.0, "clamp": 10.0,
}  # fmt: skip
AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm")


def random_rows(seed: int, lengths: list[int], spread: float = 0.5) -> Rows:
    """Rows with surprisals up to a few nats; ``spread`` is the standard deviation of the log-ratios. A is not centred."""
    rng = np.random.default_rng(seed)
    logp = [-rng.gamma(0.7, 1.5, n) - 1e-3 for n in lengths]

    def moved() -> list[list[float]]:
        return [(row + rng.normal(0, spread, len(row))).tolist() for row in logp]

    return Rows(rng.normal(0.3, 1.0, len(lengths)).tolist(), [r.tolist() for r in logp], moved(), moved(), moved())


def flat(rows: Rows) -> WrittenBatch:
    def joined(field: list[list[float]]) -> np.ndarray:
        return np.array([v for row in field for v in row], dtype=np.float64)

    return WrittenBatch(
        np.array([len(r) for r in rows.logp], dtype=int),
        rows.advantage,
        *(joined(getattr(rows, name)) for name in ("logp", "sampler_logp", "old_logp", "ref_logp")),
    )


@st.composite
def some_rows(draw: st.DrawFn) -> Rows:
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=4).filter(any))
    return random_rows(draw(st.integers(0, 2**32 - 1)), lengths, draw(st.sampled_from([0.01, 0.3, 2.0])))
