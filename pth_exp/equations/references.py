"""Plain numpy references of losses that the language cannot say, such as one that sorts.

A reference is written from the source, as its loss is, and calls nothing of ``pth_exp.losses``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pth_exp.equations.batch import Evaluation, WrittenBatch

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
