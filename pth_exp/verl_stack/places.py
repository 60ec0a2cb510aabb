"""The settings of verl's that no frozen file can hold: where things lie on the machine that an attempt runs on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from pth_exp.models.resolve import resolve
from pth_exp.schema import Config


def places(config: Config, checkpoints: Path) -> dict[str, Any]:
    """Dotted names of verl's settings to values; ``received.yaml`` lists them, and check 2 expects no others to differ."""
    return {
        "actor_rollout_ref.model.path": str(resolve(config.model)),
        "actor_rollout_ref.rollout.agent.agent_loop_config_path": str(Path(__file__).with_name("agent_loop.yaml")),
        "trainer.default_local_dir": str(checkpoints.absolute()),
    }


def put(verl: DictConfig, values: dict[str, Any]) -> None:
    """Set them."""
    for name, value in values.items():
        OmegaConf.update(verl, name, value)
