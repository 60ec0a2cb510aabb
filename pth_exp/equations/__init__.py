"""Losses as written: a small language, its evaluator and its printed forms. Shares nothing with ``pth_exp.losses``.

An equation is lines ``name = expression``; the last binds ``loss``, a number of the batch to minimise.

    w = min(exp(clip(old_logp - sampler_logp, -20, 20)), cap)     # per token
    S = sum(-logp)                                                # per response
    loss = mean(sg(mean(w)) * A * S / T)

* Per token: ``logp`` (the learner's), ``sampler_logp``, ``old_logp``, ``ref_logp``. Per response: ``A``, the advantage, and
  ``T``, its number of tokens. Numbers, and the arm's own parameters by name; one that is null is infinite, a switch is 1 or 0.
* ``+ - * /``, ``**`` with a constant, comparisons, ``and or not``; ``exp expm1 log abs``, ``clip(x, low, high)``,
  ``where(condition, a, b)``, ``min`` and ``max`` of two or more; ``sg(x)`` has no gradient.
* ``mean sum min max`` of one argument go one rung up: from tokens to their response, from responses to the batch. A coarser value
  stands for each of the finer ones below it. Responses without a token count in nothing.
* ``aggregate(x)`` takes what is per token to the batch as the parameter ``aggregation`` says; ``aggregate(x, keep)`` counts only
  the tokens where ``keep`` holds, and is 0 where none does.
* ``loss = reference("name")`` stands for what cannot be said here: a numpy function registered with :func:`reference`.

Where arguments of ``min`` or ``max`` tie they share the gradient equally; ``clip`` passes it at its bounds; a branch that is not
taken has none.
"""

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
