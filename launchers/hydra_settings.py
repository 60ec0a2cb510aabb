"""Hydra settings that runs cannot honour: the worker does not know Hydra, and a sweep is frozen and dispatched as one batch."""

from __future__ import annotations

from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from pth_exp.launchers.secrets import looks_secret
from pth_exp.refusal import Objection, Refusal


def check(hydra: DictConfig) -> None:
    """Raise :class:`Refusal` for settings of Hydra's node that would be ignored, or that would split a sweep."""
    objections = list(_objections(hydra))
    if objections:
        raise Refusal(objections)


def _objections(hydra: DictConfig) -> Iterator[Objection]:
    if hydra.get("callbacks"):
        names = ", ".join(map(str, hydra.callbacks))
        yield Objection(
            "hydra.callbacks", names, "a run is a worker without Hydra, callbacks would never be called", "remove them"
        )
    if hydra.job.chdir:
        yield Objection(
            "hydra.job.chdir", "true", "a worker does not change its directory", "use the run's directory by its path"
        )
    if OmegaConf.select(hydra, "sweeper.max_batch_size") is not None:
        yield Objection(
            "hydra.sweeper.max_batch_size", str(hydra.sweeper.max_batch_size),
            "runs would start before the rest of the sweep is composed and checked",
            "remove it; hydra.launcher.slots=N bounds how many runs go at a time",
        )  # fmt: skip
    if str(hydra.mode).rsplit(".", 1)[-1] != "MULTIRUN":
        yield Objection("hydra.mode", str(hydra.mode), "every run goes through the freezing launcher", "remove it")
    if hydra.sweep.subdir != "frozen":
        yield Objection("hydra.sweep.subdir", hydra.sweep.subdir, "a run's folder is named by its config_id", "remove it")
    for name in hydra.job.env_set:
        if looks_secret(name):
            yield Objection(
                "hydra.job.env_set", name, "a secret would be written into the frozen config",
                f"export {name} in the shell that starts the sweep",
            )  # fmt: skip
