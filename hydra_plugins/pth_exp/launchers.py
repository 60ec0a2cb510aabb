"""Hydra's launchers of pth-exp. Every Hydra application on the machine imports this module: nothing heavy at the top."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

if TYPE_CHECKING:
    from pth_exp.launchers.freezing import FreezingLauncher


class _Freezing(Launcher):
    """Freezes every run, then sends it to its place with the settings of the launcher's YAML."""

    name: str

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.swept: tuple[str, ...] | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        from omegaconf import OmegaConf

        from pth_exp.launchers.freezing import FreezingLauncher
        from pth_exp.launchers.places import open_place

        settings: Any = OmegaConf.to_container(OmegaConf.create(self.settings))
        chosen = {"name": self.name, "settings": settings}
        self.launcher: FreezingLauncher = FreezingLauncher(open_place(self.name, settings), hydra_context, config, chosen)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        self.launcher.plan.swept = self.swept
        return self.launcher.launch(job_overrides)


class PthLocal(_Freezing):
    """Subprocesses of this machine."""

    name = "pth_local"


class PthRay(_Freezing):
    """Jobs of a Ray cluster."""

    name = "pth_ray"


class PthSlurm(_Freezing):
    """Jobs of a SLURM cluster."""

    name = "pth_slurm"


class PthFreeze(_Freezing):
    """No place: every run is frozen, none is started."""

    name = "pth_freeze"


class PthDryRun(Launcher):
    """Composes and checks every run and prints it; starts nothing."""

    def __init__(self, resolve: bool, table: bool) -> None:
        self.resolve = resolve
        self.table = table
        self.swept: tuple[str, ...] | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        from pth_exp.launchers.freezing import Plan

        self.plan = Plan(hydra_context, config)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from pth_exp.launchers import showing

        self.plan.swept = self.swept
        return showing.launch(self.plan, job_overrides, self.resolve, self.table)
