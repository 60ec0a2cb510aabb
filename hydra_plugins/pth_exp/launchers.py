"""Hydra's launchers of pth-exp. Every Hydra application on the machine imports this module: nothing heavy at the top."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

if TYPE_CHECKING:
    from pth_exp.launchers.freezing import FreezingLauncher


class PthLocal(Launcher):
    """Freezes every run, then runs them as subprocesses of this machine."""

    def __init__(self, slots: int | None, memory_per_run_gb: float | None) -> None:
        self.slots = slots
        self.memory_per_run_gb = memory_per_run_gb
        self.swept: tuple[str, ...] | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        from pth_exp.launchers.freezing import FreezingLauncher
        from pth_exp.launchers.local import LocalPlace

        place = LocalPlace(self.slots, self.memory_per_run_gb)
        self.launcher: FreezingLauncher = FreezingLauncher(place, hydra_context, config)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        self.launcher.plan.swept = self.swept
        return self.launcher.launch(job_overrides)


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
