"""The settings of verl's that no frozen file can hold: where things lie on the machine that an attempt runs on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from pth_exp.models.resolve import resolve
from pth_exp.schema import Config


def places(config: Config, checkpoints: Path, layout: tuple[int, int]) -> dict[str, Any]:
    """Dotted names of verl's settings to values; ``received.yaml`` lists them, and check 2 expects no others to differ.

    ``layout``: nodes that hold the ranks, and ranks on each.
    """
    nodes, ranks = layout
    pools = ("trainer", "reward.reward_model") if nodes > 1 else ()  # one node is what was frozen
    return {
        **{f"{pool}.nnodes": nodes for pool in pools},
        **{f"{pool}.n_gpus_per_node": ranks for pool in pools},
        "actor_rollout_ref.model.path": str(resolve(config.model)),
        "actor_rollout_ref.rollout.agent.agent_loop_config_path": str(Path(__file__).with_name("agent_loop.yaml")),
        "trainer.default_local_dir": str(checkpoints.absolute()),
    }


def put(verl: DictConfig, values: dict[str, Any]) -> None:
    """Set them."""
    for name, value in values.items():
        OmegaConf.update(verl, name, value)
