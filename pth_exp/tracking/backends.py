"""The names of the backends, which are verl's, and what each needs."""

from __future__ import annotations

from collections.abc import Sequence

BACKENDS: dict[str, str | None] = {"console": None, "file": None, "wandb": "wandb"}
"""Name to the distribution that it needs. ``file`` stands for the records, which are always written."""


def separate(backends: Sequence[str]) -> list[str]:
    """Those of the backends that run in a process of their own."""
    return [name for name in backends if BACKENDS[name] is not None]


def requirement(name: str) -> str:
    """The command that installs what a backend needs."""
    return f"pip install 'pth-exp[{name}]'"
