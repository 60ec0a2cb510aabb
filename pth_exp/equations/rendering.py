"""Equations for readers: plain text and LaTeX."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Final

from pth_exp.equations.nodes import Apply, Equation, Name, Node, Number, Rung


def readable(equation: Equation) -> str:
    """Plain text, one aligned line for each of the equation's. Sums and means say over what: t tokens, i responses."""
    printer = _Plain()
    if equation.reference is not None:
        return f"loss = {equation.reference}, a reference in plain numpy"
    names = [printer.name(b.name) for b in equation.bindings]
    width = max(map(len, names))
    return "\n".join(f"{n:<{width}} = {printer.text(b.expression)}" for n, b in zip(names, equation.bindings, strict=True))


def latex(equation: Equation) -> str:
    """An ``aligned`` environment, for use in display mathematics with amsmath."""
    lines = " \\\\\n".join(f"  {name} &= {value}" for name, value in latex_lines(equation))
    return f"\\begin{{aligned}}\n{lines}\n\\end{{aligned}}"


def latex_lines(equation: Equation) -> list[tuple[str, str]]:
    """Left and right side of each line."""
    printer = _Latex()
    if equation.reference is not None:
        return [(printer.name("loss"), rf"\mathrm{{{_escaped(equation.reference)}}}\ \mathrm{{(numpy)}}")]
    return [(printer.name(b.name), printer.text(b.expression)) for b in equation.bindings]


# How tightly an expression holds together; what holds less tightly than its place asks for stands in parentheses.
_WHERE, _OR, _AND, _NOT, _COMPARE, _ADD, _MULTIPLY, _LOG, _ATOM = range(9)
_TIGHTNESS: Final = {
    "where": _WHERE, "or": _OR, "and": _AND, "not": _NOT,
    "<": _COMPARE, "<=": _COMPARE, ">": _COMPARE, ">=": _COMPARE, "==": _COMPARE, "!=": _COMPARE,
    "+": _ADD, "-": _ADD, "expm1": _ADD, "*": _MULTIPLY, "/": _MULTIPLY, "neg": _MULTIPLY,
}  # fmt: skip
_OVER: Final = {Rung.response: "t", Rung.batch: "i"}
"""The index that a mean, sum, min or max runs over, by the rung it arrives at."""
_POLICIES: Final = {"logp": "θ", "old_logp": "old", "ref_logp": "ref"}
_GREEK: Final = {
    "alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "eps": "ε", "epsilon": "ε", "eta": "η", "lam": "λ", "mu": "μ",
    "pi": "π", "rho": "ρ", "sigma": "σ", "tau": "τ", "phi": "φ", "theta": "θ",
}  # fmt: skip


class _Printer(ABC):
    """Walks an expression; a subclass says how its parts look."""

    def text(self, node: Node, least: int = _WHERE) -> str:
        """The expression, in parentheses if it holds less tightly than ``least``."""
        match node:
            case Number():
                return self.number(node.value)
            case Name():
                text = self.name(node.name)
                return text if _tightness(node) >= least else self.enclosed(text)
            case Apply():
                text = self.applied(node)
                return text if self.tightness(node) >= least else self.enclosed(text)
        raise AssertionError(node)

    def tightness(self, node: Apply) -> int:
        return _tightness(node)

    def comma_separated(self, node: Apply) -> str:
        return ", ".join(self.text(a) for a in node.args)

    def product_left(self, node: Node) -> str:
        """The left factor: log x · y would read as the logarithm of a product."""
        return self.text(node, _ATOM if _tightness(node) == _LOG else _MULTIPLY)

    @abstractmethod
    def number(self, value: float) -> str: ...

    @abstractmethod
    def name(self, name: str) -> str: ...

    @abstractmethod
    def enclosed(self, text: str) -> str: ...

    @abstractmethod
    def applied(self, node: Apply) -> str: ...


def _tightness(node: Node) -> int:
    match node:
        case Name(name=name):
            return _LOG if name.endswith("logp") or name.startswith("log_") else _ATOM
        case Apply(op=op):
            return _TIGHTNESS.get(op, _ATOM)
    return _ATOM


class _Plain(_Printer):
    _SIGNS: Final = {"*": "·", "<=": "≤", ">=": "≥", "==": "=", "!=": "≠"}
    _RAISED: Final = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

    def number(self, value: float) -> str:
        return _digits(value)

    def name(self, name: str) -> str:
        if name in _POLICIES:
            return f"log π_{_POLICIES[name]}"
        if name == "sampler_logp":
            return "log q"
        base, _, below = name.partition("_")
        if base == "log" and below:
            return f"log {below}"
        base = "ℓ" if base == "l" else _GREEK.get(base, base)
        return f"{base}_{below}" if below else base

    def enclosed(self, text: str) -> str:
        return f"({text})"

    def applied(self, node: Apply) -> str:
        op, args = node.op, node.args
        match op:
            case "neg":
                return f"-{self.text(args[0], _MULTIPLY)}"
            case "not":
                return f"not {self.text(args[0], _COMPARE)}"
            case "**":
                return self._power(*args)
            case "*" | "/":
                return f"{self.product_left(args[0])} {self._SIGNS.get(op, op)} {self.text(args[1], _LOG)}"
            case "where":
                return f"{self.text(args[1], _OR)} if {self.text(args[0], _OR)} else {self.text(args[2])}"
            case "abs":
                return f"|{self.text(args[0])}|"
            case "expm1":
                return f"exp({self.text(args[0])}) - 1"
            case "aggregate" if len(args) == 2:
                return f"aggregate({self.text(args[0], _OR)} | {self.text(args[1])})"
            case "sum":
                return f"Σ_{_OVER[node.rung]}({self.text(args[0])})"
            case "mean" | "min" | "max" if len(args) == 1:
                return f"{op}_{_OVER[node.rung]}({self.text(args[0])})"
        if op in _TIGHTNESS:
            own = _TIGHTNESS[op]
            sign = f" {self._SIGNS.get(op, op)} "
            return sign.join([self.text(args[0], own), *(self.text(a, own + 1) for a in args[1:])])
        return f"{op}({self.comma_separated(node)})"

    def _power(self, base: Node, exponent: Node) -> str:
        text = self.text(exponent)
        if text.lstrip("-").isdigit():
            return self.text(base, _ATOM) + text.translate(self._RAISED)
        return f"{self.text(base, _ATOM)}^{text if isinstance(exponent, (Number, Name)) else self.enclosed(text)}"


class _Latex(_Printer):
    _SIGNS: Final = {
        "*": r"\cdot", "<=": r"\leq", ">=": r"\geq", "==": "=", "!=": r"\neq", "and": r"\wedge", "or": r"\vee",
    }  # fmt: skip
    _GREEK: Final = {"α": r"\alpha", "β": r"\beta", "γ": r"\gamma", "δ": r"\delta", "ε": r"\varepsilon", "η": r"\eta",
                     "λ": r"\lambda", "μ": r"\mu", "π": r"\pi", "ρ": r"\rho", "σ": r"\sigma", "τ": r"\tau", "φ": r"\phi",
                     "θ": r"\theta"}  # fmt: skip

    def tightness(self, node: Apply) -> int:
        """Fractions and cases need no parentheses; a sum's sign reaches as far as the product behind it."""
        if node.op in ("/", "where"):
            return _ATOM
        if node.op == "sum":
            return _ADD
        return super().tightness(node)

    def number(self, value: float) -> str:
        digits, _, power = _digits(value).partition("e")
        if not power:
            return digits
        return f"10^{{{power}}}" if digits == "1" else rf"{digits} \cdot 10^{{{power}}}"

    def name(self, name: str) -> str:
        if name in _POLICIES:
            return rf"\log \pi_{{{self._word(_POLICIES[name])}}}"
        if name == "sampler_logp":
            return r"\log q"
        if name == "loss":
            return r"\mathcal{L}"
        base, _, below = name.partition("_")
        if base == "log" and below:
            return rf"\log {self._word(below)}"
        if below and len(base) > 1 and base not in _GREEK:
            return self._word(name)
        return f"{self._word(base)}_{{{self._word(below)}}}" if below else self._word(base)

    def _word(self, word: str) -> str:
        if word == "l":
            return r"\ell"
        greek = _GREEK.get(word, word)
        if greek in self._GREEK:
            return self._GREEK[greek]
        return word if len(word) == 1 else rf"\mathrm{{{_escaped(word)}}}"

    def enclosed(self, text: str) -> str:
        return rf"\left({text}\right)"

    def applied(self, node: Apply) -> str:
        op, args = node.op, node.args
        match op:
            case "neg":
                return f"-{self.text(args[0], _MULTIPLY)}"
            case "not":
                return rf"\neg {self.text(args[0], _ATOM)}"
            case "/":
                return rf"\frac{{{self.text(args[0])}}}{{{self.text(args[1])}}}"
            case "*":
                return rf"{self.product_left(args[0])} \cdot {self.text(args[1], _LOG)}"
            case "**":
                return f"{self._base(args[0])}^{{{self.text(args[1])}}}"
            case "where":
                condition, a, b = (self.text(x) for x in args)
                return rf"\begin{{cases}} {a} & \text{{if }} {condition} \\ {b} & \text{{otherwise}} \end{{cases}}"
            case "abs":
                return rf"\left|{self.text(args[0])}\right|"
            case "expm1":
                return rf"\exp{self.enclosed(self.text(args[0]))} - 1"
            case "sum":
                return rf"\sum_{{{_OVER[node.rung]}}} {self.text(args[0], _MULTIPLY)}"
            case "exp" | "log":
                return rf"\{op}{self.enclosed(self.text(args[0]))}"
            case "min" | "max":
                over = f"_{{{_OVER[node.rung]}}}" if len(args) == 1 else ""
                return rf"\{op}{over}{self.enclosed(self.comma_separated(node))}"
            case "mean":
                return rf"\mathrm{{mean}}_{{{_OVER[node.rung]}}}{self.enclosed(self.text(args[0]))}"
            case "aggregate" if len(args) == 2:
                return r"\mathrm{aggregate}" + self.enclosed(rf"{self.text(args[0])} \mid {self.text(args[1])}")
        if op in _TIGHTNESS:
            own = _TIGHTNESS[op]
            sign = f" {self._SIGNS.get(op, op)} "
            return sign.join([self.text(args[0], own), *(self.text(a, own + 1) for a in args[1:])])
        return rf"\mathrm{{{op}}}{self.enclosed(self.comma_separated(node))}"

    def _base(self, node: Node) -> str:
        text = self.text(node, _ATOM)
        plain = isinstance(node, (Name, Number)) and "_" not in text and "^" not in text
        return text if plain or text.startswith(r"\left(") else self.enclosed(text)


def _digits(value: float) -> str:
    """The shortest digits that read back as the same number: 20, 0.2, 1e-6."""
    if value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    digits, _, power = repr(value).partition("e")
    return f"{digits}e{int(power)}" if power else digits


def _escaped(word: str) -> str:
    return word.replace("_", r"\_")
