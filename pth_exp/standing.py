"""Where the runs of a sweep stand, read from the ends of their files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from pth_exp import lifecycle
from pth_exp.lifecycle import State
from pth_exp.records.reader import read_index
from pth_exp.records.tail import last_rows
from pth_exp.runfiles import server_time

MISSING = "MISSING"
"""In place of a state: the index names a run whose directory is not there."""

ACTIVE = (State.FROZEN, State.QUEUED, State.RUNNING)
"""States that a run is expected to leave."""

_RECENT = 20
"""Updates from which the time of those that are left is estimated."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a run stands; None where there is nothing to be read.

    Attributes:
        index, label, dir: number, name and folder of the run, as the sweep's index has them.
        state: a `lifecycle.State`, or ``MISSING``.
        since, by: when the state was set, UTC, and who set it.
        detail: one sentence for people.
        attempt: the newest attempt, as its file has it.
        heartbeat_age: seconds.
        host, job_id: where the newest attempt runs; ``job_id`` is a waiting job's where the next attempt has one.
        update, updates: the newest update on record, from 0, and how many there are to be.
        reward, kl, age: of that update; ``age`` of its data, in updates, ``kl`` from sampler to learner, in nats.
        evaluation: update and accuracy of the last evaluation.
        seconds_left: of a running run, by the median time of its recent updates.
    """

    index: int
    label: str
    dir: str
    state: str
    since: str | None = None
    by: str | None = None
    detail: str = ""
    attempt: dict[str, Any] | None = None
    heartbeat_age: float | None = None
    host: str | None = None
    job_id: str | None = None
    update: int | None = None
    updates: int | None = None
    reward: Any = None
    kl: Any = None
    age: Any = None
    evaluation: dict[str, Any] | None = None
    seconds_left: float | None = None

    @property
    def done(self) -> int:
        """Updates on record."""
        return 0 if self.update is None else self.update + 1


class SweepStandings:
    """The runs of a sweep, to be looked at again and again: a completed one is read once."""

    def __init__(self, sweep: Path) -> None:
        self.sweep = sweep
        self._completed: dict[str, Standing] = {}

    def read(self) -> list[Standing]:
        """In the index's order. Raises NothingToRead for a sweep without a readable index."""
        now = server_time(self.sweep)
        found = []
        for entry in read_index(self.sweep)["runs"]:
            standing = self._completed.get(entry["dir"]) or read_run(self.sweep / entry["dir"], entry, now)
            if standing.state == State.COMPLETED:
                self._completed[entry["dir"]] = standing
            found.append(standing)
        return found


def read_run(run_dir: Path, entry: Mapping[str, Any], now: float | None = None) -> Standing:
    """One run. ``entry`` has its index, label and number of updates, ``now`` is the file server's time."""
    index, label, updates = int(entry["index"]), str(entry["label"]), entry.get("updates")
    try:
        names = os.listdir(run_dir)
    except (FileNotFoundError, NotADirectoryError):
        return Standing(index, label, run_dir.name, MISSING, detail=f"{run_dir} is not there", updates=updates)
    status = lifecycle.status(run_dir, now)
    running = status.state is State.RUNNING
    rows = last_rows(run_dir, names, "updates", _RECENT if running else 1)
    newest = rows[-1] if rows else {}
    evaluations = last_rows(run_dir, names, "evals")
    update = newest.get("update")
    return Standing(
        index=index,
        label=label,
        dir=run_dir.name,
        state=status.state,
        since=status.since,
        by=status.by,
        detail=status.detail,
        attempt=asdict(status.attempt) if status.attempt else None,
        heartbeat_age=status.heartbeat_age,
        host=status.attempt.host if status.attempt else None,
        job_id=status.job_id,
        update=update,
        updates=updates,
        reward=newest.get("reward/trained"),
        kl=newest.get("rollout_corr/kl"),
        age=newest.get("data/age"),
        evaluation={name: evaluations[-1].get(name) for name in ("update", "accuracy")} if evaluations else None,
        seconds_left=_seconds_left(rows, update, updates) if running else None,
    )


def _seconds_left(rows: Iterable[Mapping[str, Any]], update: int | None, updates: int | None) -> float | None:
    steps = [row["timing_s/step"] for row in rows if isinstance(row.get("timing_s/step"), (int, float))]
    if not steps or update is None or updates is None:
        return None
    return float(median(steps) * (updates - update - 1))


def counts(states: Iterable[str], more: str = "") -> str:
    """How many runs are in each state."""
    tally: dict[str, int] = {}
    for state in states:
        tally[state] = tally.get(state, 0) + 1
    return ", ".join(f"{tally[state]}{more} {state.lower()}" for state in (*State, MISSING) if state in tally) or "no runs"
