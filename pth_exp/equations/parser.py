"""Reads an equation. Python's own grammar, of which little is let through; nothing is ever executed."""

from __future__ import annotations

import ast
import difflib
import math
import warnings
from collections.abc import Iterable, Sequence
from typing import Final

from pth_exp.equations.nodes import FUNCTIONS, INPUTS, Apply, Binding, Equation, EquationError, Name, Node, Number, Rung

MAX_DEPTH: Final = 60
"""Expressions nested deeper are refused: nobody could read them."""

_ARITHMETIC: dict[type[ast.AST], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Pow: "**"}
_COMPARISONS: dict[type[ast.AST], str] = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
}  # fmt: skip
_REDUCTIONS = ("mean", "sum", "min", "max")
_NOT_SAID: dict[type[ast.AST], tuple[str, str]] = {
    ast.Attribute: ("attributes do not exist in an equation", "use names and functions of the language"),
    ast.Subscript: ("there is no indexing", "mean, sum, min and max go one rung up"),
    ast.IfExp: ("`a if c else b` is not of the language", "write where(c, a, b)"),
    ast.Lambda: ("functions cannot be defined", "bind expressions to names, one a line"),
    ast.FunctionDef: ("functions cannot be defined", "bind expressions to names, one a line"),
    ast.For: ("there are no loops", "mean, sum, min and max go one rung up"),
    ast.While: ("there are no loops", "mean, sum, min and max go one rung up"),
    ast.ListComp: ("there are no comprehensions", "expressions hold for every token or response by themselves"),
    ast.SetComp: ("there are no comprehensions", "expressions hold for every token or response by themselves"),
    ast.DictComp: ("there are no comprehensions", "expressions hold for every token or response by themselves"),
    ast.GeneratorExp: ("there are no comprehensions", "expressions hold for every token or response by themselves"),
    ast.If: ("there are no statements but name = expression", "write where(c, a, b)"),
    ast.Import: ("nothing can be imported", "use the functions of the language"),
    ast.ImportFrom: ("nothing can be imported", "use the functions of the language"),
    ast.AugAssign: ("a name is bound once", "choose a new name for the new value"),
    ast.NamedExpr: ("a name is bound on a line of its own", "write name = expression"),
    ast.Starred: ("arguments cannot be unpacked", "write them out"),
    ast.JoinedStr: ("there are no strings but in reference(...)", "write a number or a name"),
}


def parse(text: str, parameters: Iterable[str] | None = None) -> Equation:
    """The equation that ``text`` writes down: lines ``name = expression``, of which the last binds ``loss``.

    ``parameters`` are the names of the arm's own; any other unknown name is then an error. Without them every free name is
    taken for a parameter.

    Raises :class:`EquationError` naming line, column, what is wrong and what to do.
    """
    if not isinstance(text, str):
        raise EquationError(f"{text!r} is no text", "write lines of the form name = expression")
    return _Parser(text, None if parameters is None else frozenset(parameters)).equation()


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint at the known name closest to an unknown one; empty when none is close."""
    close = difflib.get_close_matches(name, sorted(known), n=1)
    return f", did you mean {close[0]}?" if close else ""


class _Parser:
    def __init__(self, text: str, known: frozenset[str] | None) -> None:
        self._text = text
        self._known = known
        self._bound: dict[str, Node] = {}
        self._later: dict[str, int] = {}
        self._line = 0
        self._used: set[str] = set()
        self._inputs: set[str] = set()
        self._parameters: set[str] = set()

    def equation(self) -> Equation:
        statements = self._statements()
        for statement in statements:
            for target in getattr(statement, "targets", []):
                if isinstance(target, ast.Name):
                    self._later.setdefault(target.id, statement.lineno)
        reference = None
        for statement in statements:
            self._line = statement.lineno
            name, value = self._assignment(statement)
            if name == "loss" and _is_call(value, "reference"):
                reference = self._reference(value)
            else:
                self._bound[name] = self._node(value, 0)
            if name == "loss" and statement is not statements[-1]:
                raise self._error(statements[-1], "nothing follows the loss", "bind loss on the last line")
            last = statement
        self._check_used(statements, reference is not None)
        if reference is None:
            self._check_loss(last)
        bindings = tuple(Binding(name, node) for name, node in self._bound.items())
        return Equation(self._text, bindings, frozenset(self._inputs), frozenset(self._parameters), reference)

    def _statements(self) -> list[ast.stmt]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                statements = ast.parse(self._text).body
        except SyntaxError as error:
            remedy = "write lines of the form name = expression"
            line = (error.text or "").strip()
            what = f"cannot be read: {error.msg}" + (f" in `{line}`" if line else "")
            raise EquationError(what, remedy, error.lineno or 1, max(error.offset or 1, 1)) from None
        except (ValueError, RecursionError, MemoryError) as error:
            raise EquationError(f"cannot be read: {str(error) or 'nested too deeply'}", "write shorter expressions") from None
        if not statements:
            raise EquationError("has no line", "write loss = expression", 1, 1)
        return statements

    def _assignment(self, statement: ast.stmt) -> tuple[str, ast.expr]:
        if type(statement) in _NOT_SAID:
            raise self._error(statement, *_NOT_SAID[type(statement)])
        if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
            raise self._error(statement, "is not of the form name = expression", "bind one name on each line")
        (target,) = statement.targets
        if not isinstance(target, ast.Name):
            raise self._error(target, "only a plain name can be bound", "write name = expression")
        name = target.id
        if not name.isascii() or name.startswith("__"):
            raise self._error(target, f"{name} is no name for a value", "use letters, digits and _")
        if name in INPUTS:
            raise self._error(target, f"{name} is an input and cannot be bound", "choose another name")
        if name in FUNCTIONS:
            raise self._error(target, f"{name} is a function and cannot be bound", "choose another name")
        if self._known is not None and name in self._known:
            raise self._error(target, f"{name} is a parameter of the arm and cannot be bound", "choose another name")
        if name in self._bound:
            raise self._error(target, f"{name} is bound already", "choose a new name for the new value")
        return name, statement.value

    def _check_used(self, statements: list[ast.stmt], is_reference: bool) -> None:
        names = [target.id for s in statements for target in getattr(s, "targets", []) if isinstance(target, ast.Name)]
        if names[-1] != "loss":
            raise self._error(statements[-1], f"the last line binds {names[-1]}, not loss", "end with loss = expression")
        for name, statement in zip(names[:-1], statements, strict=False):
            if name not in self._used:
                why = "stands beside a reference" if is_reference else "is used by no later line"
                raise self._error(statement, f"{name} {why}", "use it, or leave the line out")

    def _check_loss(self, statement: ast.stmt) -> None:
        loss = self._bound["loss"]
        if loss.condition:
            raise self._error(statement, "loss is a condition, not a number", "write where(condition, a, b)")
        if loss.rung is not Rung.batch:
            raise self._error(
                statement,
                f"loss is {loss.rung}, not a number of the batch",
                "take it up with aggregate(...), mean(...) or sum(...)",
            )

    def _node(self, node: ast.expr, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise self._error(node, f"is nested more than {MAX_DEPTH} deep", "bind parts of it to names")
        depth += 1
        match node:
            case ast.Constant():
                return self._number(node)
            case ast.Name():
                return self._name(node)
            case ast.UnaryOp(op=ast.USub()):
                return self._apply(node, "neg", [self._value(node.operand, depth)])
            case ast.UnaryOp(op=ast.Not()):
                return self._apply(node, "not", [self._condition(node.operand, depth)], condition=True)
            case ast.BinOp(op=ast.Pow()):
                base, exponent = self._value(node.left, depth), self._value(node.right, depth)
                if not _is_constant(exponent, self._parameters):
                    raise self._error(node.right, "an exponent must be a number or a parameter", "write exp(b * log(a)) for a**b")
                return self._apply(node, "**", [base, exponent])
            case ast.BinOp() if type(node.op) in _ARITHMETIC:
                return self._apply(
                    node, _ARITHMETIC[type(node.op)], [self._value(node.left, depth), self._value(node.right, depth)]
                )
            case ast.BoolOp():
                op = "and" if isinstance(node.op, ast.And) else "or"
                return self._apply(node, op, [self._condition(v, depth) for v in node.values], condition=True)
            case ast.Compare():
                return self._comparison(node, depth)
            case ast.Call():
                return self._call(node, depth)
            case ast.BinOp() | ast.UnaryOp():
                raise self._error(node, "this operator is not of the language", "use + - * / ** and unary minus")
        what, remedy = _NOT_SAID.get(
            type(node), ("this is not of the language", "write a number, a name, an operator or a function")
        )
        raise self._error(node, what, remedy)

    def _number(self, node: ast.Constant) -> Number:
        if isinstance(node.value, str):
            raise self._error(node, "there are no strings but in reference(...)", "write a number or a name")
        if isinstance(node.value, bool) or not isinstance(node.value, (int, float)):
            raise self._error(node, f"{node.value!r} is not a number", "write a number")
        try:
            value = float(node.value)
        except OverflowError:
            value = math.inf
        if not math.isfinite(value):
            raise self._error(node, "the number is too large", "a parameter that is null reads as infinity")
        return Number(Rung.batch, False, *_place(node), value)

    def _name(self, node: ast.Name) -> Name:
        name = node.id
        if name in FUNCTIONS:
            raise self._error(node, f"{name} is a function", f"write {name}(...)")
        if name in INPUTS:
            field, rung = INPUTS[name]
            self._inputs.add(field)
            return Name(rung, False, *_place(node), name)
        if name in self._bound:
            self._used.add(name)
            return Name(self._bound[name].rung, self._bound[name].condition, *_place(node), name)
        if name in self._later:
            binds = self._later[name]
            remedy = "give the new value another name" if binds == self._line else f"line {binds} binds it: move that line up"
            raise self._error(node, f"{name} is read before it is bound", remedy)
        if not name.isascii() or name.startswith("__"):
            raise self._error(node, f"{name} is no name for a value", "use letters, digits and _")
        if self._known is not None and name not in self._known:
            hint = nearest(name, {*INPUTS, *self._bound, *self._known})
            known = ", ".join(sorted(self._known)) or "none"
            raise self._error(
                node, f"{name} is not known{hint}", f"inputs are {', '.join(INPUTS)}; the arm's parameters: {known}"
            )
        if name == "aggregation":
            raise self._error(node, "aggregation is a word, not a number", "aggregate(x) reads it")
        self._parameters.add(name)
        return Name(Rung.batch, False, *_place(node), name)

    def _comparison(self, node: ast.Compare, depth: int) -> Node:
        sides = [self._value(side, depth) for side in (node.left, *node.comparators)]
        parts = []
        for op, left, right in zip(node.ops, sides, sides[1:], strict=False):
            if type(op) not in _COMPARISONS:
                raise self._error(node, "this comparison is not of the language", "use < <= > >= == !=")
            parts.append(self._apply(node, _COMPARISONS[type(op)], [left, right], condition=True))
        return parts[0] if len(parts) == 1 else self._apply(node, "and", parts, condition=True)

    def _call(self, node: ast.Call, depth: int) -> Node:
        if not isinstance(node.func, ast.Name):
            raise self._error(node, "only a function of the language can be called", f"known are {', '.join(FUNCTIONS)}")
        op = node.func.id
        if op not in FUNCTIONS:
            raise self._error(node, f"{op} is no function{nearest(op, FUNCTIONS)}", f"known are {', '.join(FUNCTIONS)}")
        if node.keywords:
            raise self._error(node, f"{op} takes no keyword arguments", "give its arguments in order")
        if op == "reference":
            raise self._error(node, "reference(...) stands for a whole loss", 'write loss = reference("name") and no other line')
        least, most = FUNCTIONS[op]
        if len(node.args) < least or (most is not None and len(node.args) > most):
            many = f"{least} or more" if most is None else f"{least}" if least == most else f"{least} or {most}"
            raise self._error(node, f"{op} takes {many} arguments, not {len(node.args)}", "correct the call")
        if op == "where":
            args = [self._condition(node.args[0], depth), *(self._value(a, depth) for a in node.args[1:])]
        elif op == "aggregate":
            args = [self._value(node.args[0], depth), *(self._condition(a, depth) for a in node.args[1:])]
            return self._aggregate(node, args)
        else:
            args = [self._value(a, depth) for a in node.args]
        if op in _REDUCTIONS and len(args) == 1:
            if args[0].rung is Rung.batch:
                raise self._error(
                    node, f"{op} of one argument goes one rung up, and this is a number of the batch", f"leave {op} out"
                )
            return self._apply(node, op, args, rung=Rung(args[0].rung + 1))
        return self._apply(node, op, args)

    def _aggregate(self, node: ast.Call, args: list[Node]) -> Node:
        if args[0].rung is Rung.batch:
            raise self._error(
                node.args[0], "aggregate takes what is per token, and this is a number of the batch", "leave it out"
            )
        if self._known is not None and "aggregation" not in self._known:
            raise self._error(node, "aggregate reads aggregation, a parameter that the arm has not", "use mean(...) and sum(...)")
        self._parameters.add("aggregation")
        return self._apply(node, "aggregate", args, rung=Rung.batch)

    def _apply(self, node: ast.expr, op: str, args: Sequence[Node], condition: bool = False, rung: Rung | None = None) -> Apply:
        rung = min(a.rung for a in args) if rung is None else rung
        return Apply(rung, condition, *_place(node), op, tuple(args))

    def _value(self, node: ast.expr, depth: int) -> Node:
        result = self._node(node, depth)
        if result.condition:
            raise self._error(node, "is a condition where a number is needed", "where(condition, 1, 0) makes it one")
        return result

    def _condition(self, node: ast.expr, depth: int) -> Node:
        result = self._node(node, depth)
        if not result.condition:
            raise self._error(node, "is a number where a condition is needed", "compare it with something")
        return result

    def _reference(self, node: ast.expr) -> str:
        assert isinstance(node, ast.Call)
        match node.args, node.keywords:
            case [ast.Constant(value=str(name))], []:
                return name
        raise self._error(node, "reference takes the name of a registered function as a string", 'write loss = reference("name")')

    def _error(self, node: ast.AST, what: str, remedy: str) -> EquationError:
        source = ast.get_source_segment(self._text, node)
        quoted = source if source and "\n" not in source and len(source) <= 60 else ""
        return EquationError(f"`{quoted}`: {what}" if quoted else what, remedy, *_place(node))


def _place(node: ast.AST) -> tuple[int, int]:
    return getattr(node, "lineno", 1), getattr(node, "col_offset", 0) + 1


def _is_call(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name


def _is_constant(node: Node, parameters: set[str]) -> bool:
    match node:
        case Number():
            return True
        case Name():
            return node.name in parameters
        case Apply(op="neg", args=(inner,)):
            return _is_constant(inner, parameters)
    return False
