"""Registers the schema with Hydra: every dataclass of :mod:`pth_exp.schema` in the ConfigStore, and its resolvers."""

from __future__ import annotations

import datetime
import secrets
from collections.abc import Mapping

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from pth_exp import schema


def register(arms: Mapping[str, type[schema.Arm]]) -> None:
    """Make the schema known to Hydra under ``/schema/...``; ``arms`` maps a loss's name to its arms' dataclass."""
    store = ConfigStore.instance()
    store.store(group="schema", name="config", node=schema.Config, package="_global_")
    store.store(group="schema", name="model", node=schema.ModelConfig)
    store.store(group="schema", name="optimizer", node=schema.OptimizerConfig)
    store.store(group="schema", name="kl", node=schema.KlConfig)
    store.store(group="schema", name="tracking", node=schema.TrackingConfig)
    for group, variants in {"arm": arms, **schema.VARIANTS}.items():
        for name, node in variants.items():
            store.store(group=f"schema/{group}", name=name, node=node)
    OmegaConf.register_new_resolver("pth_seed", _stream_seed, replace=True)
    OmegaConf.register_new_resolver("pth_stamp", _stamp, use_cache=True, replace=True)


def _stream_seed(seed: int | None) -> int:
    """``seed=null`` concerns the data order only; the other streams then start at 0."""
    return 0 if seed is None else seed


def _stamp() -> str:
    """Name of a sweep: UTC time, and four random hex digits against two sweeps in one second."""
    now = datetime.datetime.now(datetime.UTC)
    return f"{now:%Y%m%dT%H%M%S}-{secrets.token_hex(2)}"
