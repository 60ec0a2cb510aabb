"""``pth diff``: what differs between runs, between whole sweeps' runs, or between any YAML files, and what was meant to."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from pth_exp.checks.config import described, design_config, parting
from pth_exp.design import Comparison, Described, compare
from pth_exp.freeze import FILE
from pth_exp.records.reader import NothingToRead, RunRecords, Sweep, find_sweep, read_frozen, read_index
from pth_exp.report.text import Painter, paragraph, table
from pth_exp.schema import DesignConfig

GROUPS = {
    "varied": "varied: declared by the design",
    "per_arm": "per arm: belongs to the arm, or declared for it",
    "execution": "execution: must not change results",
    "unexpected": "unexpected: no design declares it",
}
MOST_COLUMNS = 4


@dataclass(frozen=True, slots=True)
class Prompts:
    """The first batches of a run beside those of the first run given.

    ``batch`` and ``position`` say where they part, None where one continues the other; ``expected`` says whether the data
    seeds say the same; None for runs that draw from other prompts or in batches of another size.
    """

    run: str
    compared: int
    batch: int | None
    position: int | None
    expected: bool | None


@dataclass(slots=True)
class _Given:
    """What the arguments stand for."""

    runs: list[Described]
    design: DesignConfig
    records: list[RunRecords] = field(default_factory=list)
    whole_sweep: bool = False


def main(argv: Sequence[str]) -> int:
    """Exit code 0 when every difference is declared, 1 when one is not, 2 for what cannot be read."""
    parser = argparse.ArgumentParser(prog="pth diff", description=__doc__, epilog=main.__doc__)
    parser.add_argument(
        "what",
        nargs="*",
        type=Path,
        metavar="RUN_OR_FILE",
        help="runs, frozen.yaml or other YAML files; or one sweep (default: the latest)",
    )
    parser.add_argument(
        "--vary", metavar="FIELD[,FIELD]", help="fields that may differ; default: what the design of the runs declares"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    arguments = parser.parse_args(argv)
    try:
        given = _read(arguments.what)
    except NothingToRead as error:
        print(f"pth diff: {error}", file=sys.stderr)
        return 2
    if arguments.vary is not None:
        given.design = replace(given.design, vary=arguments.vary.split(","))
    comparison = compare(given.runs, given.design)
    prompts = _prompts(given)
    findings = comparison.findings if given.whole_sweep else [f for f in comparison.findings if f.field in comparison.unexpected]
    unexpected = bool(comparison.unexpected) or any(p.expected is False for p in prompts)
    if arguments.json:
        groups = {group: getattr(comparison, group) for group in GROUPS}
        document = {"runs": [run.label for run in given.runs], **groups, "findings": [asdict(f) for f in findings]}
        print(
            json.dumps(document | {"prompts": [asdict(p) for p in prompts], "as_declared": not unexpected}, indent=1, default=str)
        )
    else:
        paint = Painter(sys.stdout)
        print("\n".join(_text(given, comparison, prompts, paint)))
        for finding in findings if given.records else []:
            print("\n".join([*paragraph(f"{finding.kind}: {finding.message}", 2, paint.width), f"    remedy: {finding.remedy}"]))
    return 1 if unexpected else 0


# ------------------------------------------------------------------------------------------------------------- reading


def _read(paths: Sequence[Path]) -> _Given:
    if len(paths) < 2 and not (paths and _run_dir(paths[0])):
        sweep = Sweep.load(paths[0] if paths else None)
        return _Given([described(run) for run in sweep.runs], design_config(sweep.index["design"]), sweep.runs, whole_sweep=True)
    if len(paths) == 1:
        raise NothingToRead(f"{paths[0]} is one run; give another beside it, or its sweep: {find_sweep(paths[0].parent)}")
    runs, records = [], []
    for path, name in zip(paths, _names(paths), strict=True):
        run_dir = _run_dir(path)
        if run_dir is not None:
            record = RunRecords.load(run_dir)
            records.append(record)
            runs.append(described(record, name))
        else:
            runs.append(Described(name, _plain(path)))
    return _Given(runs, _common_design(records) if len(records) == len(runs) else DesignConfig(vary=[]), records)


def _run_dir(path: Path) -> Path | None:
    """The run that a path means: its directory, or the frozen file in it."""
    if (path / FILE).is_file():
        return path
    return path.parent if path.name == FILE and path.is_file() else None


def _names(paths: Sequence[Path]) -> list[str]:
    """As short as tells them apart: the label of a run, else the path."""
    labels = [str(read_frozen(run)["run"]["label"]) if (run := _run_dir(path)) else path.name for path in paths]
    if len(set(labels)) == len(labels):
        return labels
    names = [str(path) for path in paths]
    return names if len(set(names)) == len(names) else [f"{name} ({i})" for i, name in enumerate(names, 1)]


def _common_design(records: Sequence[RunRecords]) -> DesignConfig:
    """The design of the sweep that the runs come from; what each config declares where they come from several."""
    sweeps = {run.path.resolve().parent for run in records}
    if len(sweeps) == 1 and ((sweep := sweeps.pop()) / "index.json").is_file():
        declared = read_index(sweep)["design"]
    else:
        declared = records[0].config["design"]
        declared = declared | {"vary": declared["vary"] or []}
    return design_config(declared)


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Reads 2e-4 as a number, as YAML 1.2 and OmegaConf do and PyYAML does not."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def _plain(path: Path) -> dict[str, Any]:
    try:
        content = yaml.load(path.read_bytes(), _Loader)
    except OSError as error:
        raise NothingToRead(f"{path}: {error.strerror}; give runs, or YAML files") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise NothingToRead(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise NothingToRead(f"{path} holds no mapping but a {type(content).__name__}; give files that map names to values")
    return {str(key): _jsonable(value) for key, value in content.items()}


def _jsonable(value: Any) -> Any:
    """Dates and other YAML-only values as text, so that any two files can be compared."""
    if isinstance(value, dict):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_jsonable(item) for item in value]
    finite = value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and value - value == 0)
    return value if finite else str(value)


# ------------------------------------------------------------------------------------------------------------- prompts


def _prompts(given: _Given) -> list[Prompts]:
    """Every further run against the first that wrote its first batches."""
    drawn = [run for run in given.records if run.first_batches]
    shared_order = "seeds.data" in given.design.fixed
    return [_beside(drawn[0], run, shared_order) for run in drawn[1:]] if drawn else []


def _beside(first: RunRecords, run: RunRecords, shared_order: bool) -> Prompts:
    a, b = first.first_batches or [], run.first_batches or []
    batch, position = parting(a, b) or (None, None)
    compared = sum(map(len, a[: min(len(a), len(b))]))
    inputs = [(r.frozen["inputs"]["data"], r.frozen["inputs"]["tokenizer"], r.config["prompts_per_update"]) for r in (first, run)]
    if inputs[0] != inputs[1]:
        return Prompts(run.label, compared, batch, position, None)
    same_label = shared_order or first.config["seed"] == run.config["seed"]
    same_seed = first.config["seeds"]["data"] == run.config["seeds"]["data"]
    return Prompts(run.label, compared, batch, position, same_seed and same_label if batch is None else not same_seed)


# ---------------------------------------------------------------------------------------------------------------- text


def _text(given: _Given, comparison: Comparison, prompts: Sequence[Prompts], paint: Painter) -> Iterator[str]:
    labels = [run.label for run in given.runs]
    yield paint("bold", f"{len(labels)} runs" if given.records else f"{len(labels)} files")
    nothing = True
    for group, title in GROUPS.items():
        fields: Mapping[str, Mapping[str, Any]] = getattr(comparison, group)
        if fields:
            nothing = False
            yield ""
            yield paint("fail" if group == "unexpected" else "bold", title)
            yield from _columns(fields, labels) if len(labels) <= MOST_COLUMNS else _lists(fields, paint)
    if nothing:
        yield "nothing differs that decides a result"
    if prompts:
        first = next(run.label for run in given.records if run.first_batches)
        yield ""
        yield paint("bold", f"prompt IDs of the first batches, beside {first}")
        rows = [[prompt.run, _place(prompt), _judgement(prompt)] for prompt in prompts]
        for row, prompt in zip(table(rows, indent=2), prompts, strict=True):
            yield ("  ".join(row) if prompt.expected is not False else paint("fail", "  ".join(row))).rstrip()
    yield ""


def _columns(fields: Mapping[str, Mapping[str, Any]], labels: Sequence[str]) -> Iterator[str]:
    rows = [["", *labels], *([path, *(str(values[label]) for label in labels)] for path, values in fields.items())]
    for row in table(rows, indent=2):
        yield "  ".join(row).rstrip()


def _lists(fields: Mapping[str, Mapping[str, Any]], paint: Painter) -> Iterator[str]:
    """Each value with the runs that have it."""
    for path, values in fields.items():
        yield f"  {path}"
        having: dict[str, list[str]] = {}
        for label, value in values.items():
            having.setdefault(str(value), []).append(label)
        for value, runs in having.items():
            yield from paragraph(f"{value}: {', '.join(runs)}", 4, paint.width)


def _place(prompt: Prompts) -> str:
    if prompt.batch is None:
        return f"all {prompt.compared} the same"
    return f"part at update {prompt.batch}, position {prompt.position}"


def _judgement(prompt: Prompts) -> str:
    if prompt.expected is None:
        return "(other prompts, or batches of another size)"
    if prompt.expected:
        return "(as the seeds say)"
    return "although the seeds differ" if prompt.batch is None else "although seeds.data is the same"
