"""Arms as their YAML files declare them, read without Hydra and without resolving what belongs to a run."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

import pth_exp.conf
from pth_exp import extensions, schema
from pth_exp.refusal import refuse

CONF = Path(str(pth_exp.conf.__file__)).parent
_SCHEMA = re.compile(r"/schema/arm/(\w+)@_here_")
_REFERENCE = re.compile(r"\$\{(\w[\w.]*)\}")


_Loader: Any = type("_Loader", (yaml.SafeLoader,), {"__doc__": "Reads 3e-4 as the number that OmegaConf reads."})
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789"))


@dataclass(frozen=True, slots=True)
class ArmFile:
    """One arm.

    Attributes:
        name: as in ``arm=NAME``.
        path: its file.
        line: where its equation stands in the file; 1 if it inherits it.
        about: the comment at the head of the file, as text; a blank line between paragraphs.
        arm: its values, the schema's defaults included. A value that a run supplies stands as its field's name.
    """

    name: str
    path: Path
    line: int
    about: str
    arm: schema.Arm


def arm_paths(folder: Path) -> dict[str, Path]:
    """Every arm that can be chosen from ``folder``: built in, of its study, of plug-ins."""
    places = [CONF, *(conf for _, conf in extensions.conf_folders(folder, CONF))]
    paths = {path.stem: path for conf in reversed(places) for path in (conf / "arm").glob("*.yaml")}
    return dict(sorted(paths.items()))


def read_arm(name: str, folder: Path) -> ArmFile:
    """The arm ``name`` as it can be chosen from ``folder``.

    Imports a study's ``my_losses.py`` only for an arm that is not built in. Raises :class:`pth_exp.refusal.Refusal` for an
    unknown name, or a file that cannot be read.
    """
    paths = arm_paths(folder)
    if name not in paths:
        hint = schema.nearest(name, paths)
        raise refuse("ARM", name, f"there is no such arm{hint}", f"choose one of {', '.join(paths)}")
    text = paths[name].read_text(encoding="utf-8")
    values = _values(name, paths, folder, ())
    line = next((i for i, row in enumerate(text.splitlines(), 1) if row.startswith("equation:")), 1)
    arms: Mapping[str, type[schema.Arm]] = schema.BUILTIN_ARMS
    if values.get("loss") not in arms:
        arms = extensions.arms_here(folder)
    if values.get("loss") not in arms:
        raise refuse("loss", values.get("loss"), f"{paths[name]} names no known loss", f"known are {', '.join(sorted(arms))}")
    cls = arms[str(values["loss"])]
    fields = {f.name for f in dataclasses.fields(cls)}
    for key in values:
        if key not in fields:
            raise refuse(
                f"arm.{key}", values[key], f"{paths[name]} sets an unknown field{schema.nearest(key, fields)}", "correct it"
            )
    return ArmFile(name, paths[name], line, _about(text), cls(**values))


def _values(name: str, paths: Mapping[str, Path], folder: Path, inside: tuple[str, ...]) -> dict[str, Any]:
    """The file's values over those of the files that its defaults list names, in Hydra's order."""
    if name not in paths or name in inside:
        raise refuse("defaults", name, f"{paths[inside[-1]]} names it", "name another arm of the folder")
    try:
        own = yaml.load(paths[name].read_text(encoding="utf-8"), _Loader) or {}
    except yaml.YAMLError as error:
        raise refuse(str(paths[name]), "", f"is not YAML: {error}", "correct it") from error
    values: dict[str, Any] = {}
    defaults = own.pop("defaults", [])
    for entry in [*defaults, *([] if "_self_" in defaults else ["_self_"])]:
        if entry == "_self_":
            values |= {key: _plain(value) for key, value in own.items()}
        elif isinstance(entry, str) and (match := _SCHEMA.fullmatch(entry)):
            values |= _schema_defaults(match[1], folder)
        elif isinstance(entry, str) and entry.removesuffix(".yaml").isidentifier():
            values |= _values(entry.removesuffix(".yaml"), paths, folder, (*inside, name))
        else:
            raise refuse("defaults", entry, f"{paths[name]} names it", "name /schema/arm/LOSS@_here_, or an arm of the folder")
    return values


def _schema_defaults(loss: str, folder: Path) -> dict[str, Any]:
    arms = schema.BUILTIN_ARMS if loss in schema.BUILTIN_ARMS else extensions.arms_here(folder)
    if loss not in arms:
        raise refuse("defaults", f"/schema/arm/{loss}@_here_", "no such loss is known", f"known are {', '.join(sorted(arms))}")
    return {f.name: f.default for f in dataclasses.fields(arms[loss]) if f.default != schema.MISSING}


def _plain(value: Any) -> Any:
    return _REFERENCE.sub(r"\1", value) if isinstance(value, str) and _REFERENCE.fullmatch(value) else value


def _about(text: str) -> str:
    head = []
    for row in text.splitlines():
        if not row.startswith("#"):
            break
        head.append(row.lstrip("#").strip())
    return "\n".join(head).strip()
