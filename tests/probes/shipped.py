"""The arms that come with the package, read from their YAML without Hydra."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

import pth_exp.conf
from pth_exp.schema import BUILTIN_ARMS, Arm

FOLDER = Path(str(pth_exp.conf.__file__)).parent / "arm"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))


def shipped(name: str, **fields: Any) -> Arm:
    """The arm of an option with ``fields`` changed; what it takes from the run's config is 56, the default response length."""
    values = {**_values(name), **fields}
    values = {key: 56.0 if isinstance(value, str) and value.startswith("${") else value for key, value in values.items()}
    return BUILTIN_ARMS[values["loss"]](**values)


def _values(name: str) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    bases = [base for base in values.pop("defaults") if base != "_self_" and not base.startswith("/schema/")]
    return {key: value for base in bases for key, value in _values(base).items()} | values
