"""A run in Weights & Biases: its numbers, its frozen config, and where it belongs; nothing else of the machine.

The whole run is logged anew by each attempt, under one id and without wandb's own resuming: wandb then writes each step over
the one that is there. With ``resume="allow"`` a second offline folder would be appended on `wandb sync`, its repeated steps
under new numbers (seen with wandb 0.31).
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from pth_exp.freeze import FrozenRun
from pth_exp.schema import TrackingConfig, TrackingMode

INIT_TIMEOUT = 30.0
"""Seconds that a server has to answer in."""

_DECIDED = (
    "RUN_ID",
    "RUN_GROUP",
    "NAME",
    "TAGS",
    "NOTES",
    "JOB_TYPE",
    "PROJECT",
    "RESUME",
    "MODE",
    "DIR",
    "DISABLED",
    "SWEEP_ID",
)
"""wandb's variables that would decide what the frozen config decides."""

_SWEEP = re.compile(r"\d{8}T\d{6}-[0-9a-f]{4}")


class Wandb:
    """One attempt's connection.

    Args:
        frozen: the run.
        asks: called before a server is asked.
        mode: offline writes files below the run's directory, which `wandb sync` sends; online sends while the run is going on.

    Raises whatever wandb raises, when its server does not answer within `INIT_TIMEOUT` seconds or does not know the key.
    """

    def __init__(self, frozen: FrozenRun, mode: TrackingMode, asks: Callable[[], None] = lambda: None) -> None:
        for name in _DECIDED:
            os.environ.pop(f"WANDB_{name}", None)
        os.environ |= {"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}  # offline too, it would look up its own server
        run_dir = frozen.path.parent.absolute()
        self._folder, self._id = run_dir / "wandb", run_id(frozen)
        os.environ.setdefault("WANDB_CACHE_DIR", str(self._folder / "cache"))  # where its service logs, whatever it caches
        tracking = settings_of(frozen)
        if mode is TrackingMode.online:
            os.environ["WANDB_API_KEY"] = os.environ[tracking.key_variable]
        import wandb

        settings = wandb.Settings(
            console="off",
            silent=True,
            disable_code=True,
            disable_git=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
            init_timeout=INIT_TIMEOUT,
        )
        if mode is TrackingMode.online:
            asks()
        self._run = wandb.init(
            id=self._id,
            project=tracking.project,
            entity=tracking.entity,
            group=str(frozen.run["sweep"])[:128],
            name=str(frozen.run["label"])[:128],
            tags=tags(frozen),
            config={**frozen.config_values, "config_id": frozen.config_id, "frozen_sha256": frozen.sha256},
            dir=str(run_dir),
            mode=mode.value,
            settings=settings,
        )

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def finish(self) -> None:
        """Send or write what is left; the folders of earlier attempts, which this one's repeats, then go."""
        mine = Path(self._run.dir).parent.resolve()
        self._run.finish()
        for folder in self._folder.glob(f"*run-*-{self._id}"):
            if folder.resolve() != mine and not folder.is_symlink():
                shutil.rmtree(folder, ignore_errors=True)


def settings_of(frozen: FrozenRun) -> TrackingConfig:
    """Read from the plain values: the typed config would load a study's losses, and with them torch."""
    values = frozen.config_values.get("tracking")
    if values is None:  # frozen by an earlier version
        return TrackingConfig(project=str(frozen.config_values["name"]))
    return TrackingConfig(**{**values, "mode": TrackingMode(values["mode"])})


def run_id(frozen: FrozenRun) -> str:
    """The sweep's id and the run's number: one id for all attempts, and no other run's."""
    sweep = str(frozen.run["sweep"])
    if not _SWEEP.fullmatch(sweep):  # a directory that the user named, as may have been done before
        launch = frozen.path.parents[1] / "launch.json"
        unique = launch.read_bytes() if launch.is_file() else frozen.sha256.encode()
        sweep = f"{re.sub('[^A-Za-z0-9_-]', '-', sweep)[:40]}-{hashlib.sha256(unique).hexdigest()[:8]}"
    return f"{sweep}-{frozen.run['index']:03d}"


def tags(frozen: FrozenRun) -> list[str]:
    """Arm, stack and seed; wandb takes 64 characters."""
    config = frozen.config_values
    return [config["arm"]["name"][:64], config["stack"]["name"], f"seed={config['seed']}"]
