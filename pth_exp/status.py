"""``pth status`` and ``pth list``: where the runs of a sweep stand, and which sweeps there are. Reads the ends of files only."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pth_exp import lifecycle
from pth_exp.records.reader import NothingToRead, find_sweep, read_frozen, read_index
from pth_exp.report import standings
from pth_exp.report.text import table
from pth_exp.runfiles import server_time
from pth_exp.standing import ACTIVE, SweepStandings, counts, read_run


def main(arguments: Sequence[str]) -> int:
    """Exit code 0; 2 when there is nothing to read. At a terminal the table stays until every run has ended, or Ctrl-C."""
    parser = argparse.ArgumentParser(prog="pth status", description="Where the runs of a sweep stand.", epilog=main.__doc__)
    parser.add_argument("what", type=Path, nargs="?", help="a sweep, the latest by default; or one run, for its history")
    parser.add_argument("--once", action="store_true", help="print every run once, also at a terminal")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    asked = parser.parse_args(arguments)
    try:
        if asked.what is not None and (asked.what / "frozen.yaml").is_file():
            return _run(asked.what, asked.json)
        sweep = find_sweep(asked.what)
        return _sweep(sweep, SweepStandings(sweep), asked)
    except NothingToRead as error:
        print(f"pth status: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0


def _sweep(sweep: Path, runs: SweepStandings, asked: argparse.Namespace) -> int:
    now = runs.read()
    if asked.json:
        print(json.dumps({"sweep": str(sweep), "runs": [asdict(run) for run in now]}, indent=1))
    elif not asked.once and standings.is_terminal() and any(run.state in ACTIVE for run in now):
        standings.live(str(sweep), runs.read)
    else:
        print("\n".join(standings.whole(str(sweep), now)))
    return 0


def _run(run_dir: Path, as_json: bool) -> int:
    frozen = read_frozen(run_dir)
    run = read_run(run_dir, {**frozen["run"], "updates": frozen["config"].get("updates")})
    states = lifecycle.history(run_dir)
    attempts = [asdict(lifecycle.read_attempt(run_dir, n)) for n in range(1, lifecycle.newest_attempt(run_dir) + 1)]
    if as_json:
        print(json.dumps({"run": asdict(run), "states": states, "attempts": attempts}, indent=1))
    else:
        print("\n".join([*standings.whole(str(run_dir), [run]), "", *standings.history(states, attempts)]))
    return 0


def list_main(arguments: Sequence[str]) -> int:
    """Exit codes: 0, or 2 when the folder is not there or a sweep in it cannot be read; the others are shown all the same."""
    parser = argparse.ArgumentParser(prog="pth list", description="The sweeps below a folder, newest last.")
    parser.add_argument("folder", type=Path, nargs="?", default=Path("multirun_outputs"), help="multirun_outputs by default")
    parser.add_argument("--json", action="store_true", help="one JSON list")
    asked = parser.parse_args(arguments)
    if not asked.folder.is_dir() and asked.folder != parser.get_default("folder"):
        print(f"pth list: {asked.folder}: no such directory; give a folder of sweeps", file=sys.stderr)
        return 2
    indexes = sorted((p for p in asked.folder.glob("**/index.json") if not p.parent.is_symlink()), key=lambda p: p.parent.name)
    sweeps: list[dict[str, Any]] = []
    unreadable = []
    for folder in (path.parent for path in indexes):
        try:
            index, now = read_index(folder), server_time(folder)
        except NothingToRead as error:
            unreadable.append(str(error))
            continue
        states = [lifecycle.status(folder / entry["dir"], now).state for entry in index["runs"]]
        sweeps.append({"sweep": str(folder), "created": index["created"], "runs": len(states), "states": counts(states)})
    if asked.json:
        print(json.dumps(sweeps, indent=1))
    elif sweeps:
        rows = [["sweep", "created", "runs", "states"], *([str(value) for value in sweep.values()] for sweep in sweeps)]
        print("\n".join("  ".join(row).rstrip() for row in table(rows)))
    else:
        print(f"{asked.folder}: no sweeps; start one with pth run")
    for message in unreadable:
        print(f"pth list: {message}", file=sys.stderr)
    return 2 if unreadable else 0
