"""Check 4, losses: is every loss the one that is written down? (Paper, section 4.4.)

Criterion: value and per-response gradient of the loss that trains equal those of ``arm.equation`` within 1e-5, relative, in
float64, on inputs that keep the learner away from sampler and reference; and so does the real backward pass, penalty included,
within what float32 can hold. A run that trains and logs says nothing about either. What differs is named: a scale, which an
optimiser may hide, or a direction.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pth_exp.checks.result import Outcome, Verdict
from pth_exp.records.reader import Row, RunRecords, spans

NAME = "losses"

TOLERANCE: Final = 1e-5
"""Relative, in float64. A right implementation stays ten orders of magnitude below, a wrong one is seldom near."""

SINGLE: Final = 1e-4
"""Relative, where float32 is held against float64. A log-ratio of 20 nats is rounded by 1e-6, and exp makes that a relative
error; a sequence's ratio sums them over its tokens. Measured: 1e-7 to 3e-7 for token losses, up to 6e-6 for sequence ratios."""

ALIKE: Final = 0.01
"""Gradients whose directions differ by less than this part of the error differ by a scale."""


@dataclass(frozen=True, slots=True)
class _Difference:
    """What was found beside the equation in one row: at the start (float64, float32) or in a backward pass.

    Errors are infinite where they are no number; cosines and norm ratios are as in ``records.fields``.
    """

    row: Row
    value_error: float
    gradient_error: float
    cosine: float
    norm_ratio: Sequence[float]
    response_cosine: float
    response_norm_ratio: Sequence[float]
    worst: Mapping[str, Any]

    @property
    def error(self) -> float:
        return max(self.value_error, self.gradient_error)


def check(run: RunRecords) -> Verdict:
    """Judges one run from its ``equations``, and from the updates whose backward pass was measured."""
    arm = run.config["arm"]
    equation = arm["equation"]
    start, single = _worst(run.equations, "float64"), _worst(run.equations, "float32")
    step = _worst(run.updates, "backward")
    numbers = [*([_size(start.error)] if start else []), *([f"backward {_size(step.error)}"] if step else [])]
    values: dict[str, Any] = {
        "loss": arm["loss"],
        "equation_sha256": None if equation is None else _sha256(equation),
        "start": start and start.row,
        "backward": step and {key: value for key, value in step.row.items() if key == "update" or key.startswith("backward/")},
    }
    details = tuple(_details(run, start, single, step))

    def say(outcome: Outcome, reason: str, number: str = ", ".join(numbers)) -> Verdict:
        own = ("float64/gradient_error", "backward/gradient_error")
        return Verdict(NAME, run.label, outcome, number, reason, details, values, self_reported=own)

    if equation is None:
        return say(Outcome.not_measured, "arm.equation is null: nothing is written to hold the loss against.", "no equation")
    if any(row.get("equation/sha256") != _sha256(equation) for row in run.equations if not row.get("not_measured")):
        return say(Outcome.not_measured, "The equation that was evaluated is not the frozen arm.equation.", "another equation")
    if start and start.error > TOLERANCE:
        return say(
            Outcome.failed,
            f"The loss {start.row['loss']} is not the equation of arm {arm['name']}. {_difference(start, TOLERANCE)}",
        )
    if step and step.error > SINGLE:
        where = f"At update {step.row['update']} the backward pass is not that of arm {arm['name']}'s equation and the penalty's."
        return say(Outcome.failed, f"{where} {_difference(step, SINGLE)}")
    missing = _missing(run)
    if missing:
        return say(Outcome.not_measured, missing, "not held against it")
    if single and single.error > SINGLE:
        return say(Outcome.warned, f"The loss is its equation in float64, and not in float32. {_difference(single, SINGLE)}")
    return say(Outcome.passed, "Value and gradients are those of the written equation, in the real backward pass too.")


def _missing(run: RunRecords) -> str | None:
    reasons = [row["not_measured"] for row in run.equations if row.get("not_measured")]
    if reasons or not run.equations:
        return f"The loss was not held against its equation: {reasons[0] if reasons else 'no attempt recorded it'}."
    for precision in ("float64", "float32"):
        if any(row.get(f"{precision}/gradient_error") is None or not row.get("responses") for row in run.equations):
            return f"The loss computed in {precision} was not held against its equation: no error of it is recorded."
    for row in run.updates:
        if row.get("backward/not_measured"):
            return f"At update {row['update']} the backward pass was not held against it: {row['backward/not_measured']}."
    measured = [row for row in run.updates if row.get("backward/gradient_error") is not None]
    if not any(row["update"] == 0 for row in measured):
        return "The backward pass of update 0 was not held against the equation."
    if not any(row.get("coef/max_abs") for row in measured):  # the penalty alone may have a gradient
        where = f"update {spans([row['update'] for row in measured])}"
        return f"The loss had no gradient in the backward pass of {where}, as where all rewards are equal: any loss would agree."
    if run.config["kl"]["coef"] and len(run.updates) > 1 and not any(row["update"] for row in measured):
        return "The backward pass was held against the equations at update 0 alone, where the penalty has no gradient yet."
    return None


def _worst(rows: Sequence[Row], prefix: str) -> _Difference | None:
    measured = [row for row in rows if row.get(f"{prefix}/gradient_error") is not None]
    return max((_read(row, prefix) for row in measured), key=lambda difference: difference.error, default=None)


def _read(row: Row, prefix: str) -> _Difference:
    def error(name: str) -> float:
        value = row.get(f"{prefix}/{name}")
        return math.inf if value is None or math.isnan(value) else float(value)

    def alike(name: str) -> Any:
        value = row.get(f"{prefix}/{name}")
        return math.nan if value is None else value

    return _Difference(
        row, error("value_error"), error("gradient_error"), alike("cosine"), row.get(f"{prefix}/norm_ratio") or (),
        alike("response_cosine"), row.get(f"{prefix}/response_norm_ratio") or (), row.get(f"{prefix}/worst") or {},
    )  # fmt: skip


def _difference(found: _Difference, tolerance: float) -> str:
    """What kind of difference, on which input, by how much."""
    if found.gradient_error <= tolerance:
        return f"The gradients agree, and the relative error of the value is {_size(found.value_error)}."
    worst = found.worst
    where = f"response {worst.get('response')} ({worst.get('tokens')} tokens) of the input {worst.get('input')!r}"
    return f"{_kind(found)}. The relative error of the gradient is {_size(found.gradient_error)} on {where}."


def _kind(found: _Difference) -> str:
    if not all(map(math.isfinite, (found.gradient_error, found.cosine, found.response_cosine))):
        return "One of the two has a gradient where the other has none, or one that is no number"
    slack = max(ALIKE * found.gradient_error, 1e-6)
    low, high = found.response_norm_ratio
    constant = high - low <= slack * high
    if constant and _apart(found.cosine) <= slack:
        return f"It is a scale (cosine 1): every gradient is {high:.4g} times the written one"
    if constant and _apart(-found.cosine) <= slack:
        return f"It is a sign (cosine -1): every gradient is -{high:.4g} times the written one"
    turned = f"cosine down to {found.cosine:.4g}, norm ratio {found.norm_ratio[0]:.3g} to {found.norm_ratio[1]:.3g}"
    if _apart(found.response_cosine) <= slack:
        return (
            "It is a scale of each response's own (cosine 1 within a response): its gradient is "
            f"{low:.3g} to {high:.3g} times the written one, which turns the batch's ({turned})"
        )
    return f"It is a direction: within a response the cosine falls to {found.response_cosine:.4g}, over a batch: {turned}"


def _apart(cosine: float) -> float:
    """Distance of two unit vectors with this cosine."""
    return math.sqrt(max(0.0, 2 * (1 - cosine)))


def _details(run: RunRecords, start: _Difference | None, single: _Difference | None, step: _Difference | None) -> Iterator[str]:
    if start:
        inputs = f"{start.row['inputs']} inputs, {start.row['responses']} responses"
        errors = f"value off by {_size(start.value_error)}, gradient by {_size(start.gradient_error)} in float64"
        yield f"{inputs}: {errors}; in float32 by {_size(single.error) if single else 'not measured'}."
    if step:
        updates = spans([row["update"] for row in run.updates if row.get("backward/gradient_error") is not None])
        errors = f"value off by at most {_size(step.value_error)}, gradient by {_size(step.gradient_error)}"
        yield f"Backward pass, penalty included, at update {updates}: {errors}."


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _size(error: float) -> str:
    """Two digits: 0.43, 1.2e-15."""
    if error == 0 or error >= 0.01:
        return f"{error:.2g}"
    digits, _, exponent = f"{error:.1e}".partition("e")
    return f"{digits}e{int(exponent)}"
