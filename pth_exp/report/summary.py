"""Where each run of a sweep stands and what it ended with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pth_exp import lifecycle
from pth_exp.lifecycle import State
from pth_exp.records.reader import RunRecords, Sweep


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run.

    Attributes:
        cell: what it is a replicate of: the arm, and the varied fields of its label other than replicate fields.
        replicate: the values that tell replicates of one cell apart, as text.
        updates: how many are recorded; ``planned``: how many its config asks for.
        accuracy: greedy accuracy of the last validation, None without one.
        accuracy_at: updates done at that validation.
        problems: how many problems it validated on.
    """

    label: str
    arm: str
    cell: str
    replicate: str
    state: State
    state_detail: str
    updates: int
    planned: int
    accuracy: float | None
    accuracy_at: int | None
    problems: int | None

    @property
    def complete(self) -> bool:
        return self.state is State.COMPLETED


def summarise(sweep: Sweep) -> list[RunSummary]:
    """One summary a run, in the sweep's order."""
    replicate = sweep.index["design"]["replicate"]
    return [_summary(run, replicate) for run in sweep.runs]


def cell(run: RunRecords, replicate: Sequence[str]) -> str:
    """The label of the arm and the parts of the run's label that are not replicate fields."""
    _, *parts = run.label.split("·")
    kept = [part for part in parts if part.partition("=")[0] not in replicate]
    return " · ".join([run.config["arm"]["label"], *kept])


def _summary(run: RunRecords, replicate: Sequence[str]) -> RunSummary:
    status = lifecycle.status(run.path)
    validated = [row for row in run.evaluations if row.get("accuracy") is not None]
    last: Mapping[str, Any] = validated[-1] if validated else {}
    return RunSummary(
        label=run.label,
        arm=run.config["arm"]["name"],
        cell=cell(run, replicate),
        replicate=", ".join(f"{field} {_value(run.config, field)}" for field in replicate),
        state=status.state,
        state_detail=status.detail,
        updates=len(run.updates),
        planned=run.config["updates"],
        accuracy=last.get("accuracy"),
        accuracy_at=last.get("update"),
        problems=len(last["correct"]) if last.get("correct") else None,
    )


def _value(config: Mapping[str, Any], path: str) -> Any:
    value: Any = config
    for name in path.split("."):
        value = value[name]
    return "default" if value is None else value
