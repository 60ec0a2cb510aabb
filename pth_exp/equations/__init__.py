"""Losses as written: a small language, its evaluator and its printed forms. Shares nothing with ``pth_exp.losses``."""

from pth_exp.equations.batch import Evaluation, WrittenBatch
from pth_exp.equations.evaluator import evaluate
from pth_exp.equations.nodes import Equation, EquationError
from pth_exp.equations.parser import parse
from pth_exp.equations.penalty import penalty_equation
from pth_exp.equations.references import reference
from pth_exp.equations.rendering import latex, readable

__all__ = [
    "Equation",
    "EquationError",
    "Evaluation",
    "WrittenBatch",
    "evaluate",
    "latex",
    "parse",
    "penalty_equation",
    "readable",
    "reference",
]
