"""Drives `pth run` in this process, and freezes sweeps without training them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.callbacks import Callbacks
from hydra.types import HydraContext, RunMode

from pth_exp import cli, run
from pth_exp.launchers.blocks import expand
from pth_exp.launchers.freezing import FreezingLauncher
from pth_exp.launchers.place import Job, RunResult


class Nowhere:
    """A place that starts nothing and remembers what it was given."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def dispatch(self, runs: Sequence[Job]) -> list[RunResult]:
        self.jobs += runs
        return []


def freeze_sweep(*overrides: str, batches: Sequence[Sequence[str]] = ((),)) -> tuple[Path, list[Job]]:
    """Freeze what `pth run OVERRIDES` would run, in the current directory; each of ``batches`` adds overrides to one launch()."""
    settings = [o for o in overrides if o.startswith(("hydra", "+hydra", "experiment=", "name="))]
    with run.hydra_over(None) as hydra:
        master = hydra.compose_config("config", settings, RunMode.MULTIRUN, with_log_configuration=False)
        place = Nowhere()
        launcher = FreezingLauncher(place, HydraContext(hydra.config_loader, Callbacks()), master)
        for more in batches:
            arguments = [o for o in overrides if not o.startswith(("hydra", "+hydra"))] + list(more)
            blocks, params = master.hydra.sweeper.blocks, master.hydra.sweeper.params
            jobs, launcher.plan.swept = expand(blocks, params, arguments, hydra.config_loader)
            launcher.launch(jobs)
    return place.jobs[0].run_dir.parent, place.jobs


def index_of(sweep: Path) -> dict[str, Any]:
    index: dict[str, Any] = json.loads((sweep / "index.json").read_text())
    return index


def pth(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `pth ARGUMENTS`."""
    capsys.readouterr()
    code = cli.main(list(arguments))
    out, err = capsys.readouterr()
    return code, out, err
