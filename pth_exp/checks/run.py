"""All checks over a sweep, and whether they came out as its design expects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any

from pth_exp import lifecycle
from pth_exp.checks import batches, config, losses, ratio
from pth_exp.checks.result import Outcome, Verdict
from pth_exp.lifecycle import State
from pth_exp.records.reader import RunRecords, Sweep

CHECKS = (ratio.NAME, config.NAME, batches.NAME, losses.NAME)

UNREMARKABLE = (Outcome.passed, Outcome.warned)
"""Verdicts that need no expectation; a fail, or something not measured, has to be declared."""


@dataclass(frozen=True, slots=True)
class Surprise:
    """A verdict other than the expected one, or an expectation that nothing met."""

    run: str
    check: str
    expected: str
    found: str
    reason: str


@dataclass(frozen=True, slots=True)
class Report:
    """Verdicts in the sweep's order, check by check; ``declared`` has the verdict that design.expect names for (run, check)."""

    verdicts: list[Verdict]
    surprises: list[Surprise]
    declared: Mapping[tuple[str, str], str]

    def as_dict(self) -> dict[str, Any]:
        return {
            "as_expected": not self.surprises,
            "verdicts": [v.as_dict() | {"declared": self.declared.get((v.run, v.check))} for v in self.verdicts],
            "surprises": [asdict(surprise) for surprise in self.surprises],
        }

    def as_expected(self, verdict: Verdict) -> bool:
        """Whether a verdict is the declared one, or needs no declaration."""
        wanted = self.declared.get((verdict.run, verdict.check))
        return verdict.outcome in UNREMARKABLE if wanted is None else verdict.outcome == wanted

    def of(self, run: str, check: str) -> Verdict:
        """The verdict of one check on one run; raises KeyError for a pair that was not judged."""
        for verdict in self.verdicts:
            if (verdict.run, verdict.check) == (run, check):
                return verdict
        raise KeyError(f"{run}, {check}")


def check_sweep(sweep: Sweep) -> Report:
    """Runs checks 1 to 4 and holds the verdicts against ``design.expect``; a later expectation overrides an earlier one."""
    verdicts = [ratio.check(run) for run in sweep.runs] + config.check(sweep)
    verdicts += [one.check(run) for one in (batches, losses) for run in sweep.runs]
    surprises = [Surprise(p.file, "run", "records", "none", p.message) for p in sweep.problems]
    surprises += [surprise for run in sweep.runs if (surprise := _not_completed(run))]
    expectations = sweep.index["design"]["expect"]
    met: set[int] = set()
    declared: dict[tuple[str, str], str] = {}
    for verdict in verdicts:
        matching = [
            i
            for i, wanted in enumerate(expectations)
            if wanted["check"] == verdict.check and fnmatchcase(verdict.run, wanted["run"])
        ]
        met.update(matching)
        if matching:
            declared[verdict.run, verdict.check] = expectations[matching[-1]]["verdict"]
    report = Report(verdicts, surprises, declared)
    for verdict in verdicts:
        if not report.as_expected(verdict):
            wanted = declared.get((verdict.run, verdict.check), "pass or warn")
            surprises.append(Surprise(verdict.run, verdict.check, wanted, verdict.outcome, verdict.reason))
    for i, wanted in enumerate(expectations):
        if i not in met:
            where = f"no run is called {wanted['run']}" if wanted["check"] in CHECKS else f"checks are {', '.join(CHECKS)}"
            surprises.append(
                Surprise(wanted["run"], wanted["check"], wanted["verdict"], "no such verdict", f"design.expect: {where}")
            )
    return report


def _not_completed(run: RunRecords) -> Surprise | None:
    """A run whose last step, the verification, did not succeed is not done, however many updates it recorded."""
    status = lifecycle.status(run.path)
    if status.state is State.COMPLETED:
        return None
    return Surprise(run.label, "run", State.COMPLETED, status.state, status.detail)
