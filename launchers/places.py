"""The places that runs can be sent to, by the name of their launcher."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pth_exp.conf
from pth_exp.launchers.place import Place
from pth_exp.refusal import refuse
from pth_exp.schema import nearest

PLACES = {
    "pth_freeze": "pth_exp.launchers.freeze_only:FreezeOnly",
    "pth_local": "pth_exp.launchers.local:LocalPlace",
    "pth_ray": "pth_exp.launchers.ray:RayPlace",
    "pth_slurm": "pth_exp.launchers.slurm:SlurmPlace",
}
"""Name of a launcher to its place, whose arguments are the settings in ``conf/hydra/launcher/<name>.yaml``."""


def open_place(name: str, settings: Mapping[str, Any]) -> Place:
    """Raises Refusal for an unknown place or setting, and for settings that cannot work."""
    if name not in PLACES:
        raise refuse("launcher", name, f"is no place{nearest(name, PLACES)}", f"choose one of {', '.join(PLACES)}")
    module, _, place = PLACES[name].partition(":")
    opened: Place = getattr(importlib.import_module(module), place)(**checked_settings(name, settings))
    return opened


def checked_settings(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """All settings of a place, the given ones over its YAML's. Raises Refusal for one that it does not have."""
    known = default_settings(name)
    for setting in settings:
        if setting not in known:
            why = f"is no setting of {name}{nearest(setting, known)}"
            raise refuse(f"launcher.{setting}", settings[setting] or "", why, f"its settings are {', '.join(known) or 'none'}")
    return {**known, **settings}


def default_settings(name: str) -> dict[str, Any]:
    """What the launcher's YAML says."""
    from omegaconf import OmegaConf

    path = Path(str(pth_exp.conf.__file__)).parent / "hydra" / "launcher" / f"{name}.yaml"
    settings = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(settings, dict)
    return {str(key): value for key, value in settings.items() if key != "_target_"}
