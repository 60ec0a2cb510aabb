"""``pth status`` and ``pth list``: where the runs of a sweep stand, and which sweeps there are. Reads the ends of files only."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pth_exp import lifecycle
from pth_exp.lifecycle import State
from pth_exp.records.reader import NothingToRead, find_sweep, read_index
from pth_exp.runfiles import server_time

_ROW_BYTES = 1 << 16
"""More than a row of updates takes."""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="pth status", description="Where the runs of a sweep stand.")
    parser.add_argument("sweep", type=Path, nargs="?", help="a sweep's directory; the latest sweep by default")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    asked = parser.parse_args(arguments)
    try:
        sweep = find_sweep(asked.sweep)
        runs = read_sweep(sweep)
    except NothingToRead as error:
        print(f"pth status: {error}", file=sys.stderr)
        return 2
    if asked.json:
        print(json.dumps({"sweep": str(sweep), "runs": runs}, indent=1))
        return 0
    _print_table(
        f"{sweep}  ({counts(State(run['state']) for run in runs)})",
        ["run", "state", "update", "reward", "KL", "since (UTC)", "detail"],
        [
            [
                f"[{run['index']}] {run['label']}",
                run["state"],
                f"{0 if run['update'] is None else run['update'] + 1}/{run['updates']}",
                _number(run["reward"], ".3f"),
                _number(run["kl"], ".2e"),
                (run["since"] or "-")[:19].replace("T", " "),
                run["detail"],
            ]
            for run in runs
        ],
    )
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
    sweeps, unreadable = [], []
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
        _print_table("", ["sweep", "created", "runs", "states"], [[str(value) for value in sweep.values()] for sweep in sweeps])
    else:
        print(f"{asked.folder}: no sweeps; start one with pth run")
    for message in unreadable:
        print(f"pth list: {message}", file=sys.stderr)
    return 2 if unreadable else 0


def read_sweep(sweep: Path) -> list[dict[str, Any]]:
    """Every run's state and newest update, in the index's order. Raises NothingToRead for a sweep without a readable index."""
    now = server_time(sweep)
    runs = []
    for entry in read_index(sweep)["runs"]:
        status = lifecycle.status(sweep / entry["dir"], now)
        row = last_update(sweep / entry["dir"]) or {}
        runs.append(
            {
                "index": entry["index"],
                "label": entry["label"],
                "dir": entry["dir"],
                "state": status.state,
                "since": status.since,
                "detail": status.detail,
                "heartbeat_age": status.heartbeat_age,
                "attempt": asdict(status.attempt) if status.attempt else None,
                "update": row.get("update"),
                "updates": entry["updates"],
                "reward": row.get("reward/trained"),
                "kl": row.get("rollout_corr/kl"),
            }
        )
    return runs


def last_update(run_dir: Path) -> dict[str, Any] | None:
    """The last whole row of the newest segment of ``updates`` that has one."""
    for path in sorted(run_dir.glob("updates.[0-9]*.jsonl"), reverse=True):
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _ROW_BYTES))
            lines = file.read().split(b"\n")
        if len(lines) > 1:
            row: dict[str, Any] = json.loads(lines[-2])
            return row
    return None


def counts(states: Any) -> str:
    tally = Counter(states)
    return ", ".join(f"{tally[state]} {state.lower()}" for state in State if tally[state]) or "no runs"


def _print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(
            name, overflow="fold" if name in ("detail", "sweep") else "ellipsis", no_wrap=name not in ("detail", "sweep")
        )
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console(width=None if sys.stdout.isatty() else 200)
    if title:
        console.print(title, markup=False, highlight=False)
    console.print(table)


def _number(value: Any, form: str) -> str:
    return "-" if value is None else format(float(value), form)
