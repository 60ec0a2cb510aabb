"""``pth equations``: what each arm's loss is, as written."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pth_exp import schema
from pth_exp.armfiles import ArmFile, arm_paths, read_arm
from pth_exp.equations import Equation, EquationError, latex, parse, penalty_equation, readable
from pth_exp.refusal import Refusal, refuse
from pth_exp.report.text import Painter, paragraph

POLICIES = {
    "logp": ("π_θ", "the learner"),
    "old_logp": ("π_old", ""),
    "sampler_logp": ("q", "the sampler, as it recorded its tokens' probabilities"),
    "ref_logp": ("π_ref", "the reference policy"),
}
OLD = {
    schema.OldPolicy.sampler: "the sampler, as it recorded its tokens' probabilities",
    schema.OldPolicy.recomputed: "the learner, recomputed at the start of the update",
}
LEGEND = """\
log π: log-probability of a token, in nats · A: the response's advantage · T: its number of tokens · sg(x): x without its gradient
Σ_t, mean_t: over a response's tokens · mean_i: over responses that have a token · x | c: only the tokens where c holds
aggregate: the batch's terms as `aggregation` says: token_mean Σ_i(Σ_t(x)) / Σ_i(T) · seq_mean_token_mean mean_i(mean_t(x)) ·
seq_mean_token_sum mean_i(Σ_t(x)) · seq_mean_token_sum_norm mean_i(Σ_t(x)) / norm_tokens"""


def main(argv: Sequence[str]) -> int:
    """Exit code 0; 1 when --check finds a loss that is not its equation; 2 for an arm that is not known or cannot be read."""
    parser = argparse.ArgumentParser(prog="pth equations", description=__doc__, epilog=main.__doc__)
    parser.add_argument("arms", nargs="*", metavar="ARM", help="default: every arm that can be chosen here, and the KL penalty")
    parser.add_argument("--latex", action="store_true", help="LaTeX, for amsmath, instead of text")
    parser.add_argument("--check", action="store_true", help="hold each loss against its equation, and print a table of errors")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    arguments = parser.parse_args(argv)
    folder = Path.cwd()
    try:
        files = [read_arm(name, folder) for name in dict.fromkeys(arguments.arms or arm_paths(folder))]
        written = [(file, equation_of(file)) for file in files]
    except Refusal as refusal:
        print(f"pth equations: {refusal}", file=sys.stderr)
        return 2
    if arguments.check:
        from pth_exp.report import equation_check  # torch is imported only when a loss is evaluated

        return equation_check.run(written, arguments.json)
    penalties = [] if arguments.arms else list(schema.KlEstimator)
    if arguments.json:
        print(json.dumps([_record(file, equation) for file, equation in written], indent=1, ensure_ascii=False))
    elif arguments.latex:
        print("\n".join(_latex(written, penalties)))
    else:
        print("\n".join(_text(written, penalties, Painter(sys.stdout))))
    return 0


def equation_of(file: ArmFile) -> Equation | None:
    """An arm's equation, or None where it has none. Raises :class:`Refusal` naming the place in its file."""
    if file.arm.equation is None:
        return None
    try:
        return parse(file.arm.equation, file.arm.parameters())
    except EquationError as error:
        place = f"{_near(file.path)}:{file.line + (error.line or 0)}"
        raise refuse(
            "arm.equation", "", f"{place}, in the equation's {error}", "see pth_exp/equations/ for the language"
        ) from None


def _record(file: ArmFile, equation: Equation | None) -> dict[str, Any]:
    arm = file.arm
    return {
        "name": file.name,
        "label": arm.label,
        "about": file.about,
        "loss": arm.loss,
        "old_policy": arm.old_policy,
        "correction": arm.correction,
        "parameters": arm.parameters(),
        "equation": arm.equation,
        "readable": equation and readable(equation),
        "latex": equation and latex(equation),
        "inputs": equation and sorted(equation.inputs),
        "reference": equation and equation.reference,
        "path": str(file.path),
        "line": file.line,
    }


def _text(written: Sequence[tuple[ArmFile, Equation | None]], penalties: Sequence[str], paint: Painter) -> Iterator[str]:
    for file, equation in written:
        arm = file.arm
        yield f"{paint('bold', f'{file.name}: {arm.label}')}  {paint('dim', f'{_near(file.path)}:{file.line}')}"
        for part in file.about.split("\n\n"):
            yield from paragraph(part, 2, min(paint.width, 120))
        yield ""
        if equation is None:
            yield "    no equation: check 4 cannot judge this loss"
        else:
            yield from (f"    {line}" for line in readable(equation).splitlines())
        yield ""
        for key, value in _facts(arm, equation):
            yield f"  {key}: {value}"
        yield ""
    if penalties:
        yield paint(
            "bold", "The KL penalty, with kl.estimator, kl.clamp and kl.aggregation; kl.coef times it is added to any loss"
        )
        for name in penalties:
            yield f"  {name}"
            yield from (f"    {line}" for line in readable(penalty_equation(name)).splitlines())
        yield ""
    yield from (paint("dim", line) for line in LEGEND.splitlines())


def _facts(arm: schema.Arm, equation: Equation | None) -> Iterator[tuple[str, str]]:
    yield "correction", arm.correction
    for field, (symbol, who) in POLICIES.items():
        if equation is not None and field in equation.inputs - {"logp"}:
            yield symbol, who or OLD[schema.OldPolicy(arm.old_policy)]
    parameters = arm.parameters()
    if parameters:
        yield "parameters", ", ".join(f"{name}={_value(value)}" for name, value in parameters.items())


def _value(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _latex(written: Sequence[tuple[ArmFile, Equation | None]], penalties: Sequence[str]) -> Iterator[str]:
    named = [(f"{file.name}: {file.arm.label}", equation) for file, equation in written]
    for title, equation in [*named, *((f"KL penalty, {name}", penalty_equation(name)) for name in penalties)]:
        if equation is not None:
            yield f"% {title}\n\\[\n{latex(equation)}\n\\]\n"


def _near(path: Path) -> Path:
    """The path as seen from where the user stands, if it lies below."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
