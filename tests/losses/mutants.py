"""One small fault at a time in the source of each loss: does check 4 see it?

    python tests/losses/mutants.py [LOSS ...]     prints counts, and every fault that was not seen

A mutant changes one place in a loss or in a function of `pth_exp.losses` that it calls: a sign turned, a sum for a mean, a
stop-gradient, a normaliser, a clamp or a mask removed. It runs under every setting of the loss's parameters that reaches another
branch, and is caught if check 4's measurement on its inputs fails under one of them.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

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
