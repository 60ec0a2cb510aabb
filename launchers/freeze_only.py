"""No place at all: runs are frozen and checked, and nothing is started."""

from __future__ import annotations

from collections.abc import Sequence

from pth_exp.launchers.place import Job, RunResult
from pth_exp.lifecycle import State


class FreezeOnly:
    """Leaves every run FROZEN: `pth sbatch` writes a script for them, `pth resume` starts them."""

    def dispatch(self, runs: Sequence[Job]) -> list[RunResult]:
        return [RunResult(run.index, run.label, State.FROZEN, "frozen", "", left=True) for run in runs]
