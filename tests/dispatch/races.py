"""Two launchers and two workers race for one directory, again and again: one launcher and one worker win each time.

    python tests/dispatch/races.py --races 100

A race: two ``pth run`` are given the same ``hydra.sweep.dir`` and meet where they take it; then two ``pth resume`` of what the
winner froze each start a worker, and the two workers meet where they claim the run. The launchers are forks of this process,
which has imported what they need; the workers are started as always.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from frozen_sweeps import SMALL, SMALL_TASK

import pth_exp.launchers.freezing
import pth_exp.resume
import pth_exp.run  # noqa: F401  imported once, for every launcher
from pth_exp import cli, lifecycle
from pth_exp.exits import COMPLETED, HELD, REFUSED
from pth_exp.launchers import place
from pth_exp.launchers.local import LocalPlace
from pth_exp.launchers.sweep_dir import SweepDir
from pth_exp.lifecycle import State
from pth_exp.records.reader import RunRecords

FORK: Any = multiprocessing.get_context("fork")
WORKER = Path(__file__).with_name("rival_worker.py")
RUN = [*SMALL, *SMALL_TASK, "arm=grpo", "updates=3", "validation.every=null"]


def race(folder: Path) -> str:
    """One race in an empty folder; how it ended. Raises AssertionError when not exactly one of each won."""
    sweep, gate = folder / "sweep", folder / "sweep" / "gate"
    codes, told = _at_once(folder, SweepDir, "create", ["run", *RUN, f"hydra.sweep.dir={sweep}"], dispatch=False)
    assert sorted(codes) == [0, 2], (codes, told)
    assert "belongs to another launch" in told[codes.index(2)], told
    (entry,) = json.loads((sweep / "index.json").read_text())["runs"]
    run_dir = sweep / entry["dir"]
    assert [path.name for path in sweep.glob("*/frozen.yaml")] == ["frozen.yaml"]
    assert [row["state"] for row in lifecycle.history(run_dir)] == ["FROZEN"]

    gate.mkdir()
    codes, told = _at_once(folder, LocalPlace, "dispatch", ["resume", str(sweep)], dispatch=True)
    ends = sorted(int(path.read_text()) for path in gate.glob("*.exit"))
    assert ends in ([COMPLETED, REFUSED], [COMPLETED, HELD]), (ends, told)
    assert 0 in codes and set(codes) <= {0, 1}, (codes, told)  # a launcher that leaves while the other's worker runs says 1
    assert sorted(path.name for path in (run_dir / "attempts").glob("????.json")) == ["0001.json"]
    assert not list((run_dir / "attempts").glob("*.heartbeat"))
    states = Counter(row["state"] for row in lifecycle.history(run_dir))
    assert (states["RUNNING"], states["COMPLETED"]) == (1, 1) and states.keys() <= {"FROZEN", "QUEUED", "RUNNING", "COMPLETED"}
    assert lifecycle.state(run_dir)[0] is State.COMPLETED
    records = RunRecords.load(run_dir)
    assert [(row["update"], row["attempt"]) for row in records.updates] == [(0, 1), (1, 1), (2, 1)] and not records.problems
    return "held" if HELD in ends else "completed"


def _at_once(folder: Path, owner: Any, method: str, command: Sequence[str], dispatch: bool) -> tuple[list[int], list[str]]:
    """Two processes with one command, which wait for each other before ``owner.method``: exit codes, and what they said."""
    start = FORK.Barrier(2)
    logs = [folder / f"{command[0]}-{number}.txt" for number in range(2)]
    rivals = [FORK.Process(target=_launch, args=(folder, owner, method, command, dispatch, start.wait, log)) for log in logs]
    for rival in rivals:
        rival.start()
    for rival in rivals:
        rival.join(180)
        if rival.exitcode is None:
            rival.kill()
    return [rival.exitcode for rival in rivals], [log.read_text() for log in logs]


def _launch(
    folder: Path, owner: Any, method: str, command: Sequence[str], dispatch: bool, wait: Callable[[], int], log: Path
) -> None:
    os.chdir(folder)
    place.WORKER = (str(WORKER),)  # type: ignore[assignment]
    if not dispatch:
        LocalPlace.dispatch = lambda self, runs: []  # type: ignore[method-assign]
    called = getattr(owner, method)

    def together(*arguments: Any) -> Any:
        wait()
        return called(*arguments)

    setattr(owner, method, staticmethod(together) if owner is SweepDir else together)
    with log.open("w", buffering=1) as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        code = cli.main(list(command))
    os._exit(code)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--races", type=int, default=100)
    races = parser.parse_args(arguments).races
    began, ends = time.monotonic(), Counter[str]()
    for number in range(races):
        with tempfile.TemporaryDirectory() as folder:
            ends[race(Path(folder))] += 1
        if number % 10 == 9:
            print(f"{number + 1} races, {time.monotonic() - began:.0f} s", flush=True)
    print(
        f"{races} races of two launchers for one directory and of two workers for one run: one won each time; "
        f"the other worker found the run held {ends['held']} times, completed {ends['completed']} times"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
