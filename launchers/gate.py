"""The design gate: holds a whole sweep against its design before any run starts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pth_exp import design, freeze
from pth_exp.refusal import Objection, Refusal, refuse
from pth_exp.schema import DesignConfig, Gate


@dataclass(frozen=True)
class Verdict:
    """What the gate found: pass, refused, or labelled, which starts a sweep although it breaks its design."""

    verdict: str
    comparison: design.Comparison
    design: DesignConfig

    def enforce(self) -> None:
        """Raise :class:`Refusal` if the sweep is not to start."""
        if self.verdict == "refused":
            objections = [
                Objection(f"{f.kind}: {f.field}", "", f.message, f.remedy) for f in design.brief(self.comparison.findings)
            ]
            raise Refusal(objections, "the design gate (design.gate=label starts the sweep all the same, labelled)")

    def as_index(self) -> dict[str, Any]:
        return {"verdict": self.verdict, "findings": [dataclasses.asdict(f) for f in self.comparison.findings]}


def hold(runs: Sequence[design.Described], declared: DesignConfig, swept: Sequence[str]) -> Verdict:
    """Compare the runs, and those of the sweep that the design extends."""
    earlier = earlier_runs(declared.extends) if declared.extends is not None else []
    comparison = design.compare([*earlier, *runs], declared, swept)
    resolved = dataclasses.replace(declared, vary=list(swept) if declared.vary is None else declared.vary)
    verdict = "pass" if not comparison.findings else "labelled" if declared.gate is Gate.label else "refused"
    return Verdict(verdict, comparison, resolved)


def earlier_runs(sweep: str) -> list[design.Described]:
    """The runs of an earlier sweep, by its directory, as the gate sees them."""
    folder = Path(sweep)
    try:
        index = json.loads((folder / "index.json").read_text())
        frozen = [freeze.load(folder / run["dir"] / freeze.FILE, run["frozen_sha256"]) for run in index["runs"]]
    except (OSError, ValueError, KeyError) as error:
        raise refuse("design.extends", sweep, f"cannot be read: {error}", "name the directory of a sweep") from error
    return [
        design.Described(
            f"{index['id']}/{run.run['label']}", {**run.config_values, "inputs": run.inputs}, config_id=run.config_id
        )
        for run in frozen
    ]
