"""What the schema says of a field: its role, unit and meaning.

A role says what a field does to a comparison:

* ``science``    decides the numbers that a run produces; the science fields together are the run's identity (``config_id``)
* ``derived``    computed from science fields, kept because people look for it
* ``execution``  where and how fast a run executes; must not change its numbers beyond floating-point rounding
* ``output``     names and places
"""

from __future__ import annotations

from dataclasses import field
from enum import StrEnum
from typing import Any

MISSING: Any = "???"
"""OmegaConf's marker of a mandatory value, spelled out so that reading a schema does not import OmegaConf."""


class Role(StrEnum):
    science = "science"
    derived = "derived"
    execution = "execution"
    output = "output"


def spec(default: Any, role: Role, meaning: str, unit: str = "", follows: str = "") -> Any:
    """A dataclass field with its documentation; ``follows`` names the field whose change it takes part in."""
    metadata = {"role": role, "meaning": meaning, "unit": unit, "follows": follows}
    if isinstance(default, (list, dict)):
        frozen = default.copy()
        return field(default_factory=lambda: frozen.copy(), metadata=metadata)
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)
