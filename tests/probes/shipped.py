"""The arms that come with the package, as a run with the default response length would have them."""

from __future__ import annotations

import dataclasses
from typing import Any

from pth_exp.armfiles import CONF, arm_paths, read_arm
from pth_exp.schema import Arm

NAMES = list(arm_paths(CONF))


def shipped(name: str, **fields: Any) -> Arm:
    """The arm of an option with ``fields`` changed; what it takes from the run's config is 56, the default response length."""
    arm = read_arm(name, CONF).arm
    if isinstance(getattr(arm, "norm_tokens", None), str):
        fields = {"norm_tokens": 56.0, **fields}
    return dataclasses.replace(arm, **fields)
