"""verl's own settings: which there are, and which values each takes, as its config tree and its dataclasses say."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import json
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Optional

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from pydantic import ConfigDict, TypeAdapter, ValidationError

from pth_exp.refusal import Objection
from pth_exp.schema import nearest
from pth_exp.verl_stack.overrides import FIELD

OPEN = {
    "actor_rollout_ref.rollout.engine_kwargs.vllm": "vllm.engine.arg_utils.AsyncEngineArgs",
    "actor_rollout_ref.actor.optim.override_optimizer_config": "torch.optim.AdamW",
}
"""Branches without names of verl's own, whose settings are the arguments of a class."""

HF_CONFIG = "actor_rollout_ref.model.override_config"
"""Its settings are attributes of the model's own config."""


@cache
def defaults() -> DictConfig:
    """verl's tree as it composes it by itself, interpolations not resolved; read from its files, without importing verl."""
    spec = importlib.util.find_spec("verl")
    assert spec is not None and spec.submodule_search_locations is not None
    folder = Path(next(iter(spec.submodule_search_locations))) / "trainer" / "config"
    with initialize_config_dir(str(folder), version_base=None):
        return compose("ppo_trainer")


def objections(name: str, value: Any, text: str, model: Callable[[], Any]) -> Iterator[Objection]:
    """What is wrong with a setting, whether verl would say so or drop it without a word.

    Args:
        name: dotted name.
        value: plain.
        text: the override as given.
        model: gives the model's own config, whose names are those of ``HF_CONFIG``.
    """
    branch, _, leaf = name.rpartition(".")
    if branch == HF_CONFIG:
        names = {"attn_implementation", *model().to_dict()}
    elif branch in OPEN:
        names = _arguments(OPEN[branch])
    else:
        yield from _objections(name, value, text)
        return
    if leaf not in names:
        yield _unknown(name, text, [f"{branch}.{known}" for known in names])


def _objections(name: str, value: Any, text: str) -> Iterator[Objection]:
    node: Any = _tree()
    hint: Any = Any
    for part in name.split("."):
        hints = _hints(node) or _fields(hint)
        below = node if isinstance(node, Mapping) else {}
        if part.startswith("_") or part not in {*below, *hints}:
            yield _unknown(name, text, _names())
            return
        hint, node = hints.get(part, Any), below.get(part)
    if isinstance(node, Mapping) or dataclasses.is_dataclass(hint):
        yield Objection(FIELD, text, f"{name} is a branch of settings", f"name each of them: {name}.NAME=VALUE")
    elif wrong := _wrong(value, _plain_type(node) if hint is Any else hint):
        yield Objection(FIELD, text, f"not a value that verl takes: {wrong}", f"verl's own value is {node}")


def _wrong(value: Any, hint: Any) -> str:
    """Why a value is not of a type; empty when it is."""
    adapter = TypeAdapter(hint, config=ConfigDict(strict=True, arbitrary_types_allowed=True))
    try:
        adapter.validate_json(json.dumps(value))  # as JSON a list may stand for a tuple
    except ValidationError as error:
        return error.errors()[0]["msg"]
    return ""


def _plain_type(default: Any) -> Any:
    """The type of a setting that no dataclass declares, or null; anything where its value does not tell."""
    if default is None or (isinstance(default, str) and "${" in default):
        return Any
    return Optional[type(default)]


@cache
def _tree() -> dict[str, Any]:
    return typing.cast(dict[str, Any], OmegaConf.to_container(defaults()))


def _hints(node: Any) -> dict[str, Any]:
    """The fields of the dataclass that verl makes of a branch, with their types."""
    target = node.get("_target_") if isinstance(node, Mapping) else None
    return _fields(_named(target)) if target else {}


@cache
def _fields(cls: Any) -> dict[str, Any]:
    if not dataclasses.is_dataclass(cls):
        return {}
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls) if not f.name.startswith("_")}


@cache
def _names() -> list[str]:
    """Every setting that has a name."""
    return [name for name in _below(_tree(), "") if not name.endswith("._target_")]


def _below(node: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for name in dict.fromkeys([*node, *_hints(node)]):
        child = node.get(name)
        yield from _below(child, f"{prefix}{name}.") if isinstance(child, Mapping) and child else [f"{prefix}{name}"]


@cache
def _arguments(target: str) -> set[str]:
    cls = _named(target)
    if dataclasses.is_dataclass(cls):
        return {f.name for f in dataclasses.fields(cls)}
    return set(inspect.signature(cls).parameters)


@cache
def _named(target: str) -> Any:
    module, _, name = target.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _unknown(name: str, text: str, known: list[str]) -> Objection:
    return Objection(FIELD, text, f"verl has no setting {name}", f"see verl's ppo_trainer config{nearest(name, known)}")
