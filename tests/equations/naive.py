"""The language once more, read by recursion over Python's grammar, one token at a time in plain floats: an oracle for tests.

It shares nothing with the package. ``sg`` is evaluated on a frozen batch, so that central differences give the derivative that
an equation means.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b if b != 0 else math.nan,
    ast.Pow: lambda a, b: a**b,
    ast.Lt: lambda a, b: a < b,
    ast.LtE: lambda a, b: a <= b,
    ast.Gt: lambda a, b: a > b,
    ast.GtE: lambda a, b: a >= b,
    ast.Eq: lambda a, b: a == b,
    ast.NotEq: lambda a, b: a != b,
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "exp": math.exp,
    "expm1": math.expm1,
    "log": lambda x: math.log(x) if x > 0 else -math.inf,
    "abs": abs,
    "clip": lambda x, low, high: min(max(x, low), high),
    "where": lambda c, a, b: a if c else b,
    "min": min,
    "max": max,
}


@dataclass(frozen=True)
class Rows:
    """A batch, row by row."""

    advantage: Sequence[float]
    logp: Sequence[Sequence[float]]
    sampler_logp: Sequence[Sequence[float]]
    old_logp: Sequence[Sequence[float]]
    ref_logp: Sequence[Sequence[float]]


def value(text: str, rows: Rows, frozen: Rows, parameters: Mapping[str, Any]) -> float:
    """The loss that the text writes down; ``frozen`` is what stands inside sg(...)."""
    lines = {s.targets[0].id: s.value for s in ast.parse(text).body}  # type: ignore[attr-defined]
    return float(_Reader(lines, rows, frozen, parameters).read(lines["loss"], ()))


@dataclass
class _Reader:
    lines: Mapping[str, ast.expr]
    rows: Rows
    frozen: Rows
    parameters: Mapping[str, Any]
    known: dict[Any, Any] = field(default_factory=dict)
    rungs: dict[ast.AST, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.held = self if self.rows is self.frozen else replace(self, rows=self.frozen, known={})

    def rung(self, node: ast.AST) -> int:
        """0 token, 1 response, 2 batch."""
        if node not in self.rungs:
            self.rungs[node] = self._rung(node)
        return self.rungs[node]

    def _rung(self, node: ast.AST) -> int:
        match node:
            case ast.Name(id=name):
                if name in self.lines:
                    return self.rung(self.lines[name])
                return 0 if name.endswith("logp") else 1 if name in ("A", "T") else 2
            case ast.Call(func=ast.Name(id="aggregate")):
                return 2
            case ast.Call(func=ast.Name(id="mean" | "sum" | "min" | "max"), args=[only]):
                return self.rung(only) + 1
            case ast.Call(args=args):
                return min(map(self.rung, args))
        return min((self.rung(child) for child in ast.iter_child_nodes(node)), default=2)

    def read(self, node: ast.AST, at: tuple[int, ...]) -> Any:
        """The value at a place: () for the batch, (response,) or (response, token)."""
        match node:
            case ast.Constant():
                return node.value
            case ast.Name(id=name):
                if name in self.lines:
                    place = name, at[: 2 - self.rung(node)]
                    if place not in self.known:
                        self.known[place] = self.read(self.lines[name], place[1])
                    return self.known[place]
                if name == "A":
                    return self.rows.advantage[at[0]]
                if name == "T":
                    return len(self.rows.logp[at[0]])
                if name.endswith("logp"):
                    return getattr(self.rows, name)[at[0]][at[1]]
                return math.inf if self.parameters[name] is None else self.parameters[name]
            case ast.UnaryOp(op=op, operand=operand):
                inner = self.read(operand, at)
                return -inner if isinstance(op, ast.USub) else not inner
            case ast.BinOp(left=left, op=op, right=right):
                return OPERATORS[type(op)](self.read(left, at), self.read(right, at))
            case ast.BoolOp(op=op, values=values):
                return (all if isinstance(op, ast.And) else any)(self.read(v, at) for v in values)
            case ast.Compare():
                sides = [self.read(s, at) for s in (node.left, *node.comparators)]
                return all(OPERATORS[type(op)](a, b) for op, a, b in zip(node.ops, sides, sides[1:], strict=False))
            case ast.Call(func=ast.Name(id="sg"), args=[inner]):
                return self.held.read(inner, at)
            case ast.Call(func=ast.Name(id="aggregate"), args=args):
                return self.aggregate(args)
            case ast.Call(func=ast.Name(id=name), args=[only]) if name in ("mean", "sum", "min", "max"):
                values = [self.read(only, p) for p in self.below(self.rung(node), at)]
                total = {"sum": sum, "mean": sum, "min": min, "max": max}[name](values)
                return total / len(values) if name == "mean" else total
            case ast.Call(func=ast.Name(id=name), args=args):
                return FUNCTIONS[name](*(self.read(a, at) for a in args))
        raise AssertionError(ast.dump(node))

    def below(self, rung: int, at: tuple[int, ...]) -> list[tuple[int, ...]]:
        if rung == 1:
            return [(at[0], t) for t in range(len(self.rows.logp[at[0]]))]
        return [(i,) for i, row in enumerate(self.rows.logp) if len(row)]

    def aggregate(self, args: Sequence[ast.expr]) -> float:
        kept = []
        for i, row in enumerate(self.rows.logp):
            places = [(i, t) for t in range(len(row)) if len(args) == 1 or self.read(args[1], (i, t))]
            if places:
                kept.append([self.read(args[0], p) for p in places])
        if not kept:
            return 0.0
        match self.parameters["aggregation"]:
            case "token_mean":
                return sum(map(sum, kept)) / sum(map(len, kept))
            case "seq_mean_token_mean":
                return sum(sum(k) / len(k) for k in kept) / len(kept)
            case "seq_mean_token_sum":
                return sum(map(sum, kept)) / len(kept)
            case "seq_mean_token_sum_norm":
                return float(sum(map(sum, kept)) / len(kept) / self.parameters["norm_tokens"])
        raise AssertionError(self.parameters)


def gradient(text: str, rows: Rows, parameters: Mapping[str, Any], step: float = 1e-5) -> list[float]:
    """Central differences in every token's logp, sg held, token after token."""
    result = []
    for i, row in enumerate(rows.logp):
        for t in range(len(row)):
            ends = []
            for sign in (1, -1):
                moved = [list(r) for r in rows.logp]
                moved[i][t] += sign * step
                ends.append(value(text, replace(rows, logp=moved), rows, parameters))
            result.append((ends[0] - ends[1]) / (2 * step))
    return result
