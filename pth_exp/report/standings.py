"""Tables of where runs stand: printed whole, or live on a terminal with the runs that matter first."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from pth_exp.lifecycle import State
from pth_exp.report.text import duration, table
from pth_exp.standing import ACTIVE, MISSING, Standing, counts

if TYPE_CHECKING:
    from rich.console import RenderableType

MATTERS: tuple[str, ...] = (
    State.RUNNING, State.FAILED, State.LOST, MISSING, State.PREEMPTED, State.QUEUED, State.FROZEN, State.COMPLETED,
)  # fmt: skip
"""Whose rows stay when a terminal has no room for all."""

_ASTRAY = (State.FAILED, State.LOST, State.PREEMPTED, MISSING)
_COLOURS = {State.RUNNING: "cyan", State.FAILED: "red", State.LOST: "red", MISSING: "red", State.PREEMPTED: "yellow",
            State.COMPLETED: "green"}  # fmt: skip
_WHY = ""
"""The column, without a heading, of what went wrong; it takes the room that the others leave."""

_LEAST_WHY = 24
_DISPENSABLE = ("host", "set", "age", "KL", _WHY, "job", "reward", "evaluation")
"""Columns in the order in which a narrow terminal goes without."""

_EVERY = 1.0
"""Seconds between two looks; longer where a look takes long, so that looking takes a fifth of the time at most."""


def whole(title: str, runs: Sequence[Standing]) -> Iterator[str]:
    """Every run with all that is known of it, one a line."""
    yield f"{title}  ({counts(run.state for run in runs)})"
    cells = []
    for run in runs:
        why = "" if run.state == State.COMPLETED else run.detail
        cells.append(_cells(run) | {"since (UTC)": _time(run.since), "set by": run.by or "-", "": why})
    if cells:
        columns = _used(cells)
        yield from ("  ".join(row).rstrip() for row in table([columns, *([row[name] for name in columns] for row in cells)]))


def live(title: str, look: Callable[[], Sequence[Standing]]) -> None:
    """Look and show until nothing is expected to happen any more; what was seen last stays on the screen."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as shown:
        while True:
            began = time.monotonic()
            runs = look()
            took = time.monotonic() - began
            shown.update(_table(title, runs, console.width, console.height - 1, datetime.now(UTC)), refresh=True)
            if not any(run.state in ACTIVE for run in runs):
                return
            time.sleep(max(_EVERY, 4 * took))


def _table(title: str, runs: Sequence[Standing], width: int, height: int, now: datetime) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    chosen, rest = chosen_rows(runs, height - 3)
    cells = [_cells(run) | {"set": _set(run, now), _WHY: run.detail if run.state in _ASTRAY else ""} for run in chosen]
    columns = _fitting(cells, width)
    room = max(_LEAST_WHY, width - 2 - _width([name for name in columns if name != _WHY], cells))
    shown = Table(box=None, pad_edge=False)
    for name in columns:
        left = name in ("run", "state", "host", "job", "set", _WHY)
        most = room if name == _WHY else None
        shown.add_column(name, justify="left" if left else "right", no_wrap=True, overflow="ellipsis", max_width=most)
    for run, row in zip(chosen, cells, strict=True):
        shown.add_row(*(Text(row[name], _COLOURS.get(run.state, "") if name == "state" else "") for name in columns))
    head = Text(f"{len(runs)} runs: {counts(run.state for run in runs)}   {title}", "bold", no_wrap=True, overflow="ellipsis")
    return Group(head, shown, *([Text(f"... and {rest}")] if rest else []))


def chosen_rows(runs: Sequence[Standing], room: int) -> tuple[list[Standing], str]:
    """The runs for which there is room, and a count of the rest: in the sweep's order where all fit, else those that matter."""
    if len(runs) <= room + 1:  # the line that counts the rest is a row as well
        return list(runs), ""
    by_matter = sorted(runs, key=lambda run: MATTERS.index(run.state))
    room = max(room, 1)
    return by_matter[:room], counts((run.state for run in by_matter[room:]), " more")


def _cells(run: Standing) -> dict[str, str]:
    evaluated = run.evaluation or {}
    return {
        "run": f"[{run.index}] {run.label}",
        "state": run.state,
        "update": f"{run.done}/{'?' if run.updates is None else run.updates}",
        "reward": _number(run.reward, ".3f"),
        "evaluation": f"{_number(evaluated.get('accuracy'), '.3f')} at {evaluated.get('update')}" if evaluated else "-",
        "KL": _number(run.kl, ".2e"),
        "age": "-" if run.age is None else str(run.age),
        "host": run.host or "-",
        "job": run.job_id or "-",
        "left": "-" if run.seconds_left is None else duration(run.seconds_left),
    }


def _used(cells: Sequence[dict[str, str]]) -> list[str]:
    """The columns in which something stands."""
    always = ("run", "state", "update")
    return [name for name in cells[0] if name in always or any(row[name] not in ("-", "") for row in cells)]


def _fitting(cells: Sequence[dict[str, str]], width: int) -> list[str]:
    """The columns for which a terminal has room."""
    columns = _used(cells) if cells else []
    for dispensable in _DISPENSABLE:
        if _width(columns, cells) <= width:
            break
        columns = [name for name in columns if name != dispensable]
    return columns


def _width(columns: Sequence[str], cells: Sequence[dict[str, str]]) -> int:
    def widest(name: str) -> int:
        return max(len(name), *(len(row[name]) for row in cells))

    return sum(2 + (min(_LEAST_WHY, widest(name)) if name == _WHY else widest(name)) for name in columns) - 2


def _set(run: Standing, now: datetime) -> str:
    """Which role set the state, and how long ago."""
    if run.since is None:
        return "-"
    ago = duration(max(0.0, (now - datetime.fromisoformat(run.since)).total_seconds()))
    return f"{(run.by or 'seen').split()[0]}, {ago} ago"


def _time(stamp: str | None) -> str:
    return (stamp or "-")[:19].replace("T", " ")


def _number(value: Any, form: str) -> str:
    try:
        return "-" if value is None else format(float(value), form)
    except (TypeError, ValueError):
        return str(value)


def history(states: Sequence[dict[str, Any]], attempts: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Every state of a run, with when and by whom, and every attempt."""
    rows = [["when (UTC)", "state", "attempt", "set by", ""]]
    for row in states:
        job = f"job {row['job_id']}" if row.get("job_id") else ""
        what = ", ".join(filter(None, [job, str(row.get("reason", ""))]))
        rows.append([_time(row.get("at")), str(row.get("state")), str(row.get("attempt") or "-"), str(row.get("by", "-")), what])
    yield from ("  ".join(row).rstrip() for row in table(rows))
    yield ""
    if not attempts:
        yield "no attempt yet"
        return
    columns = ("attempt", "host", "pid", "place")
    rows = [[*columns, "job", "claimed (UTC)", "by"]]
    for one in attempts:
        rows.append([*(str(one[name]) for name in columns), one["job_id"] or "-", _time(one["claimed_at"]), one["by"]])
    yield from ("  ".join(row).rstrip() for row in table(rows))


def is_terminal() -> bool:
    """Whether a live table can be shown: on a terminal that can move its cursor."""
    return sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")
