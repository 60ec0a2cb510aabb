"""How alike two gradients are: direction and size."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


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
