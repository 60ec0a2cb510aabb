"""What a parsed equation is made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum


class EquationError(ValueError):
    """An equation that cannot be read or evaluated.

    Attributes:
        what: what is wrong.
        remedy: what to write or supply instead.
        line, column: place in the equation's text, counted from 1; None if no single place is at fault.
    """

    def __init__(self, what: str, remedy: str, line: int | None = None, column: int | None = None) -> None:
        self.what, self.remedy, self.line, self.column = what, remedy, line, column
        place = "" if line is None else f"line {line}, column {column}: "
        super().__init__(f"{place}{what}; {remedy}")


class Rung(IntEnum):
    """What a value is one of. A coarser value stands for each of the finer ones below it."""

    token = 0
    response = 1
    batch = 2

    def __str__(self) -> str:
        return ("per token", "per response", "a number of the batch")[self]


INPUTS = {
    "logp": ("logp", Rung.token),
    "sampler_logp": ("sampler_logp", Rung.token),
    "old_logp": ("old_logp", Rung.token),
    "ref_logp": ("ref_logp", Rung.token),
    "A": ("advantage", Rung.response),
    "T": ("lengths", Rung.response),
}
"""Name in an equation to the field of the batch, and its rung."""

FUNCTIONS = {
    "exp": (1, 1), "expm1": (1, 1), "log": (1, 1), "abs": (1, 1), "sg": (1, 1), "clip": (3, 3), "where": (3, 3),
    "mean": (1, 1), "sum": (1, 1), "min": (1, None), "max": (1, None), "aggregate": (1, 2), "reference": (1, 1),
}  # fmt: skip
"""Function to the least and the most arguments it takes."""


@dataclass(frozen=True, slots=True)
class Node:
    """An expression; ``condition`` tells true-or-false from a number."""

    rung: Rung
    condition: bool
    line: int
    column: int


@dataclass(frozen=True, slots=True)
class Number(Node):
    value: float


@dataclass(frozen=True, slots=True)
class Name(Node):
    """An input, a name bound on an earlier line, or else a parameter of the arm."""

    name: str


@dataclass(frozen=True, slots=True)
class Apply(Node):
    """An operator or a function applied to expressions.

    ``op`` is a function's name or one of ``+ - * / ** neg < <= > >= == != and or not``. ``min`` and ``max`` of one argument go
    one rung up; of more, they are elementwise.
    """

    op: str
    args: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Binding:
    """One line: ``name = expression``."""

    name: str
    expression: Node


@dataclass(frozen=True, slots=True)
class Equation:
    """A loss as written.

    Attributes:
        text: as its author wrote it.
        bindings: its lines in order; the last binds ``loss``. Empty when the equation is a reference.
        inputs: fields of the batch that it reads, such as ``ref_logp``; not known for a reference.
        parameters: names of the arm's parameters that it reads; not known for a reference.
        reference: name of the numpy function that stands in for an equation which the language cannot say.
    """

    text: str
    bindings: tuple[Binding, ...]
    inputs: frozenset[str]
    parameters: frozenset[str]
    reference: str | None = None

    def place(self, name: str) -> str:
        """Where an input or a parameter is first read: ``line 2, column 5``."""
        found = next(n for b in self.bindings for n in _nodes(b.expression) if isinstance(n, Name) and n.name == name)
        return f"line {found.line}, column {found.column}"


def _nodes(node: Node) -> Iterator[Node]:
    yield node
    if isinstance(node, Apply):
        for inner in node.args:
            yield from _nodes(inner)
