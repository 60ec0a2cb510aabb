"""The KL penalty as written, an equation for each estimator. Parameters are ``clamp`` and ``aggregation``."""

from __future__ import annotations

from pth_exp.equations.nodes import Equation
from pth_exp.equations.parser import parse

_ESTIMATES = {"k1": "-x", "k2": "x**2 / 2", "k3": "expm1(x) - x"}
_TEXT = """\
x = clip(ref_logp - logp, -20, 20)
estimate = {estimate}
loss = aggregate(clip(estimate, -clamp, clamp))
"""


def penalty_equation(estimator: str) -> Equation:
    """The equation of k1, k2 or k3 (Schulman, 2020), clamped at plus and minus ``clamp`` nats, which null leaves out.

    Raises ``ValueError`` for another estimator.
    """
    if estimator not in _ESTIMATES:
        raise ValueError(f"estimator {estimator!r} is not known; known are {', '.join(_ESTIMATES)}")
    return parse(_TEXT.format(estimate=_ESTIMATES[estimator]), ("clamp", "aggregation"))
