"""What a check says of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class Outcome(StrEnum):
    passed = "pass"
    failed = "fail"
    warned = "warn"
    not_measured = "not measured"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict of one check on one run.

    Attributes:
        check: ratio, config, batches or losses.
        run: the run's label.
        outcome: the verdict.
        number: the deciding number, short enough for a table.
        reason: one sentence that says what the number means.
        details: further evidence, a sentence each.
        values: the numbers behind it, for machines.
        self_reported: what the verdict rests on that the stack measured about itself and that nothing else confirms.
    """

    check: str
    run: str
    outcome: Outcome
    number: str
    reason: str
    details: tuple[str, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    self_reported: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def short(value: float) -> str:
    """A number in about three digits."""
    return "0" if value == 0 else f"{value:.3g}"


def not_all_there(measured: int, wanted: int) -> str | None:
    """The sentence for a run with fewer updates recorded than its config asks for; None when they are all there."""
    return None if measured >= wanted else f"{measured} of {wanted} updates are recorded"
