"""The freezing launcher: composes, resolves and checks every run of a sweep, freezes them all, and only then dispatches."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import HydraContext
from omegaconf import DictConfig

from pth_exp import design, extensions, freeze
from pth_exp.launchers import gate, hydra_settings, rendering, trackers
from pth_exp.launchers.composing import Composed, Composer
from pth_exp.launchers.place import Job, Place, RunResult, conclude
from pth_exp.launchers.secrets import guard_environment
from pth_exp.launchers.sweep_dir import SweepDir
from pth_exp.lifecycle import State
from pth_exp.refusal import Refusal, objection, refuse
from pth_exp.schema import DesignConfig


class RunsFailed(Exception):
    """Some runs of a sweep did not complete; what happened to each has been printed."""


@dataclass(frozen=True)
class Planned:
    """A run between composition and dispatch. ``inputs`` are its inputs' hashes; empty in a dry run, which reads none."""

    composed: Composed
    inputs: dict[str, Any]
    config_id: str | None

    def described(self, label: str) -> design.Described:
        values = {**self.composed.values, **({"inputs": self.inputs} if self.inputs else {})}
        return design.Described(label, values, self.composed.given, self.composed.choices, self.config_id)


class Plan:
    """Every run that one launch has seen so far: a sweeper may hand them over in several batches."""

    def __init__(self, context: HydraContext, master: DictConfig) -> None:
        guard_environment()
        arms = extensions.arms_here(Path.cwd())
        self.master = master
        self.swept: tuple[str, ...] | None = None
        self.planned: list[Planned] = []
        assert isinstance(context.config_loader, ConfigLoaderImpl)
        self._composer = Composer(context.config_loader, master, arms)
        self._inputs: dict[str, dict[str, Any]] = {}
        self.listing: freeze.Listing = {}

    def add(self, job_overrides: Sequence[Sequence[str]], with_inputs: bool) -> None:
        """Compose one batch. Raises :class:`Refusal`."""
        hydra_settings.check(self.master.hydra)
        for overrides in job_overrides:
            composed = self._composer.compose(overrides)
            inputs = self._hashes(composed) if with_inputs else {}
            self.planned.append(Planned(composed, inputs, freeze.config_id(composed.config, inputs) if inputs else None))

    def _hashes(self, composed: Composed) -> dict[str, Any]:
        """Hashed once for each task and model of a sweep."""
        key = freeze.canonical([composed.values["task"], composed.values["model"]]).decode()
        if key not in self._inputs:
            try:
                self._inputs[key], listing = freeze.input_hashes(composed.config)
            except (OSError, ValueError) as error:
                raise Refusal([objection(str(error))]) from error
            for name, files in listing.items():
                self.listing.setdefault(name, {}).update(files)
        return self._inputs[key]

    def design(self) -> DesignConfig:
        """The sweep's one design. Raises :class:`Refusal` when runs disagree about it."""
        first = self.planned[0].composed.config
        for planned in self.planned:
            for field in ("design", "name"):
                value = getattr(planned.composed.config, field)
                if value != getattr(first, field):
                    raise refuse(field, value, "differs between runs of one sweep", "give it once, for the whole sweep")
        return first.design

    def _swept(self) -> list[str]:
        """The keys that the sweeper says it sweeps; of a sweeper that says nothing, those that take more than one value."""
        if self.swept is not None:
            return list(self.swept)
        values: dict[str, set[str]] = {}
        for planned in self.planned:
            for path, value in {**planned.composed.choices, **planned.composed.given}.items():
                values.setdefault(path, set()).add(repr(value))
        return [path for path, different in values.items() if len(different) > 1]

    def labels(self) -> list[str]:
        declared = self.design()
        vary = self._swept() if declared.vary is None else declared.vary
        flats = [design.flatten(p.composed.values) for p in self.planned]
        return design.labels([p.composed.config.arm.name for p in self.planned], flats, declared, vary)

    def hold(self, labels: Sequence[str]) -> gate.Verdict:
        """The gate's verdict over all runs."""
        described = [p.described(label) for p, label in zip(self.planned, labels, strict=True)]
        return gate.hold(described, self.design(), self._swept())


class FreezingLauncher:
    """Freezes each batch that a sweeper hands over, held against all earlier ones, and sends it to ``place``.

    ``launcher``, its name and settings, is kept for `pth resume`.
    """

    def __init__(
        self, place: Place, context: HydraContext, master: DictConfig, launcher: Mapping[str, Any] | None = None
    ) -> None:
        self.plan = Plan(context, master)
        self._place = place
        self._launcher = dict(launcher or {})
        self._sweep_dir: SweepDir | None = None

    def launch(self, job_overrides: Sequence[Sequence[str]]) -> list[JobReturn]:
        """Freeze and run one batch. Raises :class:`Refusal` before anything starts."""
        done = len(self.plan.planned)
        self.plan.add(job_overrides, with_inputs=True)
        labels = self.plan.labels()
        verdict = self.plan.hold(labels)
        verdict.enforce()
        trackers.check(self.plan.planned[done:])
        files = rendering.files(self.plan.planned[done:])
        if self._sweep_dir is None:
            name = self.plan.planned[0].composed.config.name
            self._sweep_dir = SweepDir.create(Path(self.plan.master.hydra.sweep.dir), name, self._launcher)
        freeze.write_listing(self._sweep_dir.path, self.plan.listing)
        for finding in design.brief(verdict.comparison.findings):
            print(f"labelled: {finding.kind}: {finding.message}", file=sys.stderr)
        batch = [
            self._sweep_dir.freeze(planned, labels[index], index, files[index - done])
            for index, planned in list(enumerate(self.plan.planned))[done:]
        ]
        self._sweep_dir.write_index(verdict)
        results = self._place.dispatch([Job.of(run) for run in batch])
        conclude(results, self._sweep_dir.path, sys.stderr)
        return [self._returned(result) for result in results]

    def _returned(self, result: RunResult) -> JobReturn:
        """To a sweeper a run that nobody waits for here has not failed."""
        composed = self.plan.planned[result.index].composed
        completed = result.left or result.state is State.COMPLETED
        returned = JobReturn(overrides=composed.overrides, status=JobStatus.COMPLETED if completed else JobStatus.FAILED)
        returned.return_value = None if completed else RunsFailed(f"{result.label}: {result.state}: {result.message}")
        return returned
