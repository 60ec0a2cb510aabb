"""What the YAML files behind a composed config say, before OmegaConf merged and coerced it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.default_element import ResultDefault
from hydra.types import RunMode
from omegaconf import Container, DictConfig, OmegaConf

from pth_exp.refusal import Objection, Refusal


def uncoerced(loader: ConfigLoaderImpl, composed: DictConfig, overrides: Sequence[str]) -> dict[str, Any]:
    """The composed config as plain values, each as its file spells it: a quoted number is still a text.

    ``overrides`` choose groups. Raises :class:`Refusal` for a value that the chosen experiment sets and a file merged after it
    replaces.
    """
    plain = plain_values(composed)
    plain.pop("hydra")
    hydra_overrides = list(composed.hydra.overrides.hydra)
    defaults = loader.compute_defaults_list(composed.hydra.job.config_name, [*hydra_overrides, *overrides], RunMode.RUN).defaults
    experiment = f"experiment/{composed.hydra.runtime.choices.get('experiment')}"
    set_by_experiment: dict[str, Any] = {}
    for default in defaults:
        written = _written(loader, default)
        _overlay(plain, written)
        if default.config_path == experiment:
            set_by_experiment = written
    lost = list(_lost(set_by_experiment, plain, "", experiment))
    if lost:
        raise Refusal(lost)
    return plain


def plain_values(config: Container, resolve: bool = False) -> dict[str, Any]:
    """A composed config as plain values. Raises ``MissingMandatoryValue`` when resolving what has no value."""
    return cast(dict[str, Any], OmegaConf.to_container(config, resolve=resolve, throw_on_missing=resolve, enum_to_str=True))


def _written(loader: ConfigLoaderImpl, default: ResultDefault) -> dict[str, Any]:
    """A file's own values, nested as its package says; empty for a schema node and for Hydra's own files."""
    if default.config_path is None or default.config_path.startswith(("hydra/", "schema/")):
        return {}
    loaded = loader.repository.load_config(default.config_path)
    if loaded is None:
        return {}
    values = plain_values(loaded.config)
    values.pop("defaults", None)
    package = default.package if default.package is not None else loaded.header["package"]
    for name in reversed([p for p in (package or "").split(".") if p]):
        values = {name: values}
    values.pop("hydra", None)
    return values


def _overlay(target: dict[str, Any], values: dict[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, dict) and isinstance(target.get(key), dict):
            _overlay(target[key], value)
        else:
            target[key] = value


def _lost(written: dict[str, Any], final: Any, prefix: str, experiment: str) -> list[Objection]:
    lost: list[Objection] = []
    for key, value in written.items():
        got = final.get(key) if isinstance(final, dict) else None
        if isinstance(value, dict) and value:
            lost += _lost(value, got, f"{prefix}{key}.", experiment)
        elif got != value:
            why = f"{experiment}.yaml sets it, and a file merged after it makes it {got}"
            lost.append(Objection(f"{prefix}{key}", str(value), why, "put `_self_` last in the experiment's defaults list"))
    return lost
