"""Reading the schema: its fields as a table, and a typed config out of plain values."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pth_exp.schema.arms import BUILTIN_ARMS, Arm
from pth_exp.schema.config import VARIANTS, Config
from pth_exp.schema.fields import Role


@dataclass(frozen=True, slots=True)
class FieldInfo:
    """What the schema says of one leaf field."""

    path: str
    role: Role
    meaning: str
    unit: str
    follows: str


def leaf_fields(config: Config) -> Iterator[FieldInfo]:
    """Every leaf of a built config in declaration order; a leaf inherits nothing, its own role counts."""
    yield from _walk(config, "")


def _walk(node: Any, prefix: str) -> Iterator[FieldInfo]:
    for f in dataclasses.fields(node):
        path, value = prefix + f.name, getattr(node, f.name)
        if dataclasses.is_dataclass(value):
            yield from _walk(value, path + ".")
        else:
            m = f.metadata
            yield FieldInfo(path, m["role"], m["meaning"], m["unit"], m["follows"])


def field_table(arms: Mapping[str, type[Arm]] = BUILTIN_ARMS) -> dict[str, FieldInfo]:
    """Every leaf field that some run may have, by dotted path."""
    table: dict[str, FieldInfo] = {}

    def add(cls: type[Any], prefix: str) -> None:
        hints = typing.get_type_hints(cls)
        for f in dataclasses.fields(cls):
            path, m = prefix + f.name, f.metadata
            variants = [*arms.values()] if path == "arm" else [*VARIANTS.get(path, {}).values()]
            if dataclasses.is_dataclass(hints[f.name]):
                for node in variants or [hints[f.name]]:
                    add(node, path + ".")
            else:
                table.setdefault(path, FieldInfo(path, m["role"], m["meaning"], m["unit"], m["follows"]))

    add(Config, "")
    return table


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint at the known name that is closest to an unknown one; empty when none is close."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def build(values: Mapping[str, Any], arms: Mapping[str, type[Arm]] = BUILTIN_ARMS) -> Config:
    """The typed config of a resolved mapping, as read from a frozen file.

    Raises ``ValueError`` naming the field for a missing or an unknown key, or a value that its type cannot hold.
    """
    values = dict(values)
    types: dict[str, type[Any]] = {group: _variant(group, values.get(group), known) for group, known in VARIANTS.items()}
    types["arm"] = _variant("arm", values.get("arm"), arms, key="loss")
    config = typing.cast(Config, _build(Config, values, "", types))
    shadows: Mapping[str, Any] = config.probe.shadows
    config.probe.shadows = {name: _shadow(node, f"probe.shadows.{name}", arms) for name, node in shadows.items()}
    return config


def _shadow(node: Any, path: str, arms: Mapping[str, type[Arm]]) -> Arm:
    return typing.cast(Arm, _build(_variant(path, node, arms, key="loss"), node, path + ".", {}))


def _variant(group: str, node: Any, known: Mapping[str, type[Any]], key: str = "name") -> type[Any]:
    if not isinstance(node, Mapping):
        raise ValueError(f"{group}: {node!r} is not a mapping; choose one with {group}=NAME")
    name = node.get(key)
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"{group}.{key}: {name!r} is not known; known are {', '.join(sorted(known))}")
    return known[name]


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    """A dataclass's types, once for each: to evaluate them takes longer than to read a config."""
    return typing.get_type_hints(cls)


def _build(cls: Any, values: Mapping[str, Any], path: str, types: Mapping[str, type[Any]]) -> Any:
    hints = _hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]
    for key in values:
        if key not in names:
            raise ValueError(f"{path}{key}: unknown field, with value {values[key]!r}{nearest(str(key), names)}")
    for name in names:
        if name not in values:
            raise ValueError(f"{path}{name}: missing; give it a value with {path}{name}=...")
    names.sort(key=lambda name: dataclasses.is_dataclass(hints[name]))  # groups may interpolate the fields beside them
    return cls(**{n: _convert(types.get(path + n, hints[n]), values[n], path + n) for n in names})


def _convert(hint: Any, value: Any, path: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Union:
        return None if value is None else _convert(args[0], value, path)
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ValueError(f"{path}: {value!r} is not a mapping")
        return _build(typing.cast(type[Any], hint), value, path + ".", {})
    if origin is list:
        if not isinstance(value, list):
            raise ValueError(f"{path}: {value!r} is not a list")
        return [_convert(args[0], v, f"{path}[{i}]") for i, v in enumerate(value)]
    if origin is dict:
        return dict(value)
    if hint is Any:
        return value
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        try:
            return hint(value)
        except ValueError:
            raise ValueError(f"{path}: {value!r} is not one of {', '.join(hint)}") from None
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not hint:
        remedy = (
            "put it into quotes"
            if hint is str
            else "write a number without quotes"
            if isinstance(value, str)
            else f"write {hint.__name__}"
        )
        raise ValueError(f"{path}: {value!r} is not of type {hint.__name__}; {remedy}")
    return value
