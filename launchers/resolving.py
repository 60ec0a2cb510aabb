"""Resolves the interpolations of many jobs' configs, which differ in a few values.

To make OmegaConf's form of a config takes longer than all else that is done to compose a job. So it is made once for the jobs
that share it: each job's own values are put into it, what interpolates is looked up, and they are taken out again.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from omegaconf import Container, DictConfig, OmegaConf

from pth_exp.launchers.sources import plain_values


def needs_resolving(value: object) -> bool:
    """Whether OmegaConf would make anything else of a value without keys, or refuse it: it interpolates, or it is missing."""
    if isinstance(value, str):
        return "${" in value or value == "???"
    if isinstance(value, Mapping):
        return any(map(needs_resolving, [*value, *value.values()]))
    return isinstance(value, Sequence) and any(map(needs_resolving, value))


class Resolver:
    """Resolves configs that are ``shared`` but for some values."""

    def __init__(self, shared: Mapping[str, Any]) -> None:
        self._shared = shared
        self._config = OmegaConf.create(dict(shared))

    def resolve(self, raw: Mapping[str, Any], master: DictConfig) -> dict[str, Any]:
        """``raw`` as plain values, with what ``master`` has looked up once and for all. Raises what OmegaConf raises."""
        OmegaConf.copy_cache(from_config=master, to_config=self._config)
        changed = list(_changed(self._shared, raw, self._config))
        for node, key, value, _ in changed:
            node[key] = value
        try:
            return _resolved(raw, self._config)
        finally:
            for node, key, _, value in changed:
                node[key] = value


def _changed(shared: Mapping[str, Any], raw: Mapping[str, Any], node: DictConfig) -> Iterator[tuple[DictConfig, str, Any, Any]]:
    """The node and key of each value that is another one in ``raw``, with that and the shared one. The keys are the same."""
    for key, value in raw.items():
        before = shared[key]
        if isinstance(value, dict) and isinstance(before, dict) and value.keys() == before.keys():
            yield from _changed(before, value, cast(DictConfig, node._get_node(key)))
        elif repr(value) != repr(before):
            yield node, key, value, before


def _resolved(raw: Mapping[str, Any], node: DictConfig) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in raw.items():
        if isinstance(value, dict):
            values[key] = _resolved(value, cast(DictConfig, node._get_node(key)))
        elif needs_resolving(value):
            values[key] = _plain(node[key])
        else:
            values[key] = value
    return values


def _plain(value: Any) -> Any:
    if isinstance(value, Container):
        return plain_values(value, resolve=True)
    return value.name if isinstance(value, enum.Enum) else value
