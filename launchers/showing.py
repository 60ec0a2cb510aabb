"""Shows what a sweep would run: every run's config, the field x run table, the gate's verdict. Nothing is written or started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from rich.console import Console
from rich.table import Table

from pth_exp import sections
from pth_exp.design import ABSENT, brief, flatten
from pth_exp.launchers import memory, rendering, trackers
from pth_exp.launchers.freezing import Plan, Planned
from pth_exp.launchers.gate import Verdict
from pth_exp.launchers.shapes import NoShape, shape_of
from pth_exp.naming import shown
from pth_exp.schema import Config

WIDEST = 8
"""Runs that fit into a table side by side."""


def launch(plan: Plan, job_overrides: Sequence[Sequence[str]], resolve: bool, table: bool) -> list[JobReturn]:
    """Print one batch; ``resolve`` shows configs as they would be frozen. Raises :class:`Refusal` as a real launch would."""
    done = len(plan.planned)
    plan.add(job_overrides, with_inputs=False)
    labels = plan.labels()
    for index, planned in list(enumerate(plan.planned))[done:]:
        print(f"# run {index}: {labels[index]}   ({' '.join(planned.composed.overrides)})")
        print(sections.dump(planned.composed.values if resolve else planned.composed.raw).decode())
    if table:
        verdict = plan.hold(labels)
        _print_table(labels, [flatten(p.composed.values) for p in plan.planned], verdict)
        verdict.enforce()
        trackers.check(plan.planned)
        _print_verl(plan.planned)
        _print_memory([p.composed.config for p in plan.planned])
    return [JobReturn(overrides=p.composed.overrides, status=JobStatus.COMPLETED) for p in plan.planned[done:]]


def _print_table(labels: Sequence[str], flats: Sequence[Mapping[str, Any]], verdict: Verdict) -> None:
    comparison = verdict.comparison
    kinds = {
        "varied": comparison.varied,
        "per arm": comparison.per_arm,
        "unexpected": comparison.unexpected,
        "execution": comparison.execution,
    }
    print(f"{len(labels)} runs; the fields that differ:")
    if len(labels) > WIDEST:
        _print_values(kinds, labels)
    else:
        table = Table("field", "", *labels)
        for kind, fields in kinds.items():
            for path in fields:
                table.add_row(path, kind, *(shown(flat.get(path, ABSENT)) for flat in flats))
        console = Console()
        (console if console.is_terminal else Console(width=60 + 30 * len(labels))).print(table)
    print(f"design gate: {verdict.verdict}")
    for finding in brief(comparison.findings):
        print(f"  {finding.kind}: {finding.message}\n    remedy: {finding.remedy}")


def _print_verl(runs: Sequence[Planned]) -> None:
    """Whether verl takes its settings, where its environment is; raises :class:`Refusal` as a real launch would."""
    if not any(run.composed.config.stack.name == "verl" for run in runs):
        return
    try:
        rendered = rendering.files(runs, models=False)
    except rendering.NoVerl as missing:
        print(f"verl's settings: not checked: {missing}")
        return
    texts = {content for files in rendered for content in files.values()}
    print(f"verl's settings: verl takes them; {len(texts)} different files for {sum(map(bool, rendered))} runs")


def _print_memory(configs: Sequence[Config]) -> None:
    """Once for runs that need the same."""
    said: dict[str, list[int]] = {}
    for index, config in enumerate(configs):
        try:
            text = memory.told(memory.estimate(config, shape_of(config.model)))
        except NoShape as error:
            text = f"not estimated: {error}"
        said.setdefault(text, []).append(index)
    print("memory, an estimate (how: launchers/memory.py):")
    for text, indices in said.items():
        print(f"  {len(indices)} of {len(configs)} runs" if len(said) == 1 else f"  runs {', '.join(map(str, indices))}")
        print("\n".join(f"    {line}" for line in text.splitlines()))


def _print_values(kinds: Mapping[str, Mapping[str, Mapping[str, Any]]], labels: Sequence[str]) -> None:
    """For a table too wide to read: each field's values, and the numbers of the runs that have them."""
    numbers = {label: index for index, label in enumerate(labels)}
    for kind, fields in kinds.items():
        for path, values in fields.items():
            print(f"  {path} ({kind})")
            runs: dict[str, list[int]] = {}
            for label, value in values.items():
                runs.setdefault(shown(value), []).append(numbers.get(label, -1))
            for value, members in runs.items():
                print(f"      {value:<24} runs {', '.join(map(str, members))}")
