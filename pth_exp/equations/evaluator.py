"""Value and exact gradient of an equation, in float64, by reverse mode over its parsed lines.

A value of the rung token has shape [n], of the rung response [R], of the batch [1]. Responses without a token are left out
before anything is computed, so that they count in nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pth_exp.equations.batch import Array, Evaluation, WrittenBatch
from pth_exp.equations.nodes import INPUTS, Apply, Equation, EquationError, Name, Node, Number, Rung
from pth_exp.equations.parser import nearest
from pth_exp.equations.references import REFERENCES

Backward = Callable[[Array], Array]
"""From the gradient in a result to the gradient in one argument, of the result's shape."""


def evaluate(equation: Equation, batch: WrittenBatch, parameters: Mapping[str, Any]) -> Evaluation:
    """The loss on a batch and its gradient in ``logp``. ``parameters`` are the arm's; None reads as infinity, "no bound".

    A batch without any token has loss 0. Raises :class:`EquationError` naming a field or a parameter that is missing.
    """
    if equation.reference is not None:
        if equation.reference not in REFERENCES:
            hint = nearest(equation.reference, REFERENCES)
            known = ", ".join(sorted(REFERENCES)) or "none"
            raise EquationError(f"reference {equation.reference!r} is not registered{hint}", f"known are: {known}")
        return REFERENCES[equation.reference](batch, parameters)
    if batch.logp.size == 0:
        return Evaluation(0.0, np.zeros(0))
    with np.errstate(all="ignore"):  # a branch that is not taken may be anything
        evaluator = _Evaluator(batch, parameters)
        for binding in equation.bindings:
            evaluator.bind(binding.name, binding.expression)
        return evaluator.result()


@dataclass(slots=True, eq=False)
class _Value:
    """A computed value; ``parents`` are the values that its gradient goes to, empty for a constant."""

    data: Array
    rung: Rung
    parents: Sequence[tuple[_Value, Backward]] = ()
    tracked: bool = False
    gradient: Array | None = None


class _Evaluator:
    def __init__(self, batch: WrittenBatch, parameters: Mapping[str, Any]) -> None:
        self._batch = batch
        self._parameters = parameters
        self._present = batch.lengths > 0
        lengths = batch.lengths[self._present]
        responses = len(lengths)
        # for each rung: where the groups of the next rung begin, to which group each element belongs, sizes of the groups
        self._starts = {Rung.token: np.cumsum(lengths) - lengths, Rung.response: np.zeros(1, dtype=np.int64)}
        self._member = {
            Rung.token: np.repeat(np.arange(responses), lengths),
            Rung.response: np.zeros(responses, dtype=np.int64),
        }
        self._sizes = {Rung.token: lengths, Rung.response: np.array([responses])}
        self._tape: list[_Value] = []
        self._named: dict[str, _Value] = {}

    def bind(self, name: str, expression: Node) -> None:
        self._named[name] = self._value(expression)

    def result(self) -> Evaluation:
        """Reverse mode from ``loss`` to ``logp``."""
        loss = self._named["loss"]
        if loss.tracked:
            loss.gradient = np.ones(1)
        for value in reversed(self._tape):
            if value.gradient is not None:
                for parent, backward in value.parents:
                    part = backward(value.gradient)
                    parent.gradient = part if parent.gradient is None else parent.gradient + part
        logp = self._named.get("logp")
        gradient = None if logp is None else logp.gradient
        return Evaluation(float(loss.data[0]), np.zeros_like(self._batch.logp) if gradient is None else gradient)

    def _value(self, node: Node) -> _Value:
        match node:
            case Number():
                return _Value(np.array([node.value]), Rung.batch)
            case Name():
                if node.name not in self._named:
                    self._named[node.name] = self._input(node) if node.name in INPUTS else self._parameter(node)
                return self._named[node.name]
            case Apply(op="aggregate"):
                return self._aggregate(node)
            case Apply(op="sg"):
                held = self._value(node.args[0])
                return _Value(held.data, held.rung)
            case Apply() if node.op in _REDUCTIONS and len(node.args) == 1:
                return self._reduce(node.op, self._value(node.args[0]))
            case Apply():
                return self._elementwise(node)
        raise AssertionError(node)

    def _input(self, node: Name) -> _Value:
        name, rung = INPUTS[node.name]
        given = getattr(self._batch, name)
        if given is None:
            raise EquationError(
                f"the batch has no {name}, which the equation reads", "have the stack record it", node.line, node.column
            )
        data = given if rung is Rung.token else given[self._present].astype(np.float64)
        if np.isnan(data).any():
            at = int(np.isnan(data).argmax())
            place = f"response {at}" if rung is not Rung.token else f"token {at} of the row"
            raise EquationError(f"{name} is NaN at {place}", "give a number at every token", node.line, node.column)
        return _Value(data, rung, tracked=node.name == "logp")

    def _parameter(self, node: Name) -> _Value:
        if node.name not in self._parameters:
            hint = nearest(node.name, {*self._parameters, *INPUTS, *self._named})
            raise EquationError(f"no parameter {node.name} was given{hint}", "give the arm's parameters", node.line, node.column)
        given = self._parameters[node.name]
        if given is not None and not isinstance(given, (int, float)):
            what = f"parameter {node.name} is {given!r}, not a number"
            raise EquationError(what, "aggregate(x) alone reads a word", node.line, node.column)
        return _Value(np.array([np.inf if given is None else float(given)]), Rung.batch)

    def _tracked(self, data: Array, rung: Rung, parents: Sequence[tuple[_Value, Backward]]) -> _Value:
        value = _Value(data, rung, parents, tracked=bool(parents))
        if value.tracked:
            self._tape.append(value)
        return value

    def _elementwise(self, node: Apply) -> _Value:
        args = [self._value(a) for a in node.args]
        lifted = [self._down(a.data, a.rung, node.rung) for a in args]
        data, backward = _OPERATIONS[node.op](*lifted)
        parents = [(a, self._summed(b, node.rung, a.rung)) for a, b in zip(args, backward, strict=False) if a.tracked]
        return self._tracked(data, node.rung, parents)

    def _summed(self, backward: Backward, rung: Rung, to: Rung) -> Backward:
        """The gradient in an argument that was broadcast is a sum over all that it stood for."""
        return backward if rung is to else lambda g: self._up(backward(g), rung, to)

    def _down(self, data: Array, rung: Rung, to: Rung) -> Array:
        return data[self._member[Rung.token]] if rung is Rung.response and to is Rung.token else data

    def _up(self, data: Array, rung: Rung, to: Rung) -> Array:
        while rung < to:
            data = np.add.reduceat(data, self._starts[rung])
            rung = Rung(rung + 1)
        return data

    def _reduce(self, op: str, x: _Value) -> _Value:
        starts, member, sizes = self._starts[x.rung], self._member[x.rung], self._sizes[x.rung]
        data = _REDUCTIONS[op].reduceat(x.data, starts)
        if op == "mean":
            data = data / sizes

        def backward(g: Array) -> Array:
            if op == "sum":
                return np.asarray(g[member])
            if op == "mean":
                return np.asarray((g / sizes)[member])
            hit = x.data == data[member]
            return np.where(hit, (g / np.add.reduceat(hit.astype(np.float64), starts))[member], 0.0)

        return self._tracked(data, Rung(x.rung + 1), [(x, backward)] if x.tracked else [])

    def _aggregate(self, node: Apply) -> _Value:
        """A weighted sum of the tokens' terms; the weights follow from which tokens count."""
        x = self._value(node.args[0])
        terms = self._down(x.data, x.rung, Rung.token)
        keep = np.ones(len(terms), dtype=bool)
        if len(node.args) == 2:
            condition = self._value(node.args[1])
            keep = keep & self._down(condition.data, condition.rung, Rung.token)
        counts = np.add.reduceat(keep.astype(np.float64), self._starts[Rung.token])
        weights = np.where(keep, self._down(self._shares(counts, node), Rung.response, Rung.token), 0.0)
        data = np.where(keep, weights * terms, 0.0).sum(keepdims=True)
        backward = self._summed(lambda g: g * weights, Rung.token, x.rung)
        return self._tracked(data, Rung.batch, [(x, backward)] if x.tracked else [])

    def _shares(self, counts: Array, node: Apply) -> Array:
        """[R] what one counted token of each response contributes to the aggregate."""
        how = self._parameters.get("aggregation")
        responses = np.maximum((counts > 0).sum(), 1)
        match how:
            case "token_mean":
                return np.full(len(counts), 1 / np.maximum(counts.sum(), 1))
            case "seq_mean_token_mean":
                return np.asarray(1 / (responses * np.maximum(counts, 1)))
            case "seq_mean_token_sum":
                return np.full(len(counts), 1 / responses)
            case "seq_mean_token_sum_norm":
                norm = self._parameters.get("norm_tokens")
                if not isinstance(norm, (int, float)) or not norm > 0:
                    raise EquationError(
                        f"norm_tokens is {norm!r}, and seq_mean_token_sum_norm divides by it", "give a number above 0",
                        node.line, node.column,
                    )  # fmt: skip
                return np.full(len(counts), 1 / (responses * norm))
        raise EquationError(
            f"aggregation is {how!r}, which aggregate does not know",
            "choose token_mean, seq_mean_token_mean, seq_mean_token_sum or seq_mean_token_sum_norm", node.line, node.column,
        )  # fmt: skip


_REDUCTIONS: dict[str, np.ufunc] = {"mean": np.add, "sum": np.add, "min": np.minimum, "max": np.maximum}


def _times(g: Array, factor: Array) -> Array:
    """The chain rule's product. Where no gradient arrives, the branch is not taken and none leaves, be the factor infinite."""
    return np.where(g == 0, 0.0, g * factor)


def _pass(g: Array) -> Array:
    return g


Result = tuple[Array, tuple[Backward, ...]]


def _multiply(a: Array, b: Array) -> Result:
    return a * b, (lambda g: _times(g, b), lambda g: _times(g, a))


def _divide(a: Array, b: Array) -> Result:
    result = a / b
    return result, (lambda g: _times(g, 1 / b), lambda g: _times(g, -result / b))


def _power(a: Array, b: Array) -> Result:
    return a**b, (lambda g: _times(g, np.where(b == 0, 0.0, b * a ** (b - 1))),)


def _exponential(a: Array) -> Result:
    result = np.exp(a)
    return result, (lambda g: _times(g, result),)


def _exponential_less_1(a: Array) -> Result:
    return np.expm1(a), (lambda g: _times(g, np.exp(a)),)


def _logarithm(a: Array) -> Result:
    return np.log(a), (lambda g: _times(g, 1 / a),)


def _clip(x: Array, low: Array, high: Array) -> Result:
    result = np.minimum(np.maximum(x, low), high)
    return result, (
        lambda g: np.where((low <= x) & (x <= high), g, 0.0),
        lambda g: np.where((x < low) & (low <= high), g, 0.0),
        lambda g: np.where((x > high) | (low > high), g, 0.0),
    )


def _where(condition: Array, a: Array, b: Array) -> Result:
    return np.where(condition, a, b), (
        _pass,
        lambda g: np.where(condition, g, 0.0),
        lambda g: np.where(condition, 0.0, g),
    )


def _extreme(choose: np.ufunc) -> Callable[..., Result]:
    """Elementwise min or max; those that tie share the gradient equally."""

    def operation(*args: Array) -> Result:
        result = args[0]
        for a in args[1:]:
            result = choose(result, a)

        def backward(a: Array) -> Backward:
            return lambda g: np.where(a == result, g / sum((b == result).astype(np.float64) for b in args), 0.0)

        return result, tuple(backward(a) for a in args)

    return operation


def _constant(function: Callable[..., Array]) -> Callable[..., Result]:
    return lambda *args: (function(*args), ())


def _all(*args: Array) -> Array:
    return functools.reduce(np.logical_and, args)


def _any(*args: Array) -> Array:
    return functools.reduce(np.logical_or, args)


_OPERATIONS: dict[str, Callable[..., Result]] = {
    "+": lambda a, b: (a + b, (_pass, _pass)),
    "-": lambda a, b: (a - b, (_pass, lambda g: -g)),
    "*": _multiply,
    "/": _divide,
    "**": _power,
    "neg": lambda a: (-a, (lambda g: -g,)),
    "exp": _exponential,
    "expm1": _exponential_less_1,
    "log": _logarithm,
    "abs": lambda a: (abs(a), (lambda g: _times(g, np.sign(a)),)),
    "clip": _clip,
    "where": _where,
    "min": _extreme(np.minimum),
    "max": _extreme(np.maximum),
    "<": _constant(np.less),
    "<=": _constant(np.less_equal),
    ">": _constant(np.greater),
    ">=": _constant(np.greater_equal),
    "==": _constant(np.equal),
    "!=": _constant(np.not_equal),
    "and": _constant(_all),
    "or": _constant(_any),
    "not": _constant(np.logical_not),
}
