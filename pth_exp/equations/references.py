"""Plain numpy references of losses that the language cannot say, such as one that sorts.

A reference is written from the source, as its loss is, and calls nothing of ``pth_exp.losses``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from pth_exp.equations.batch import Array, Evaluation, WrittenBatch

Reference = Callable[[WrittenBatch, Mapping[str, Any]], Evaluation]
"""``f(batch, the arm's parameters)``: the loss and its exact gradient in ``batch.logp``."""

REFERENCES: dict[str, Reference] = {}


def reference(name: str) -> Callable[[Reference], Reference]:
    """Decorator that registers a function for ``loss = reference("name")``; a study's my_losses.py may use it as well.

    Raises ``ValueError`` for a name that is taken.
    """

    def decorate(function: Reference) -> Reference:
        if name in REFERENCES:
            raise ValueError(f"reference {name!r} is registered already; choose another name")
        REFERENCES[name] = function
        return function

    return decorate


@reference("m2po")
def m2po(batch: WrittenBatch, parameters: Mapping[str, Any]) -> Evaluation:
    """M2PO: the tokens with the largest squared log-ratios go, one size after the other, until the others' mean is in budget.

    As equations, with keep the tokens that stay: d = clip(logp - old_logp, -20, 20), loss = aggregate(where(keep, -A exp(d), 0)).
    The squares are constants, as under sg; ``harmful_only`` considers those alone at which A and d have the same sign.
    """
    if batch.old_logp is None:
        raise ValueError("the batch has no old_logp, which the reference m2po reads")
    lengths, logp = np.asarray(batch.lengths), np.asarray(batch.logp)
    raw = logp - np.asarray(batch.old_logp)
    d = np.clip(raw, -20.0, 20.0)
    advantage = np.repeat(np.asarray(batch.advantage), lengths)
    considered = advantage * d > 0 if parameters["harmful_only"] else np.full(d.shape, True)
    left = considered
    while left.any() and np.mean(d[left] ** 2) > parameters["threshold"]:
        left = left & (d**2 < np.max(d[left] ** 2))
    keep = left | ~considered
    terms = np.where(keep, -advantage * np.exp(d), 0.0)
    weights = _weights(lengths, parameters)
    inside = (raw >= -20.0) & (raw <= 20.0)
    return Evaluation(float(np.sum(weights * terms)), np.where(inside, weights * terms, 0.0))


def _weights(lengths: Array, parameters: Mapping[str, Any]) -> Array:
    """[n] weight of each token's term in ``aggregate``."""
    responses = max(int(np.sum(lengths > 0)), 1)
    match parameters["aggregation"]:
        case "token_mean":
            each = np.full(len(lengths), 1 / max(int(np.sum(lengths)), 1))
        case "seq_mean_token_mean":
            each = 1 / (responses * np.maximum(lengths, 1))
        case "seq_mean_token_sum":
            each = np.full(len(lengths), 1 / responses)
        case "seq_mean_token_sum_norm":
            each = np.full(len(lengths), 1 / (responses * parameters["norm_tokens"]))
        case unknown:
            raise ValueError(f"aggregation is {unknown!r}, which the reference does not know")
    return np.repeat(each, lengths)
