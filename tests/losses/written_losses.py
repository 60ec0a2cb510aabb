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
    ref: Rows


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


def responses(b: Written, frozen: Rows, value: Callable[..., float]) -> float:
    """Mean of ``value(surprisal, the same held fixed, the reference's)`` times the advantage over the responses with a token."""
    rows = [(a, -lp, -f, -r) for a, lp, f, r in zip(b.advantage, b.logp, frozen, b.ref, strict=True) if len(lp)]
    return float(np.mean([a * value(*rest) for a, *rest in rows])) if rows else 0.0


def capped(fixed: np.ndarray, anchor: np.ndarray) -> np.ndarray:
    return np.array([min(1.0, a / s) if s > 0 else 1.0 for s, a in zip(fixed, anchor, strict=True)])


def own(s: np.ndarray) -> np.ndarray:
    return np.full(len(s), s.mean())


def robust_over_itself(live: np.ndarray, fixed: np.ndarray, w: np.ndarray) -> float:
    return float((w @ live / w.sum()) / max(w @ fixed / w.sum(), 1e-6)) if w.sum() else 0.0


def san_plus(live: np.ndarray, s: np.ndarray, ref: np.ndarray) -> float:
    a = np.maximum(ref, s.mean())
    return float(capped(s, a) @ live / max(a.sum(), 1e-6 * len(live)))


def san_ref(live: np.ndarray, s: np.ndarray, ref: np.ndarray) -> float:
    w = capped(s, ref)
    return float(w @ live / w.sum() / max(ref.mean(), 1e-6)) if w.sum() else 0.0


def seq_gain(live: np.ndarray, s: np.ndarray, ref: np.ndarray) -> float:
    w = capped(s, own(s))
    return float(live.sum() / max(w @ s, 1e-6 * w.sum()))


def seq_norm(live: np.ndarray, s: np.ndarray, ref: np.ndarray) -> float:
    return float(live.sum() / max(s.sum(), 1e-6 * len(live)))


SEQUENCE: dict[str, Callable[..., float]] = {
    "san_plus": san_plus,
    "san_plus_written": lambda live, s, ref: robust_over_itself(live, s, capped(s, np.maximum(ref, s.mean()))),
    "san_ref": san_ref,
    "san_ref_written": lambda live, s, ref: robust_over_itself(live, s, capped(s, ref)),
    "seq_norm": seq_norm,
    "asympo_reading": seq_norm,
    "seq_gain": seq_gain,
    "token_weights": lambda live, s, ref: float(capped(s, own(s)) @ live / max(s.sum(), 1e-6 * len(live))),
}


def sequence_loss(name: str) -> Callable[[Written, Rows], float]:
    return lambda b, frozen: responses(b, frozen, SEQUENCE[name])


LOSSES: dict[str, Callable[..., float]] = {
    "grpo": ppo_clip,
    "ppo_clip": ppo_clip,
    "tis_ppo": tis_ppo,
    "tis_reinforce": tis_reinforce,
    "san": san,
    **{name: sequence_loss(name) for name in SEQUENCE},
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
