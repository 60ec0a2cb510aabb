"""Hydra's own launchers: each composes a run as it starts, so none can be used; what to write instead."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from pth_exp.launchers.places import PLACES, default_settings
from pth_exp.refusal import Refusal, refuse

INSTEAD = {
    "basic": "pth_local",
    "joblib": "pth_local",
    "submitit_local": "pth_local",
    "submitit_slurm": "pth_slurm",
    "ray": "pth_ray",
    "ray_aws": "pth_ray",
}
"""Launcher of Hydra or of its plug-ins to the place that does the same for frozen runs."""

_PASSED_ON = ("comment", "exclude", "gres", "cpus_per_gpu", "gpus_per_task", "mem_per_gpu", "mem_per_cpu")
"""Settings of submitit_slurm that are options of sbatch, and no fields of pth_slurm."""
_PREFIX = "hydra.launcher."


def refused(name: str, overrides: Sequence[str]) -> Refusal:
    """The refusal of a launcher that does not freeze, with the line that does the same; ``overrides``: the command's."""
    place = INSTEAD.get(name, "pth_local")
    why = "composes each run when it starts, so that its config would not be the one that was checked"
    line = shlex.join(["pth", "run", *_translated(overrides, place)])
    return refuse("hydra/launcher", name, why, f"{line}    (places: {', '.join(PLACES)})")


def _translated(overrides: Sequence[str], place: str) -> Iterator[str]:
    known = default_settings(place)
    yield f"hydra/launcher={place}"
    for override in overrides:
        key, _, value = override.partition("=")
        key = key.lstrip("+~")
        setting = key.removeprefix(_PREFIX)
        if key == "hydra/launcher":
            continue
        if not key.startswith(_PREFIX) or setting.partition(".")[0] in known:
            yield override
        elif place == "pth_slurm" and setting == "max_num_timeout":
            yield f"{_PREFIX}requeue={'false' if value == '0' else 'true'}"
        elif place == "pth_slurm" and setting in _PASSED_ON:
            yield f"+{_PREFIX}additional_parameters.{setting}={value}"
