"""A line in the run's log for each update and validation."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from typing import Any

_SHOWN = {
    "updates": ("reward/trained", "actor/loss", "actor/grad_norm", "rollout_corr/kl", "data/age", "response_length/mean"),
    "evals": ("accuracy", "mean_length"),
}


def show(kind: str, row: Mapping[str, Any]) -> None:
    """One row of ``kind`` as a line, if its kind is one for people. A log that cannot be written to is left alone."""
    if kind not in _SHOWN:
        return
    numbers = [f"{name} {row[name]:.4g}" for name in _SHOWN[kind] if isinstance(row.get(name), (int, float))]
    head = f"update {row['update']}" if kind == "updates" else f"after {row['update']} updates"
    with contextlib.suppress(OSError):
        print(f"{head}: {', '.join(numbers)}" if numbers else head, file=sys.stderr)
