"""``pth track``: send the records of a sweep's runs to Weights & Biases, again or for the first time."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pth_exp import freeze, lifecycle
from pth_exp.records.reader import NothingToRead, find_sweep, read_index
from pth_exp.schema import TrackingMode
from pth_exp.tracking import requirement
from pth_exp.tracking.history import History


def main(arguments: Sequence[str]) -> int:
    """Exit codes: 0 every run was sent or written, 1 one was not, 2 usage."""
    parser = argparse.ArgumentParser(prog="pth track", description=__doc__, epilog=main.__doc__)
    parser.add_argument("path", nargs="?", type=Path, help="a sweep, or one run's directory; the latest sweep by default")
    parser.add_argument(
        "--online", action="store_true", help="send now, with the key in the environment; otherwise offline files"
    )
    chosen = parser.parse_args(arguments)
    try:
        runs = _runs(chosen.path)
        import wandb  # noqa: F401
    except NothingToRead as error:
        print(f"pth track: {error}", file=sys.stderr)
        return 2
    except ImportError:
        print(f"pth track: wandb is not installed; {requirement('wandb')}", file=sys.stderr)
        return 2
    return max([_send(run, TrackingMode.online if chosen.online else TrackingMode.offline) for run in runs], default=0)


def _runs(path: Path | None) -> list[Path]:
    if path is not None and (path / freeze.FILE).is_file():
        return [path]
    sweep = find_sweep(path)
    return [sweep / entry["dir"] for entry in read_index(sweep)["runs"]]


def _send(run_dir: Path, mode: TrackingMode) -> int:
    """One run's whole records, as they are now; a run that has none is passed over."""
    from pth_exp.tracking.to_wandb import Wandb, run_id, settings_of

    frozen = freeze.load(run_dir / freeze.FILE)
    label, variable = frozen.run["label"], settings_of(frozen).key_variable
    secret = os.environ.get(variable, "")
    if mode is TrackingMode.online and not secret:
        print(f"{label}: {variable} is not set", file=sys.stderr)
        return 1
    steps = list(History(run_dir, lifecycle.newest_attempt(run_dir) + 1).steps(ended=True))
    if not steps:
        return 0
    try:
        tracker = Wandb(frozen, mode)
        for step, numbers in steps:
            tracker.log(step, numbers)
        tracker.finish()
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        print(f"{label}: {why.replace(secret, '***') if secret else why}", file=sys.stderr)
        return 1
    where = "sent" if mode is TrackingMode.online else f"written below {run_dir / 'wandb'}"
    print(f"{label}: {len(steps)} steps {where}, as {run_id(frozen)}")
    return 0
