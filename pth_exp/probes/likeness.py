"""How alike two gradients are: direction, size, and error response by response."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pth_exp.equations import Evaluation

FLOOR: Final = 1e-9
"""Share of the batch's gradient below which a response's is rounding, and an error in it measured by the batch's instead."""

OFF: Final = 1e-6
"""Errors above this ask whether another reading of the input, within rounding, explains them."""


def cosine_and_norm_ratio(a: NDArray[Any], b: NDArray[Any]) -> tuple[float, float] | None:
    """Cosine of [n] ``a`` and ``b``, and ``||a|| / ||b||``, in float64.

    None where either is zero, NaN where either is not finite.
    """
    a, b = a.astype(np.float64), b.astype(np.float64)
    size_a, size_b = float(np.linalg.norm(a)), float(np.linalg.norm(b))
    if size_a == 0 or size_b == 0:
        return None
    if not np.isfinite([size_a, size_b]).all():
        return float("nan"), float("nan")
    return float(np.clip((a / size_a) @ (b / size_b), -1.0, 1.0)), size_a / size_b


@dataclass(slots=True)
class Differences:
    """How losses as found differ from losses as expected, over all inputs added.

    Attributes:
        value_error: the largest, relative.
        gradient_error: the largest of a response, relative to the norm of the response's expected gradient. Infinite where a
            number was expected and none was found, or nothing was expected and something was found.
        worst: the input, the response and its length of that error.
        inputs, responses: how many were compared; a response without a token is none.
    """

    value_error: float = 0.0
    gradient_error: float = 0.0
    worst: dict[str, Any] | None = None
    inputs: int = 0
    responses: int = 0
    _whole: list[tuple[float, float]] = field(default_factory=list)
    _single: list[tuple[float, float]] = field(default_factory=list)

    def add(
        self,
        name: str,
        lengths: Sequence[int],
        found: Evaluation,
        expected: Evaluation,
        others: Iterable[Evaluation] = (),
        value_scale: float = 0.0,
        gradient_scale: NDArray[Any] | None = None,
    ) -> None:
        """One input of ``len(lengths)`` responses.

        Args:
            others: losses that would do as well; where the expected one is off, a response is held against the nearest.
            value_scale, gradient_scale: what an error is measured by where the expected number is a difference of larger ones:
                the size of those, for the value, and [n] for the gradient.
        """
        scales = _norms(np.zeros_like(found.gradient) if gradient_scale is None else gradient_scale, lengths)
        value_error, error = _errors(found, expected, lengths, value_scale, scales)
        for other in others if max(value_error, *error) > OFF else ():
            of_value, of_gradient = _errors(found, other, lengths, value_scale, scales)
            value_error, error = min(value_error, of_value), np.minimum(error, of_gradient)
        present = np.asarray(lengths) > 0
        self.inputs, self.responses = self.inputs + 1, self.responses + int(present.sum())
        self.value_error = max(self.value_error, value_error)
        at = int(error.argmax()) if present.any() else None
        if at is not None and (self.worst is None or error[at] > self.gradient_error):
            self.gradient_error = float(error[at])
            self.worst = {"input": name, "response": at, "tokens": int(lengths[at])}
        whole = cosine_and_norm_ratio(found.gradient, expected.gradient)
        pairs = zip(_parts(found.gradient, lengths), _parts(expected.gradient, lengths), strict=True)
        self._whole += [whole] if whole else []
        self._single += [likeness for a, b in pairs if (likeness := cosine_and_norm_ratio(a, b))]

    def entries(self, prefix: str) -> dict[str, Any]:
        """As columns of a record; cosines are the least, norm ratios (found over expected) the least and the largest."""
        return {
            f"{prefix}/value_error": self.value_error,
            f"{prefix}/gradient_error": self.gradient_error,
            f"{prefix}/worst": self.worst,
            f"{prefix}/cosine": _least(self._whole),
            f"{prefix}/norm_ratio": _range(self._whole),
            f"{prefix}/response_cosine": _least(self._single),
            f"{prefix}/response_norm_ratio": _range(self._single),
        }


def _errors(
    found: Evaluation, expected: Evaluation, lengths: Sequence[int], value_scale: float, scales: NDArray[Any]
) -> tuple[float, NDArray[Any]]:
    floor = FLOOR * float(np.linalg.norm(expected.gradient))
    size = np.maximum(np.maximum(_norms(expected.gradient, lengths), scales), floor)
    value = _relative(abs(found.value - expected.value), max(abs(expected.value), value_scale))
    return float(value), _relative(_norms(found.gradient - expected.gradient, lengths), size)


def _relative(error: Any, size: Any) -> NDArray[Any]:
    error = np.asarray(error, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(error == 0, 0.0, error / size)
    return np.where(np.isnan(ratio), np.inf, ratio)


def _parts(values: NDArray[Any], lengths: Sequence[int]) -> list[NDArray[Any]]:
    return np.split(values, np.cumsum(lengths)[:-1])


def _norms(values: NDArray[Any], lengths: Sequence[int]) -> NDArray[Any]:
    return np.array([np.linalg.norm(part) for part in _parts(values, lengths)])


def _least(likeness: Sequence[tuple[float, float]]) -> float | None:
    return float(np.min([cosine for cosine, _ in likeness])) if likeness else None


def _range(likeness: Sequence[tuple[float, float]]) -> list[float] | None:
    ratios = [ratio for _, ratio in likeness]
    return [float(np.min(ratios)), float(np.max(ratios))] if ratios else None
