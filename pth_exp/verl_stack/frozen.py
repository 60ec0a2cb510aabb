"""The run's frozen config, as every process of a verl job finds it: by two environment variables."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from pth_exp import freeze
from pth_exp.schema import Config, VerlStack

PATH, SHA256 = "PTH_FROZEN", "PTH_FROZEN_SHA256"


@cache
def frozen_config() -> Config:
    """The config of the run that this process belongs to, verified. Raises ``FrozenError`` for a file that changed."""
    return freeze.load(Path(os.environ[PATH]), os.environ[SHA256]).config


def verl_stack(config: Config) -> VerlStack:
    """The stack's part of a config. Raises ``ValueError`` for another stack's."""
    if not isinstance(config.stack, VerlStack):
        raise ValueError(f"stack.name is {config.stack.name!r}; this is the stack 'verl'")
    return config.stack
