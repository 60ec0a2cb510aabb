"""``pth resume``: run what a sweep has not completed, from its own frozen files. Nothing is composed again."""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pth_exp import freeze, lifecycle
from pth_exp.lifecycle import State
from pth_exp.records.reader import NothingToRead, find_sweep, read_index
from pth_exp.refusal import Refusal

Entry = Mapping[str, Any]

_UNSUCCESSFUL = (State.FAILED, State.LOST)


def main(arguments: Sequence[str]) -> int:
    """Exit codes: 0 everything asked for is completed, 1 some run is not, 2 usage."""
    parser = argparse.ArgumentParser(prog="pth resume", description="Run what a sweep has not completed, from its frozen files.")
    parser.add_argument("sweep", type=Path, nargs="?", help="a sweep's directory; the latest sweep by default")
    parser.add_argument("--failed", action="store_true", help="only runs that failed or were lost")
    parser.add_argument("--only", metavar="RUN", action="append", help="only this run: its number, or a pattern of its label")
    parser.add_argument("--slots", type=int, help="runs at a time; as many as cores or GPUs allow by default")
    parser.add_argument("--memory-per-run-gb", type=float, help="memory that one run needs, in GiB; measured by default")
    asked = parser.parse_args(arguments)
    from pth_exp.launchers.local import LocalPlace
    from pth_exp.launchers.place import Job, RunResult, conclude

    try:
        place = LocalPlace(asked.slots, asked.memory_per_run_gb)
        sweep = find_sweep(asked.sweep)
        entries = _chosen(read_index(sweep)["runs"], asked.only)
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
            frozen = freeze.load(run_dir / freeze.FILE, entry["frozen_sha256"])
        except freeze.FrozenError as error:
            refused.append(RunResult(entry["index"], entry["label"], State.FAILED, str(error), ""))
            continue
        jobs.append(dataclasses.replace(Job.of(frozen), index=entry["index"], label=entry["label"]))
    if not jobs and not refused:
        print(f"nothing to resume in {sweep}")
        return int(running)
    return conclude(refused + place.dispatch(jobs), sweep, sys.stderr) or int(running)


def _chosen(entries: Sequence[Entry], only: Sequence[str] | None) -> Sequence[Entry]:
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
