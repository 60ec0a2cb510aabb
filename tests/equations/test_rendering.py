"""Equations as people read them."""

from __future__ import annotations

import re
from pathlib import Path

import made_rows
import matplotlib
import pytest
import yaml
from matplotlib.mathtext import MathTextParser

import pth_exp.conf
from pth_exp.equations import Equation, latex, parse, penalty_equation, readable
from pth_exp.equations.rendering import latex_lines

matplotlib.use("Agg")
FILES = sorted((Path(str(pth_exp.conf.__file__)).parent / "arm").glob("*.yaml"))
EQUATIONS: dict[str, Equation] = {
    **{f.stem: parse(yaml.safe_load(f.read_text())["equation"]) for f in FILES},
    **{k: penalty_equation(k) for k in ("k1", "k2", "k3")},
    "everything": parse(made_rows.EVERYTHING),
    "masked": parse(made_rows.MASKED),
    "a reference": parse('loss = reference("some_name")'),
}


def test_san() -> None:
    assert readable(parse(made_rows.SAN)) == (
        "ℓ     = -log π_θ\n"
        "level = max(sg(ℓ), 0)\n"
        "S     = mean_t(level)\n"
        "w     = 1 if level ≤ S else S / level\n"
        "S_rob = Σ_t(w · ℓ) / Σ_t(w)\n"
        "loss  = mean_i(A · S_rob / max(sg(S_rob), 1e-6))"
    )
    assert latex(parse(made_rows.SAN)).splitlines() == [
        r"\begin{aligned}",
        r"  \ell &= -\log \pi_{\theta} \\",
        r"  \mathrm{level} &= \max\left(\mathrm{sg}\left(\ell\right), 0\right) \\",
        r"  S &= \mathrm{mean}_{t}\left(\mathrm{level}\right) \\",
        r"  w &= \begin{cases} 1 & \text{if } \mathrm{level} \leq S"
        r" \\ \frac{S}{\mathrm{level}} & \text{otherwise} \end{cases} \\",
        r"  S_{\mathrm{rob}} &= \frac{\sum_{t} w \cdot \ell}{\sum_{t} w} \\",
        r"  \mathcal{L} &= \mathrm{mean}_{i}\left(\frac{A \cdot S_{\mathrm{rob}}}"
        r"{\max\left(\mathrm{sg}\left(S_{\mathrm{rob}}\right), 10^{-6}\right)}\right)",
        r"\end{aligned}",
    ]


@pytest.mark.parametrize(
    ("expression", "plain", "tex"),
    [
        ("a - (b - c)", "a - (b - c)", r"a - \left(b - c\right)"),
        ("a - b - c", "a - b - c", "a - b - c"),
        ("a - (b + c)", "a - (b + c)", r"a - \left(b + c\right)"),
        ("(a + b) * c", "(a + b) · c", r"\left(a + b\right) \cdot c"),
        ("a / b / c", "a / b / c", r"\frac{\frac{a}{b}}{c}"),
        ("a / (b * c)", "a / (b · c)", r"\frac{a}{b \cdot c}"),
        ("a * (b / c)", "a · (b / c)", r"a \cdot \frac{b}{c}"),
        ("a * -b", "a · (-b)", r"a \cdot \left(-b\right)"),
        ("-a * b", "-a · b", r"-a \cdot b"),
        ("-(a + b)", "-(a + b)", r"-\left(a + b\right)"),
        ("(-a)**2", "(-a)²", r"\left(-a\right)^{2}"),
        ("-a**2", "-a²", r"-a^{2}"),
        ("a**-2", "a⁻²", "a^{-2}"),
        ("a**0.5", "a^0.5", "a^{0.5}"),
        ("a**b", "a^b", "a^{b}"),
        ("a**-b", "a^(-b)", "a^{-b}"),
        ("(a + b)**2", "(a + b)²", r"\left(a + b\right)^{2}"),
        ("expm1(a) * b", "(exp(a) - 1) · b", r"\left(\exp\left(a\right) - 1\right) \cdot b"),
        ("2 * mean(sum(logp))", "2 · mean_i(Σ_t(log π_θ))", r"2 \cdot \mathrm{mean}_{i}\left(\sum_{t} \log \pi_{\theta}\right)"),
        ("sum(sum(logp)) * a", "Σ_i(Σ_t(log π_θ)) · a", r"\left(\sum_{i} \left(\sum_{t} \log \pi_{\theta}\right)\right) \cdot a"),
        ("mean(mean(logp * A))", "mean_i(mean_t((log π_θ) · A))", None),
        ("where(not (a < 1 or b == 2) and c != 3, 1, 2) + 1", "(1 if not (a < 1 or b = 2) and c ≠ 3 else 2) + 1", None),
        ("where(a > 0, where(b > 0, 1, 2), where(c > 0, 3, 4))", "(1 if b > 0 else 2) if a > 0 else 3 if c > 0 else 4", None),
        ("max(max(mean(logp)), 1e-6, 3e-4, 20.0)", "max(max_i(mean_t(log π_θ)), 1e-6, 3e-4, 20)".replace("3e-4", "0.0003"), None),
        ("clip_low * eps + norm_x", "clip_low · ε + norm_x", r"\mathrm{clip\_low} \cdot \varepsilon + \mathrm{norm\_x}"),
        ("aggregate(where(a > 1, 1, logp), logp < 0)", "aggregate((1 if a > 1 else log π_θ) | log π_θ < 0)", None),
    ],
)
def test_parentheses_stand_where_they_are_needed(expression: str, plain: str, tex: str | None) -> None:
    equation = parse(f"loss = {expression}")
    assert readable(equation) == f"loss = {plain}"
    if tex is not None:
        assert latex_lines(equation) == [(r"\mathcal{L}", tex)]


@pytest.mark.parametrize("name", EQUATIONS)
def test_latex_is_balanced_and_drawn_where_mathtext_knows_it(name: str) -> None:
    text = latex(EQUATIONS[name])
    bare = re.sub(r"\\[{}]", "", text)
    assert bare.count("{") == bare.count("}")
    assert text.count(r"\left") == text.count(r"\right")
    assert text.count(r"\begin{cases}") == text.count(r"\end{cases}")
    assert "_logp" not in text and not re.search(r"[^\x00-\x7f]", text)
    for left, right in latex_lines(EQUATIONS[name]):
        if "cases" not in right:
            MathTextParser("agg").parse(f"${left} = {right}$")


@pytest.mark.parametrize("name", EQUATIONS)
def test_plain_lines_are_aligned(name: str) -> None:
    lines = readable(EQUATIONS[name]).splitlines()
    assert len({line.index(" = ") for line in lines}) == 1
    assert "logp" not in "".join(lines)
