"""Hydra's sweeper of pth-exp. Every Hydra application on the machine imports this module: nothing heavy at the top."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.plugins import Plugins
from hydra.core.utils import JobStatus
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class BlocksSweeper(Sweeper):
    """Launches a union of grids as one batch."""

    def __init__(self, blocks: Sequence[Any], params: Mapping[str, Any]) -> None:
        self.blocks = blocks
        self.params = params

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.loader = hydra_context.config_loader
        self.launcher: Any = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Any:
        from pth_exp.launchers.blocks import expand
        from pth_exp.launchers.freezing import RunsFailed

        jobs, self.launcher.swept = expand(self.blocks, self.params, arguments, self.loader)
        returns = self.launcher.launch(jobs, initial_job_idx=0)
        if any(returned.status is JobStatus.FAILED for returned in returns):
            raise RunsFailed
        return [returns]
