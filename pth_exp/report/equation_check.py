"""``pth equations --check``: each arm's loss held against its equation, as a table that Markdown shows as one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from pth_exp import schema
from pth_exp.armfiles import ArmFile
from pth_exp.checks.losses import TOLERANCE
from pth_exp.checks.result import short
from pth_exp.equations import Equation
from pth_exp.losses import get_loss
from pth_exp.probes.equation import compare
from pth_exp.probes.inputs import Input, fixed_inputs, random_inputs
from pth_exp.probes.likeness import Differences

RANDOM: Final = {"count": 1000, "responses": 4, "longest": 512}
CAPTION = (
    "Largest relative error in float64, of the value and of the gradient of a response. Fixed inputs are the corners; the "
    f"{RANDOM['count']:,} random ones hold up to {RANDOM['responses']} responses of 1 to {RANDOM['longest']} tokens, advantages "
    "of both signs, and sampler, old policy and reference at 0.03, 1 or 6 nats from the learner."
)
HEADER = "| arm | value, fixed | gradient, fixed | value, random | gradient, random |\n|---|---|---|---|---|"


@dataclass(frozen=True, slots=True)
class Checked:
    """One arm; ``fixed`` and ``random`` are [value error, gradient error], None with the reason why they were not measured."""

    arm: str
    fixed: list[float] | None
    random: list[float] | None
    not_measured: str | None

    @property
    def passed(self) -> bool:
        return self.fixed is not None and self.random is not None and max(*self.fixed, *self.random) <= TOLERANCE


def run(written: Sequence[tuple[ArmFile, Equation | None]], as_json: bool) -> int:
    """Prints a row as soon as it is measured. Exit code 1 if an error is above 1e-5, or was not measured."""
    torch.set_num_threads(1)
    rows: list[Checked] = []
    if not as_json:
        print(f"{CAPTION}\n\n{HEADER}")
    for checked in _checked(written):
        rows.append(checked)
        if not as_json:
            print(_row(checked), flush=True)
    if as_json:
        print(json.dumps([dataclasses.asdict(row) | {"passed": row.passed} for row in rows], indent=1))
    return 0 if all(row.passed for row in rows) else 1


def _checked(written: Sequence[tuple[ArmFile, Equation | None]]) -> Iterator[Checked]:
    fixed, random = fixed_inputs(), list(random_inputs(**RANDOM))
    for file, equation in written:
        if equation is None:
            yield Checked(file.name, None, None, "no equation")
            continue
        try:
            arm = _with_defaults(file.arm)
            corners, rest = (_errors(_compare(arm, equation, inputs)) for inputs in (fixed, random))
            yield Checked(file.name, corners, rest, None)
        except Exception as error:  # a study's loss may raise anything; the table goes on
            yield Checked(file.name, None, None, f"{type(error).__name__}: {' '.join(str(error).split())}")


def _compare(arm: schema.Arm, equation: Equation, inputs: Sequence[Input]) -> Differences:
    return compare(get_loss(arm.loss, **arm.parameters()), equation, arm, inputs, torch.float64)


def _errors(differences: Differences) -> list[float]:
    return [differences.value_error, differences.gradient_error]


def _with_defaults(arm: schema.Arm) -> schema.Arm:
    """What a run supplies, as ``norm_tokens: ${max_response_tokens}``, at the default of the run's field."""
    fields: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(schema.Config)}
    named = {name: value for name, value in arm.parameters().items() if isinstance(value, str) and value in fields}
    supplied: dict[str, Any] = {name: float(fields[value]) for name, value in named.items()}
    return dataclasses.replace(arm, **supplied)


def _row(checked: Checked) -> str:
    if checked.fixed is None or checked.random is None:
        return f"| {checked.arm} | not measured: {checked.not_measured} | | | |"
    mark = "" if checked.passed else " **fail**"
    return f"| {checked.arm}{mark} | {' | '.join(map(short, (*checked.fixed, *checked.random)))} |"
