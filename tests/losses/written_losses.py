"""The losses as written, in plain numpy, one response at a time; shares nothing with the package.

``frozen`` is the learner's log-probabilities wherever the equation has a stop-gradient, so that central differences in ``logp``
give the derivative that the equation means. Rows are lists of per-token arrays: no padding, no mask.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

Rows = Sequence[np.ndarray]


@dataclass
class Written:
    """A batch without padding."""

    logp: Rows
    advantage: Sequence[float]
    sampler: Rows
    old: Rows


def aggregated(terms: Rows, how: str) -> float:
    terms = [t for t in terms if len(t)]
    if not terms:
        return 0.0
    if how == "token_mean":
        return float(np.concatenate(terms).mean())
    if how == "seq_mean_token_mean":
        return float(np.mean([t.mean() for t in terms]))
    return float(np.mean([t.sum() for t in terms]))


def ratio(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.exp(np.minimum(np.maximum(a - b, -20.0), 20.0))


def ppo_terms(b: Written, low: float = 0.2, high: float = 0.2, dual: float | None = 3.0) -> list[np.ndarray]:
    out = []
    for lp, old, a in zip(b.logp, b.old, b.advantage, strict=True):
        r = ratio(lp, old)
        if a >= 0:
            term = -a * np.minimum(r, 1 + high)
        else:
            term = -a * np.maximum(r, 1 - low)
            if dual is not None:
                term = np.minimum(term, -a * dual)
        out.append(term)
    return out


def ppo_clip(b: Written, frozen: Rows, how: str = "token_mean") -> float:
    return aggregated(ppo_terms(b), how)


def tis_ppo(b: Written, frozen: Rows, how: str = "token_mean") -> float:
    weights = [np.minimum(ratio(o, q), 2.0) for o, q in zip(b.old, b.sampler, strict=True)]
    return aggregated([w * t for w, t in zip(weights, ppo_terms(b), strict=True)], how)


def tis_reinforce(b: Written, frozen: Rows, how: str = "seq_mean_token_sum") -> float:
    rows = zip(b.logp, frozen, b.sampler, b.advantage, strict=True)
    return aggregated([a * np.minimum(ratio(f, q), 2.0) * -lp for lp, f, q, a in rows], how)


def san(b: Written, frozen: Rows) -> float:
    values = []
    for lp, f, a in zip(b.logp, frozen, b.advantage, strict=True):
        if len(lp) == 0:
            continue
        fixed = -f
        w = np.array([min(1.0, fixed.mean() / s) if s > 0 else 1.0 for s in fixed])
        robust, fixed_robust = (w * -lp).sum() / w.sum(), (w * fixed).sum() / w.sum()
        values.append(a * robust / max(fixed_robust, 1e-6))
    return float(np.mean(values)) if values else 0.0


LOSSES: dict[str, Callable[..., float]] = {
    "grpo": ppo_clip,
    "ppo_clip": ppo_clip,
    "tis_ppo": tis_ppo,
    "tis_reinforce": tis_reinforce,
    "san": san,
}


def surprisal_derivative(loss: Callable[..., float], b: Written, *arguments: str, step: float = 1e-5) -> list[np.ndarray]:
    """Central differences of the loss in each token's surprisal."""
    result = []
    for i, row in enumerate(b.logp):
        derivative = np.zeros(len(row))
        for t in range(len(row)):
            values = []
            for sign in (1, -1):
                moved = [r.copy() for r in b.logp]
                moved[i][t] -= sign * step  # a higher surprisal is a lower log-probability
                values.append(loss(replace(b, logp=moved), b.logp, *arguments))
            derivative[t] = (values[0] - values[1]) / (2 * step)
        result.append(derivative)
    return result
