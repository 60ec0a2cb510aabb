"""``pth resume``: run what a sweep has not completed, from its own frozen files. Nothing is composed again."""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pth_exp import accepting, lifecycle
from pth_exp.freeze import FrozenError, FrozenRun
from pth_exp.lifecycle import State
from pth_exp.records.reader import NothingToRead, find_sweep, read_index
from pth_exp.refusal import Refusal, refuse

if TYPE_CHECKING:
    from pth_exp.launchers.place import Place

Entry = Mapping[str, Any]

_UNSUCCESSFUL = (State.FAILED, State.LOST)


def main(arguments: Sequence[str]) -> int:
    """Exit codes: 0 everything asked for is completed, 1 some run is not, 2 usage."""
    parser = argparse.ArgumentParser(prog="pth resume", description="Run what a sweep has not completed, from its frozen files.")
    parser.add_argument(
        "words", nargs="*", metavar="[SWEEP] [launcher.SETTING=VALUE ...]",
        help="a sweep's directory, the latest sweep by default; settings other than those that it was launched with",
    )  # fmt: skip
    parser.add_argument("--launcher", metavar="NAME", help="pth_local, pth_slurm or pth_ray; where it was launched by default")
    parser.add_argument("--failed", action="store_true", help="only runs that failed or were lost")
    parser.add_argument("--only", metavar="RUN", action="append", help="only this run: its number, or a pattern of its label")
    parser.add_argument(
        "--accept-changes", metavar="WHY",
        help="go on over code, data or weights that changed since the sweep was frozen; what, who, when and WHY go on record",
    )  # fmt: skip
    parser.add_argument("--slots", type=int, help="runs at a time; as many as cores or GPUs allow by default")
    parser.add_argument("--memory-per-run-gb", type=float, help="memory that one run needs, in GiB; measured by default")
    asked = parser.parse_intermixed_args(arguments)
    from pth_exp.launchers.place import Job, RunResult, conclude
    from pth_exp.launchers.slurm import SlurmPlace, not_waiting

    try:
        if asked.accept_changes is not None and not asked.accept_changes.strip():
            raise refuse("--accept-changes", "", "needs a reason, which goes on record", "say why the runs may go on")
        sweep = find_sweep(named_sweep(asked.words))
        place = _place(sweep, asked)
        index = read_index(sweep)
        entries = chosen(index["runs"], asked.only)
    except (NothingToRead, Refusal) as error:
        print(f"pth resume: {error}", file=sys.stderr)
        return 2
    jobs, refused, running = list[Job](), list[RunResult](), False
    for entry in entries:
        run_dir = sweep / entry["dir"]
        status = lifecycle.status(run_dir)
        if status.state is State.COMPLETED or (asked.failed and status.state not in _UNSUCCESSFUL):
            continue
        if status.state is State.RUNNING:
            print(f"[{entry['index']}] {entry['label']} is running: {status.detail}; left alone", file=sys.stderr)
            running = True
            continue
        try:
            frozen = _frozen(run_dir, index, entry, asked.accept_changes)
        except (FrozenError, Refusal, ValueError) as error:
            refused.append(RunResult(entry["index"], entry["label"], State.FAILED, str(error), ""))
            continue
        jobs.append(dataclasses.replace(Job.of(frozen), index=entry["index"], label=entry["label"]))
    if not isinstance(place, SlurmPlace):  # which follows such jobs
        found, jobs = len(jobs), not_waiting(jobs, sys.stderr)
        running |= len(jobs) < found
    if not jobs and not refused:
        print(f"nothing to resume in {sweep}")
        return int(running)
    try:
        results = place.dispatch(jobs)
    except Refusal as error:
        print(f"pth resume: {error}", file=sys.stderr)
        return 2
    return conclude(refused + results, sweep, sys.stderr) or int(running)


def _frozen(run_dir: Path, index: Entry, entry: Entry, reason: str | None) -> FrozenRun:
    """The run's frozen file; with a reason, what changed since is accepted. Raises FrozenError or ValueError."""
    if reason is None:
        return accepting.load(run_dir, index, entry)
    frozen, told = accepting.accept(run_dir, index, entry, reason)
    if told is not None:
        print(f"[{entry['index']}] {entry['label']} goes on over changes, on record: {told}", file=sys.stderr)
    return frozen


def named_sweep(words: Sequence[str]) -> Path | None:
    """The sweep among the words of the command line. Raises Refusal for a second one."""
    sweeps = [word for word in words if not word.startswith("launcher.")]
    if len(sweeps) > 1:
        raise refuse("sweep", " ".join(sweeps), "is more than one", "resume one sweep at a time; settings begin with launcher.")
    return Path(sweeps[0]) if sweeps else None


def named_settings(words: Sequence[str]) -> dict[str, Any]:
    """The settings ``launcher.NAME=VALUE`` among the words, their values as YAML reads them. Raises Refusal for one without."""
    import yaml

    settings = {}
    for word in words:
        key, given, value = word.partition("=")
        if key.startswith("launcher."):
            if not given:
                raise refuse(key, "", "has no value", f"write {key}=VALUE")
            settings[key.removeprefix("launcher.")] = yaml.safe_load(value)
    return settings


def _place(sweep: Path, asked: argparse.Namespace) -> Place:
    """The place that the sweep was launched on, or the one asked for. Raises Refusal when it cannot be opened."""
    from pth_exp.launchers.places import open_place
    from pth_exp.launchers.sweep_dir import launched_on

    name, settings = launched_on(sweep)
    if asked.launcher not in (None, name):
        name, settings = asked.launcher, {}
    if name == "pth_freeze":  # a sweep that was only frozen is started here
        name = "pth_local"
    flags = {"slots": asked.slots, "memory_per_run_gb": asked.memory_per_run_gb}
    given = named_settings(asked.words) | {key: value for key, value in flags.items() if value is not None}
    return open_place(name, {**settings, **given})


def chosen(entries: Sequence[Entry], only: Sequence[str] | None) -> Sequence[Entry]:
    """The runs named; raises NothingToRead for a name that no run has."""
    if only is None:
        return entries
    for name in only:
        if not any(_is_named(entry, name) for entry in entries):
            labels = "\n".join(f"  {entry['index']:>3}  {entry['label']}" for entry in entries)
            raise NothingToRead(f"--only {name}: no run of this sweep has that number or label; its runs are\n{labels}")
    return [entry for entry in entries if any(_is_named(entry, name) for name in only)]


def _is_named(entry: Entry, name: str) -> bool:
    return name in (str(entry["index"]), entry["dir"], entry["label"]) or fnmatch.fnmatchcase(entry["label"], name)
