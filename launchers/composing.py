"""Composes and resolves the config of each job of a sweep.

Hydra composes a job in two steps: the config groups, then the single values on top. The first is slow and the same for every
job with the same groups, so it is done once for each choice of groups. The second is done here on plain values: OmegaConf would
coerce ``lr='1'`` to a float and ``name=5`` to a text without a word, the schema's own reading refuses them.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pth_exp import machine, schema, validity
from pth_exp.design import flatten
from pth_exp.launchers.resolving import Resolver, needs_resolving
from pth_exp.launchers.sources import plain_values, uncoerced
from pth_exp.refusal import Objection, Refusal, objection, refuse

_KEY = "tracking.key_variable="
"""An override that is given a key where its name belongs is refused, and is not to be printed."""

SETTLED = ("stack.device",)
"""Fields whose value may be decided when a run is frozen."""


@dataclass(frozen=True)
class Composed:
    """One job's config.

    Attributes:
        overrides: the job's overrides, as given.
        raw: composed, interpolations not resolved.
        values: resolved, as it is to be frozen.
        config: the same, typed.
        given: dotted field to the value that an override asked for.
        choices: config group to the option chosen on the command line.
        hydra: Hydra's own node.
        environment: ``hydra.job.env_set``, resolved.
    """

    overrides: list[str]
    raw: dict[str, Any]
    values: dict[str, Any]
    config: schema.Config
    given: dict[str, Any]
    choices: dict[str, str]
    hydra: dict[str, Any]
    environment: dict[str, str]


@dataclass(frozen=True)
class _Base:
    """What the jobs with one choice of groups share: the composed config, and Hydra's own node in its two forms."""

    raw: dict[str, Any]
    hydra: dict[str, Any]
    settings: DictConfig
    resolver: Resolver


class Composer:
    """Composes the jobs of one sweep. ``arms`` maps a loss's name to its arms' dataclass."""

    def __init__(self, loader: ConfigLoaderImpl, master: DictConfig, arms: Mapping[str, type[schema.Arm]]) -> None:
        self._loader = loader
        self._master = master
        self._arms = arms
        self._parser = OverridesParser.create()
        self._parsed: dict[str, Override] = {}
        self._groups: dict[str, bool] = {}
        self._bases: dict[tuple[str, ...], _Base] = {}

    def compose(self, overrides: Sequence[str]) -> Composed:
        """The config of one job. Raises :class:`Refusal` naming field, value and remedy."""
        where = " ".join(f"{_KEY}***" if override.startswith(_KEY) else override for override in overrides)
        try:
            return self._compose(list(overrides))
        except Refusal as refusal:
            raise Refusal(refusal.objections, where) from None
        except HydraException as error:
            raise Refusal([Objection("config", "", str(error).strip(), "correct the override")], where) from error
        except OmegaConfBaseException as error:
            if (behind := _refusal_behind(error)) is not None:
                raise Refusal(behind.objections, where) from None
            raise refuse(str(error.full_key or where), "", str(error).splitlines()[0], "correct the value") from error

    def _compose(self, overrides: list[str]) -> Composed:
        parsed = [self._parse(text) for text in overrides]
        groups = [o for o in parsed if self._is_group(o)]
        refuse_without_option(groups)
        base, raw, given = self._merged(parsed)
        values = self._resolved(base, raw)
        _make_absolute(values)
        _settle_device(values)
        if values["probe"]["shadows"]:
            raise refuse("probe.shadows", "", "is filled in when a run is frozen", "name the arms in probe.shadow_arms")
        values["probe"]["shadows"] = {name: self._shadow(name, parsed) for name in _others(values)}
        try:
            config = schema.build(values, self._arms)
        except ValueError as error:
            raise Refusal([objection(str(error))]) from None
        objections = list(validity.objections(config))
        if objections:
            raise Refusal(objections)
        choices = {o.key_or_group: str(o.value()) for o in groups}
        given = {
            path: _select(values, path) if _interpolated(value) or path in schema.LOCATIONS or path in SETTLED else value
            for path, value in given.items()
        }
        hydra = {**base.hydra, "overrides": {**base.hydra["overrides"], "task": overrides}}
        return Composed(overrides, raw, _plain(config), config, given, choices, {"hydra": hydra}, _environment(raw, hydra))

    def _merged(self, parsed: Sequence[Override]) -> tuple[_Base, dict[str, Any], dict[str, Any]]:
        """What the groups bring, the config with the single values on top, and those values."""
        groups = [o for o in parsed if self._is_group(o)]
        base = self._base(tuple(str(o.input_line) for o in groups))
        raw = copy.deepcopy(base.raw)
        given: dict[str, Any] = {}
        for override in parsed:
            if override not in groups:
                self._assign(raw, override, given)
        self._assign_per_arm(raw, given)
        _refuse_missing(raw)
        return base, raw, given

    def _resolved(self, base: _Base, raw: Mapping[str, Any]) -> dict[str, Any]:
        HydraConfig.instance().cfg = cast(Any, base.settings)  # what the resolver `hydra:` reads
        return base.resolver.resolve(raw, self._master)

    def _shadow(self, name: str, parsed: Sequence[Override]) -> dict[str, Any]:
        """The arm ``name`` as this run would have it, without what was chosen and set for the run's own."""
        arms = self._loader.get_group_options("arm")
        if name not in arms:
            remedy = f"arms are {', '.join(sorted(arms))}{schema.nearest(name, arms)}"
            raise refuse("probe.shadow_arms", name, "no such arm", remedy)
        others = [o for o in parsed if o.key_or_group.split(".")[0] != "arm"]
        base, raw, _ = self._merged([self._parse(f"arm={name}"), *others])
        return cast(dict[str, Any], self._resolved(base, raw)["arm"])

    def _parse(self, text: str) -> Override:
        if text not in self._parsed:
            self._parsed[text] = self._parser.parse_override(text)
        return self._parsed[text]

    def _is_group(self, override: Override) -> bool:
        key = override.key_or_group
        if key not in self._groups:
            self._groups[key] = override.package is not None or bool(self._loader.get_group_options(key))
        return self._groups[key]

    def _base(self, groups: tuple[str, ...]) -> _Base:
        if groups not in self._bases:
            composed = self._loader.load_sweep_config(self._master, list(groups))
            settings = OmegaConf.masked_copy(composed, "hydra")
            raw = uncoerced(self._loader, composed, groups)
            self._bases[groups] = _Base(raw, plain_values(composed.hydra), settings, Resolver(raw))
        return self._bases[groups]

    def _assign(self, raw: dict[str, Any], override: Override, given: dict[str, Any]) -> None:
        path, text = override.key_or_group, str(override.input_line)
        if override.is_delete():
            raise refuse(path, "", f"{text} takes away a field that every run needs", "give it a value instead")
        value = override.value()
        parent, name = _parent(raw, path)
        if parent is None or name not in parent:
            raise self._unknown(raw, path, value)
        if override.is_add():
            raise refuse(path, value, "exists already, so there is nothing to add", f"write {text.lstrip('+')}")
        if path in given and given[path] != value:
            raise refuse(path, f"{given[path]} and {path}={value}", "given twice", "give it once")
        if isinstance(value, dict) and isinstance(parent[name], dict) and parent[name]:
            for key, inner in value.items():
                if key not in parent[name]:
                    raise self._unknown(raw, f"{path}.{key}", inner)
                parent[name][key] = given[f"{path}.{key}"] = inner
            return
        parent[name] = given[path] = value

    def _unknown(self, raw: dict[str, Any], path: str, value: object) -> Refusal:
        known = [*flatten(raw), *raw]
        hint = schema.nearest(path, known)
        if path.startswith("arm."):
            arm = raw["arm"].get("name") if isinstance(raw.get("arm"), dict) else None
            remedy = (
                f"arm {arm} has {', '.join(sorted(raw['arm']))}; what one arm alone has is set in a block of hydra/sweeper=blocks"
            )
            return refuse(path, value, "unknown field of this arm", remedy)
        return refuse(path, value, "unknown field", f"the fields are shown by `pth run ... --dry-run`{hint}")

    def _assign_per_arm(self, raw: dict[str, Any], given: Mapping[str, Any]) -> None:
        """Give fields that ``design.per_arm`` declares their arm's value; an override stands, and the gate names it."""
        for declared in raw["design"]["per_arm"] or []:
            values = declared.get("values") or {}
            arm, path = raw["arm"].get("name"), declared.get("field")
            if arm in values and path not in given:
                parent, name = _parent(raw, str(path))
                if parent is None or name not in parent:
                    raise refuse("design.per_arm", path, "unknown field", "name a field of the config")
                parent[name] = values[arm]


def _others(values: Mapping[str, Any]) -> list[str]:
    """The shadow arms that are not the run's own, which a sweep over arms may name as well."""
    names = values["probe"]["shadow_arms"]
    if not isinstance(names, list):
        raise refuse("probe.shadow_arms", names, "is no list", "write probe.shadow_arms=[NAME,NAME]")
    return [str(name) for name in names if name != values["arm"]["name"]]


def _make_absolute(values: dict[str, Any]) -> None:
    """A run may be resumed from another directory: what lies at a relative path now is named by its absolute one."""
    for location in ("task.path", "model.path"):
        parent, name = _parent(values, location)
        path = parent.get(name) if parent is not None else None
        if parent is not None and isinstance(path, str) and Path(path).is_dir():
            parent[name] = str(Path(path).absolute())


def _settle_device(values: dict[str, Any]) -> None:
    """verl's config names the device, so ``auto`` is what this machine has; the trainer looks where it runs."""
    stack = values.get("stack")
    if isinstance(stack, dict) and stack.get("name") == "verl" and stack.get("device") == "auto":
        stack["device"] = "cuda" if machine.visible_gpus() else "cpu"


def _refusal_behind(error: BaseException) -> Refusal | None:
    """The refusal that a resolver raised, however often OmegaConf wrapped it."""
    cause = error.__cause__ or error.__context__
    return cause if cause is None or isinstance(cause, Refusal) else _refusal_behind(cause)


def refuse_without_option(groups: Sequence[Override]) -> None:
    """Refuse ``group=null`` and ``~group``: the schema's defaults would quietly stand in for the option taken away."""
    without = [o for o in groups if o.is_delete() or (not o.is_sweep_override() and o.value() is None)]
    if without:
        raise Refusal(
            Objection(
                o.key_or_group, "" if o.is_delete() else "null", "a run without it would fall back on the schema's defaults",
                "for no penalty write kl=none" if o.key_or_group == "kl" else f"give {o.key_or_group} an option, or leave it out",
            )
            for o in without
        )  # fmt: skip


def _interpolated(value: object) -> bool:
    return isinstance(value, str) and "${" in value


def _environment(raw: Mapping[str, Any], hydra: Mapping[str, Any]) -> dict[str, str]:
    """The variables that a worker gets: what they interpolate is looked up now, in the config and in this environment."""
    env_set = hydra["job"]["env_set"]
    if not needs_resolving(list(env_set.values())):
        return {str(name): str(value) for name, value in env_set.items()}
    whole = OmegaConf.create({**raw, "hydra": {"job": {"env_set": env_set}}})
    return {str(name): str(value) for name, value in plain_values(whole.hydra.job.env_set, resolve=True).items()}


def _refuse_missing(raw: Mapping[str, Any]) -> None:
    missing = [path for path, value in flatten(raw).items() if value == "???"]
    if missing:
        raise Refusal(Objection(path, "???", "has no value", f"give it one with {path}=...") for path in missing)


def _parent(raw: dict[str, Any], path: str) -> tuple[dict[str, Any] | None, str]:
    *parents, name = path.split(".")
    node: Any = raw
    for key in parents:
        node = node.get(key) if isinstance(node, dict) else None
    return (node if isinstance(node, dict) else None), name


def _select(values: Mapping[str, Any], path: str) -> Any:
    node: Any = values
    for key in path.split("."):
        node = node[key]
    return node


def _plain(node: Any) -> Any:
    """Plain values of a typed config, in which an integer given for a float has become one; enums as text."""
    if dataclasses.is_dataclass(node):
        return {f.name: _plain(getattr(node, f.name)) for f in dataclasses.fields(node)}
    if isinstance(node, list):
        return [_plain(v) for v in node]
    if isinstance(node, dict):
        return {k: _plain(v) for k, v in node.items()}
    return node.value if isinstance(node, enum.Enum) else node
