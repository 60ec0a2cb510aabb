"""``pth sbatch``: a plain sbatch script for what a sweep has not completed. Nothing is composed again, and nothing submitted."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pth_exp import freeze, lifecycle
from pth_exp.interpreters import NoInterpreter
from pth_exp.lifecycle import State
from pth_exp.records.reader import NothingToRead, find_sweep, read_index
from pth_exp.refusal import Refusal
from pth_exp.resume import chosen, named_settings, named_sweep

PLACE = "pth_slurm"


def main(arguments: Sequence[str]) -> int:
    """Exit codes: 0 the script is written, or there is nothing to run; 2 usage."""
    parser = argparse.ArgumentParser(
        prog="pth sbatch",
        description="Write a script for sbatch that runs what a sweep has not completed, from its frozen files.",
        epilog="Its jobs checkpoint and requeue themselves as those of hydra/launcher=pth_slurm do; submitit is not needed.",
    )
    parser.add_argument(
        "words", nargs="*", metavar="[SWEEP] [launcher.SETTING=VALUE ...]",
        help="a sweep's directory, the latest sweep by default; settings of conf/hydra/launcher/pth_slurm.yaml",
    )  # fmt: skip
    parser.add_argument("--only", metavar="RUN", action="append", help="only this run: its number, or a pattern of its label")
    parser.add_argument("--into", type=Path, metavar="FOLDER", help="where to write it; SWEEP/sbatch by default")
    asked = parser.parse_intermixed_args(arguments)
    from pth_exp.launchers import sbatch
    from pth_exp.launchers.place import Job
    from pth_exp.launchers.places import checked_settings
    from pth_exp.launchers.slurm import not_waiting
    from pth_exp.launchers.slurm_settings import SlurmSettings
    from pth_exp.launchers.sweep_dir import launched_on

    try:
        sweep = find_sweep(named_sweep(asked.words))
        name, launched = launched_on(sweep)
        given = {**(launched if name == PLACE else {}), **named_settings(asked.words)}
        settings = SlurmSettings(**checked_settings(PLACE, given))
        jobs = []
        for entry in chosen(read_index(sweep)["runs"], asked.only):
            run_dir = sweep / entry["dir"]
            if lifecycle.state(run_dir)[0] not in (State.COMPLETED, State.RUNNING):
                jobs.append(Job.of(freeze.load(run_dir / freeze.FILE, entry["frozen_sha256"])))
        jobs = not_waiting(jobs, sys.stderr)
        if not jobs:
            print(f"nothing to run in {sweep}")
            return 0
        script = sbatch.write(jobs, settings, sweep, asked.into or sweep / sbatch.FOLDER)
    except (NothingToRead, Refusal, NoInterpreter, freeze.FrozenError) as error:
        print(f"pth sbatch: {error}", file=sys.stderr)
        return 2
    print(
        f"{len(jobs)} run{'s' * (len(jobs) != 1)}. Submit with:\n  sbatch {script}\nSee where they stand with: pth status {sweep}"
    )
    return 0
