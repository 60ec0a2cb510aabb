"""``pth diff``: what differs between runs, between whole sweeps' runs, or between any YAML files, and what was meant to."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Container, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from pth_exp.checks.config import described, design_config
from pth_exp.design import Comparison, Described, compare, flatten
from pth_exp.freeze import FILE
from pth_exp.naming import values
from pth_exp.records.reader import NothingToRead, RunRecords, Sweep, find_sweep, read_frozen, read_index
from pth_exp.report.diff_text import GROUPS, Found, markdown, text
from pth_exp.report.first_prompts import Prompts, prompts
from pth_exp.report.text import Painter
from pth_exp.schema import DesignConfig, nearest


@dataclass(slots=True)
class _Given:
    """What the arguments stand for."""

    runs: list[Described]
    design: DesignConfig
    records: dict[str, RunRecords] = field(default_factory=dict)
    whole_sweep: bool = False
    unreadable: list[str] = field(default_factory=list)


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
    parser.add_argument("--only-unexpected", action="store_true", help="show what no design declares, and nothing else")
    parser.add_argument("--fields", metavar="GLOB[,GLOB]", help="show these fields; they are all compared, and all count")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    form.add_argument("--markdown", action="store_true", help="print Markdown, for a pull request or an appendix")
    arguments = parser.parse_args(argv)
    try:
        given = _read(arguments.what)
        asked = _asked(arguments.fields, given.runs)
    except NothingToRead as error:
        print(f"pth diff: {error}", file=sys.stderr)
        return 2
    if arguments.vary is not None:
        given.design = replace(given.design, vary=arguments.vary.split(","))
    comparison = compare(given.runs, given.design)
    beside = prompts(given.records, "seeds.data" in given.design.fixed)
    findings = comparison.findings if given.whole_sweep else [f for f in comparison.findings if f.field in comparison.unexpected]
    unexpected = bool(comparison.unexpected) or any(p.expected is False for p in beside)
    shown = [group for group in GROUPS if group == "unexpected" or not arguments.only_unexpected]
    found = Found(
        kind="runs" if given.records else "files",
        runs=[run.label for run in given.runs],
        groups={g: {p: v for p, v in getattr(comparison, g).items() if asked is None or p in asked} for g in shown},
        findings=[f for f in findings if asked is None or f.field in asked],
        prompts=[p for p in beside if asked is None and not (arguments.only_unexpected and p.expected)],
        notes=[] if asked is None else list(_hidden(comparison, beside, asked)),
    )
    if arguments.json:
        document: dict[str, Any] = {"runs": found.runs, **found.groups, "findings": [asdict(f) for f in found.findings]}
        document |= {"prompts": [asdict(p) for p in found.prompts], "as_declared": not unexpected}
        print(json.dumps(document, indent=1, default=str))
    else:
        print("\n".join(markdown(found) if arguments.markdown else text(found, Painter(sys.stdout))))
    for message in given.unreadable:
        print(f"pth diff: not compared: {message}", file=sys.stderr)
    return 2 if given.unreadable else int(unexpected)


def _asked(globs: str | None, runs: Sequence[Described]) -> Container[str] | None:
    """The fields that are to be shown; None is all. Raises NothingToRead for a name that no field has."""
    if globs is None:
        return None
    fields = dict.fromkeys(path for run in runs for path in flatten(run.values))
    named: dict[str, None] = {}
    for glob in globs.split(","):
        matching = [path for path in fields if fnmatchcase(path, glob) or path.startswith(f"{glob}.")]
        if not matching:
            raise NothingToRead(f"--fields {glob}: no such field{nearest(glob, fields)}")
        named |= dict.fromkeys(matching)
    return named


def _hidden(comparison: Comparison, beside: Sequence[Prompts], asked: Container[str]) -> Iterator[str]:
    """That something unexpected is not among the fields that were asked for."""
    hidden = [path for path in comparison.unexpected if path not in asked]
    if any(one.expected is False for one in beside):
        hidden.append("prompt IDs of the first batches")
    if hidden:
        yield f"not shown, and unexpected as well: {values(hidden)}"


# ------------------------------------------------------------------------------------------------------------- reading


def _read(paths: Sequence[Path]) -> _Given:
    if len(paths) < 2 and not (paths and _run_dir(paths[0])):
        sweep = Sweep.load(paths[0] if paths else None, rows=False)
        return _Given(
            [described(run) for run in sweep.runs],
            design_config(sweep.index["design"]),
            {run.label: run for run in sweep.runs},
            whole_sweep=True,
            unreadable=[problem.message for problem in sweep.problems],
        )
    if len(paths) == 1:
        raise NothingToRead(f"{paths[0]} is one run; give another beside it, or its sweep: {find_sweep(paths[0].parent)}")
    runs, records = [], dict[str, RunRecords]()
    for path, name in zip(paths, _names(paths), strict=True):
        run_dir = _run_dir(path)
        if run_dir is not None:
            records[name] = RunRecords.load(run_dir, rows=False)
            runs.append(described(records[name], name))
        else:
            runs.append(Described(name, _plain(path)))
    return _Given(runs, _common_design([*records.values()]) if len(records) == len(runs) else DesignConfig(vary=[]), records)


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
