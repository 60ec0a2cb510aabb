"""The loss held against the equation that its arm writes down (check 4): before training, and in the real backward pass."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from pth_exp.equations import Equation, Evaluation, WrittenBatch, evaluate, parse, penalty_equation
from pth_exp.losses.types import Loss, TokenBatch, Totals
from pth_exp.probes.inputs import Input, fixed_inputs, random_inputs
from pth_exp.probes.likeness import Differences
from pth_exp.schema import Arm, KlConfig

POLICIES = ("sampler_logp", "old_logp", "ref_logp")
ROUNDING: Final = 1e-6
"""Nats. A float32 log-ratio so near to where a clip or a mask begins may fall on either side of it."""

RANDOM = {"count": 12, "responses": 16, "longest": 48}
LONG = {"count": 1, "responses": 8, "longest": 1024, "seed": 3}


def sha256(equation: str) -> str:
    return hashlib.sha256(equation.encode()).hexdigest()


def is_due(update: int) -> bool:
    """Whether an update's backward pass is held against the equation: update 0, and 1, 2, 4, 8, ...

    At update 0 the learner still is its reference, so a penalty has no gradient there that could be wrong.
    """
    return update & (update - 1) == 0


def probe_equation(arm: Arm, loss: Loss) -> dict[str, Any]:
    """Entries of an ``equations`` row: the implemented loss, as bound for this run, against ``arm.equation``.

    Fixed and random inputs, in float64 and, apart, in float32. Where it cannot be measured the row says why; nothing is raised,
    and no random stream moves.
    """
    start = time.perf_counter()
    row: dict[str, Any] = {"loss": arm.loss}
    if arm.equation is None:
        return {**row, "not_measured": "arm.equation is null: nothing is written to hold the loss against"}
    row["equation/sha256"] = sha256(arm.equation)
    long = (Input(f"long, {given.name}", given.batch) for given in random_inputs(**LONG))
    inputs = [*fixed_inputs(), *random_inputs(**RANDOM), *long]
    try:
        equation = parse(arm.equation, arm.parameters())
        with torch.random.fork_rng(devices=[]):
            double = compare(loss, equation, arm, inputs, torch.float64)
            single = compare(loss, equation, arm, inputs, torch.float32)
    except Exception as error:  # a loss or a reference of the user's own may raise anything; the run goes on without a verdict
        return {**row, "not_measured": _reason(error)}
    row |= {"inputs": single.inputs, "responses": single.responses}
    return {**row, **double.entries("float64"), **single.entries("float32"), "timing_s/equation": time.perf_counter() - start}


def compare(loss: Loss, equation: Equation, arm: Arm, inputs: Iterable[Input], dtype: torch.dtype) -> Differences:
    """A loss computed in ``dtype`` against an equation in float64, with the arm's parameters.

    Raises whatever the loss raises, and ``EquationError`` for what the equation asks for and does not get.
    """
    differences, parameters = Differences(), arm.parameters()
    for given in inputs:
        batch = given.batch
        lengths = np.asarray(batch.lengths)
        padded = _padded(batch, dtype)
        expected = evaluate(equation, batch, parameters)
        scale = float(np.abs(expected.gradient * np.asarray(batch.logp)).sum())
        near = () if dtype is torch.float64 else _rounded(batch)
        others = (evaluate(equation, other, parameters) for other in near)
        differences.add(given.name, lengths.tolist(), _found(loss, [padded]), expected, others, scale)
        if dtype is torch.float64 and getattr(loss, "splittable", False):
            # as a stack does that hands the loss one micro-batch after another
            differences.add(f"{given.name}, in parts", lengths.tolist(), _found(loss, _parts(padded)), expected, (), scale)
    return differences


def _found(loss: Loss, parts: Sequence[TokenBatch]) -> Evaluation:
    """Value and gradient of a loss that is handed a batch in parts."""
    outputs = [loss(part) for part in parts]
    gradients = [-o.token_coef[p.mask].double().numpy() for o, p in zip(outputs, parts, strict=True)]
    return Evaluation(sum(float(o.loss.detach()) for o in outputs), np.concatenate(gradients))


def _parts(batch: TokenBatch) -> list[TokenBatch]:
    """A batch's rows in two parts of different sizes, each of which knows how much the whole holds."""
    totals = Totals(int(batch.mask.sum()), int(batch.mask.any(dim=1).sum()))
    cut = (len(batch.mask) + 2) // 3
    fields = ("logp", "advantage", "mask", *POLICIES)
    rows = [slice(None, cut), slice(cut, None)] if cut < len(batch.mask) else [slice(None)]
    return [TokenBatch(**{name: getattr(batch, name)[part] for name in fields}, totals=totals) for part in rows]


def probe_backward(arm: Arm, kl: KlConfig, batch: TokenBatch, total: float, logp_grad: Tensor) -> dict[str, Any]:
    """Entries of an update's row: the backward pass against the equations of the arm and of the penalty, in float64.

    float32 log-probabilities are float64 numbers exactly, so what differs is the stack's arithmetic alone.

    Args:
        batch: of the first optimiser step, the whole of it.
        total: the loss that was stepped on.
        logp_grad: [B, T] d total / d logp, as the backward pass left it.
    """
    try:
        if arm.equation is None:
            raise ValueError("arm.equation is null: nothing is written to hold the loss against")
        return _backward(parse(arm.equation, arm.parameters()), arm, kl, batch, total, logp_grad).entries("backward")
    except Exception as error:  # see probe_equation
        return {"backward/not_measured": _reason(error)}


def _backward(equation: Equation, arm: Arm, kl: KlConfig, batch: TokenBatch, total: float, logp_grad: Tensor) -> Differences:
    written = _flat(batch)
    found = Evaluation(total, logp_grad[batch.mask].double().cpu().numpy())
    own = evaluate(equation, written, arm.parameters())
    logp = np.asarray(written.logp)
    value_scale = np.abs(own.gradient * logp).sum()
    gradient_scale = np.zeros_like(logp)

    def expected(batch: WrittenBatch) -> Evaluation:
        loss, penalty = evaluate(equation, batch, arm.parameters()), _penalty(kl, kl.estimator, batch)
        return Evaluation(loss.value + kl.coef * penalty.value, loss.gradient + kl.coef * penalty.gradient)

    if kl.coef:
        # near the reference k2 and k3 are small differences of numbers as large as k1's
        gradient_scale = kl.coef * _penalty(kl, "k1", written).gradient
        value_scale = max(value_scale, np.abs(gradient_scale * (logp - np.asarray(written.ref_logp))).sum())
    differences, lengths = Differences(), np.asarray(written.lengths).tolist()
    others = (expected(other) for other in _rounded(written))
    differences.add("the batch", lengths, found, expected(written), others, value_scale, gradient_scale)
    return differences


def _penalty(kl: KlConfig, estimator: str, batch: WrittenBatch) -> Evaluation:
    if not kl.coef:
        return Evaluation(0.0, np.zeros(np.shape(batch.logp)))
    return evaluate(penalty_equation(estimator), batch, {"clamp": kl.clamp, "aggregation": kl.aggregation})


def _padded(batch: WrittenBatch, dtype: torch.dtype) -> TokenBatch:
    """As a stack hands it to a loss; slots outside the mask hold NaN."""
    lengths = torch.as_tensor(batch.lengths)
    mask = torch.arange(max(1, int(lengths.max()))) < lengths[:, None]

    def rows(values: Any) -> Tensor:
        padded = torch.full(mask.shape, torch.nan, dtype=torch.float64)
        padded[mask] = torch.as_tensor(values)
        return padded.to(dtype)

    sampler, old, ref = (rows(getattr(batch, policy)) for policy in POLICIES)
    return TokenBatch(rows(batch.logp), torch.as_tensor(batch.advantage).to(dtype), mask, sampler, old, ref)


def _flat(batch: TokenBatch) -> WrittenBatch:
    def tokens(values: Tensor | None) -> Any:
        return None if values is None else values.detach()[batch.mask].double().cpu().numpy()

    policies = {policy: tokens(getattr(batch, policy)) for policy in POLICIES}
    lengths, advantage = batch.mask.sum(dim=1).cpu().numpy(), batch.advantage.double().cpu().numpy()
    return WrittenBatch(lengths, advantage, tokens(batch.logp), **policies)


def _rounded(batch: WrittenBatch) -> Iterator[WrittenBatch]:
    """The batch as rounding may have had it. A ratio is of the learner to another policy, or of old policy to sampler."""
    for field in ("logp", "sampler_logp"):
        values = getattr(batch, field)
        if values is not None:
            for by in (-ROUNDING, ROUNDING):
                yield dataclasses.replace(batch, **{field: np.asarray(values) + by})


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"
