"""One small fault at a time in the source of each loss: does check 4 see it?

    python tests/losses/mutants.py [LOSS ...]     prints counts, and every fault that was not seen

A mutant changes one place in a loss or in a function of `pth_exp.losses` that it calls: a sign turned, a sum for a mean, a
stop-gradient, a normaliser, a clamp or a mask removed. It runs under every setting of the loss's parameters that reaches another
branch, and is caught if check 4's measurement on its inputs fails under one of them.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
import textwrap
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import Any

import torch

from pth_exp.armfiles import CONF, arm_paths, read_arm
from pth_exp.checks.losses import TOLERANCE
from pth_exp.equations import parse
from pth_exp.losses import get_loss
from pth_exp.losses.registry import _ENTRIES
from pth_exp.losses.types import Loss
from pth_exp.probes.equation import RANDOM, compare
from pth_exp.probes.inputs import Input, fixed_inputs, random_inputs
from pth_exp.schema import Aggregation, Arm

PACKAGE = "pth_exp.losses"


@dataclass(frozen=True)
class Mutant:
    """A function of the package with one fault.

    Attributes:
        function: the original's qualified name.
        operator: sign, reduction, stop-gradient, normaliser, clamp or mask.
        before: source of the changed expression.
        after: and what stands there now.
    """

    original: types.FunctionType
    operator: str
    before: str
    after: str
    tree: ast.Module

    @property
    def function(self) -> str:
        return f"{self.original.__module__.removeprefix(PACKAGE + '.')}.{self.original.__name__}"

    def __str__(self) -> str:
        return f"{self.function}: {self.operator}: {self.before}  ->  {self.after}"

    def compiled(self) -> types.FunctionType:
        """The faulty function, in the namespace of the original's module."""
        scope: dict[str, Any] = {}
        exec(compile(self.tree, f"<mutant of {self.function}>", "exec"), self.original.__globals__, scope)
        made = scope[self.original.__name__]
        assert isinstance(made, types.FunctionType)
        return made

    @contextmanager
    def installed(self) -> Iterator[types.FunctionType]:
        """The faulty function stands wherever a module of the package names the original."""
        made = self.compiled()
        places = [(m, name) for m in _modules() for name, value in vars(m).items() if value is self.original]
        try:
            for module, name in places:
                setattr(module, name, made)
            yield made
        finally:
            for module, name in places:
                setattr(module, name, self.original)


def _modules() -> list[types.ModuleType]:
    return [m for name, m in list(sys.modules.items()) if name == PACKAGE or name.startswith(PACKAGE + ".")]


def functions(root: Callable[..., Any], skip: frozenset[str] = frozenset({"required"})) -> list[types.FunctionType]:
    """``root`` and every function of the package that it reaches, but those that only check their input."""
    found: dict[str, types.FunctionType] = {}
    open_ = [root]
    while open_:
        f = open_.pop()
        if not isinstance(f, types.FunctionType) or not f.__module__.startswith(PACKAGE) or f.__name__ in skip:
            continue
        if found.setdefault(f"{f.__module__}.{f.__name__}", f) is f:
            called = [f.__globals__.get(name) for name in f.__code__.co_names]
            open_ += [g for g in called if g not in found.values()]
    return list(found.values())


def mutants(function: types.FunctionType) -> Iterator[Mutant]:
    """Every mutant of one function."""
    source = textwrap.dedent(inspect.getsource(function))
    count = sum(1 for _ in ast.walk(_body(source)))
    for index in range(count):
        for choice in range(4):
            tree = _body(source)
            parents = {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
            node = list(ast.walk(tree))[index]
            changes = list(_changes(node))
            if choice >= len(changes):
                break
            operator, new = changes[choice]
            before, parent = ast.unparse(node), parents[node]
            for field, value in ast.iter_fields(parent):
                if value is node:
                    setattr(parent, field, new)
                elif isinstance(value, list):
                    setattr(parent, field, [new if item is node else item for item in value])
            yield Mutant(function, operator, before, ast.unparse(new), ast.fix_missing_locations(tree))


def _body(source: str) -> ast.Module:
    """The function without decorator, docstring and annotations: what is left decides the loss."""
    tree = ast.parse(source)
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list, definition.returns = [], None
    for argument in [*definition.args.args, *definition.args.kwonlyargs]:
        argument.annotation = None
    first = definition.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        definition.body = definition.body[1:]
    return tree


def _changes(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    match node:
        case ast.UnaryOp(op=ast.USub(), operand=operand) if not isinstance(operand, ast.Constant):
            yield "sign", operand
        case ast.BinOp(op=ast.Add(), left=left, right=right) if not _is_text(left):
            yield "sign", ast.BinOp(left, ast.Sub(), right)
        case ast.BinOp(op=ast.Sub(), left=left, right=right):
            yield "sign", ast.BinOp(left, ast.Add(), right)
        case ast.BinOp(op=ast.Div(), left=left):
            yield "normaliser", left
        case ast.Call(func=ast.Attribute(value=value, attr="sum"), args=args, keywords=keywords):
            yield "reduction", ast.Call(ast.Attribute(value, "mean", ast.Load()), args, keywords)
        case ast.Call(func=ast.Attribute(value=value, attr="mean"), args=args, keywords=keywords):
            yield "reduction", ast.Call(ast.Attribute(value, "sum", ast.Load()), args, keywords)
        case ast.Call(func=ast.Attribute(value=value, attr="detach")):
            yield "stop-gradient", value
        case ast.Call(func=ast.Attribute(value=value, attr="clamp")):
            yield "clamp", value
        case ast.Call(func=ast.Attribute(value=value, attr="masked_fill")):
            yield "mask", value
        case ast.Call(func=ast.Attribute(value=ast.Name("torch"), attr="where"), args=[_, one, other]):
            yield "clamp", one
            yield "clamp", other
        case ast.Call(func=ast.Attribute(value=ast.Name("torch") as torch, attr="minimum" | "maximum" as name), args=args):
            yield "clamp", args[0]
            yield "clamp", args[1]
            other = "maximum" if name == "minimum" else "minimum"
            yield "clamp", ast.Call(ast.Attribute(torch, other, ast.Load()), args, [])


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


VARIANTS: dict[str, list[Any]] = {
    "aggregation": list(Aggregation),
    "dual_clip": [None, 3.0], "cap": [None, 2.0], "clip_low": [None, 0.2], "weighted": [False, True],
    "count_rejected": [False, True], "harmful_only": [False, True], "lower": [0.0, 0.5],
}  # fmt: skip
"""Values of a parameter that lead to another branch of a loss."""


def settings(arm: Arm) -> list[Arm]:
    """The arm as it ships, and with each parameter that chooses a branch changed alone, as far as its loss allows that."""
    found = [arm]
    for name, values in VARIANTS.items():
        for value in values if hasattr(arm, name) else ():
            changes = {name: value} | ({"norm_tokens": 48.0} if name == "aggregation" else {})
            if getattr(arm, name) != value:
                found.append(dataclasses.replace(arm, **changes))
    return [a for a in found if _is_possible(a)]


def _is_possible(arm: Arm) -> bool:
    try:
        get_loss(arm.loss, **arm.parameters())
    except ValueError:
        return False
    return True


def arms() -> dict[str, Arm]:
    """Every arm that ships; what a run supplies is a number here."""
    read = {name: read_arm(name, CONF).arm for name in arm_paths(CONF)}
    return {n: dataclasses.replace(a, norm_tokens=48.0) if isinstance(getattr(a, "norm_tokens", None), str) else a
            for n, a in read.items()}  # fmt: skip


def inputs() -> list[Input]:
    """What a run is measured on before it trains."""
    return [*fixed_inputs(), *random_inputs(**RANDOM)]


def error_of(loss: Loss, arm: Arm, on: Sequence[Input]) -> float:
    """Check 4's deciding number: the larger of value and gradient error, in float64; infinite if the loss raises."""
    assert arm.equation is not None
    try:
        found = compare(loss, parse(arm.equation, arm.parameters()), arm, on, torch.float64)
    except Exception:
        return inf
    return max(found.value_error, found.gradient_error) if found.inputs else inf


def is_caught(mutant: Mutant, arm: Arm, on: Sequence[Input]) -> bool:
    """Whether check 4 fails for the arm's loss with this fault, under one of its settings."""
    own = _ENTRIES[arm.loss].function
    with mutant.installed() as faulty:
        function = faulty if mutant.original is own else own
        losses = ((dataclasses.replace(get_loss(arm.loss, **a.parameters()), function=function), a) for a in settings(arm))
        return any(_is_off(loss, a, on) for loss, a in losses)


def _is_off(loss: Loss, arm: Arm, on: Sequence[Input]) -> bool:
    """Whether check 4's number is above its bound; input by input, since most faults show on the first ones."""
    doubtful = False
    for one in on:
        error = error_of(loss, arm, [one])
        if TOLERANCE < error < inf:
            return True
        doubtful |= not error <= TOLERANCE  # it raised, or there is nothing to measure on this input
    return doubtful and not error_of(loss, arm, on) <= TOLERANCE


def survivors(name: str, arm: Arm, on: Sequence[Input]) -> tuple[list[Mutant], list[Mutant]]:
    """All mutants of an arm's loss, and those that are not caught."""
    made = [m for f in functions(_ENTRIES[arm.loss].function) for m in mutants(f)]
    return made, [m for m in made if not is_caught(m, arm, on)]


EMPTY = "acts on responses without a token alone, whose slots the registry's mask takes out of value and gradient"
METRICS = "decides a metric, and no loss"
EQUIVALENT: dict[tuple[str, str], tuple[str, str]] = {
    ("aggregate.aggregate", "mask"): ("*", "the weight of a slot outside the mask is 0, and the registry has put a 0 there"),
    ("aggregate.aggregate", "reduction"): ("gspo", METRICS),
    ("aggregate.aggregation_weights", "clamp"): ("gspo", METRICS),
    ("aggregate.aggregation_weights", "normaliser"): ("gspo", METRICS),
    ("aggregate.aggregation_weights", "reduction"): ("gspo", METRICS),
    ("aggregate.response_mean", "mask"): ("*", "the registry gives a response without a token the advantage 0"),
    ("aggregate.response_mean", "normaliser"): ("icepop mis mis_geo mis_seq", METRICS),
    ("aggregate.response_mean", "reduction"): ("icepop mis mis_geo mis_seq", METRICS),
    ("aggregate.token_share", "normaliser"): ("*", METRICS),
    ("cispo.cispo", "sign -log_r"): ("cispo", METRICS),
    ("gspo.gspo", "sign -log_ratio(batch.logp, old_logp)"): ("gspo", METRICS),
    ("m2po.m2po", "sign -log_r"): ("m2po", METRICS),
    ("m2po.m2po", "stop-gradient"): ("m2po", "the shift enters comparisons and metrics, through which no gradient passes"),
    ("masked._masked_ppo", "clamp torch.where(w.isnan(), w, 1.0)"): ("*", "an unweighted loss whose inputs are numbers"),
    ("ppo.clipped_terms", "sign -log_r"): ("*", METRICS),
    ("ratio.geometric_log_ratio", "clamp mask"): ("*", EMPTY),
    ("ratio.geometric_log_ratio", "clamp ((logp"): (
        "mis_geo",
        "a mean log-ratio beyond 20 nats is outside the bounds, clamped or not",
    ),
    ("ratio.log_ratio", "clamp"): ("gspo m2po", "a metric of gspo; m2po masks |d| > 20 in any batch of fewer than 10,000 tokens"),
    ("ratio.log_ratio", "sign"): ("gspo", METRICS),
    ("san_reference.san_plus", "clamp batch.mask.sum"): ("san_plus", EMPTY),
    ("sequence._floored", "clamp torch.where"): ("*", EMPTY),
    ("surprisal.anchored_weights", "clamp torch.where(level > 0, level, 1.0)"): (
        "*",
        "a detached quotient that is not taken there",
    ),
    ("surprisal.robust_mean", "clamp torch.where(total"): ("san san_plus_written", EMPTY),
    ("surprisal.surprisal_level", "clamp"): (
        "san_ref san_ref_written",
        "the level is only compared with an anchor of at least 0, which a surprisal below 0 never exceeds",
    ),
    ("surprisal.token_average", "clamp"): ("*", EMPTY),
    ("tis.truncated_weight", "stop-gradient"): ("tis_ppo", "its argument is the old policy, which carries no gradient"),
}
"""Mutants that no input can tell from the loss: (function, beginning of operator and source) to (arms, or * for all; why)."""


def why_equivalent(name: str, mutant: Mutant) -> str | None:
    """Why a fault in the loss of the arm ``name`` cannot be seen; None for one that should be."""
    for (function, start), (names, reason) in EQUIVALENT.items():
        said = f"{mutant.operator} {mutant.before}"
        if mutant.function == function and said.startswith(start) and (names == "*" or name in names.split()):
            return reason
    return None


def main(chosen: Sequence[str]) -> None:
    on = inputs()
    print("| arm | faults | seen by check 4 | equivalent | missed |\n|---|---|---|---|---|")
    left: Counter[tuple[str, str]] = Counter()
    total: Counter[str] = Counter()
    for name, arm in arms().items():
        if chosen and name not in chosen:
            continue
        made, survived = survivors(name, arm, on)
        reasons = [why_equivalent(name, m) for m in survived]
        left.update((str(m), reason or "MISSED") for m, reason in zip(survived, reasons, strict=True))
        counts = [len(made), len(made) - len(survived), len(survived) - reasons.count(None), reasons.count(None)]
        total.update(dict(zip(("faults", "seen", "equivalent", "missed"), counts, strict=True)))
        print(f"| {name} | {' | '.join(map(str, counts))} |", flush=True)
    print(f"| all | {' | '.join(map(str, total.values()))} |\n\nNot seen (in how many arms), and why:\n")
    for (mutant, reason), times in sorted(left.items()):
        print(f"- {mutant} ({times}): {reason}")


if __name__ == "__main__":
    main(sys.argv[1:])
