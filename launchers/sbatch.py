"""A plain sbatch script for a sweep: for clusters on which submitit cannot be used. It needs SLURM and this package, no more."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from pth_exp.launchers.place import Job
from pth_exp.launchers.slurm_job import SlurmRun, this_job
from pth_exp.launchers.slurm_settings import SlurmSettings, flags, job_name
from pth_exp.refusal import refuse
from pth_exp.runfiles import create

FOLDER, NAME = "sbatch", "job-name"
"""In the sweep's directory: where a script goes unless it is sent elsewhere; what the jobs of all its scripts are called."""
RUNS = "runs.json"
"""Beside the script: what each task of the array executes."""


def write(jobs: Sequence[Job], settings: SlurmSettings, sweep: Path, folder: Path) -> Path:
    """Write ``job.sh`` and what it reads into ``folder``; the script's path. Raises Refusal, ``NoInterpreter``."""
    for job in jobs:
        settings.require(job)
    if len(settings.alike(jobs)) > 1:
        why = "its runs ask SLURM for different things, and a job array asks once"
        remedy = "write a script for each kind with --only, or give launcher.cpus_per_task, gpus_per_node and mem_gb for all"
        raise refuse("sweep", sweep, why, remedy)
    folder.mkdir(parents=True, exist_ok=True)
    runs = {job.index: dataclasses.asdict(SlurmRun.of(job, settings)) for job in jobs}
    (folder / RUNS).write_text(json.dumps(runs, indent=1, default=str) + "\n")
    script = folder / "job.sh"
    script.write_text("\n".join(_lines(jobs, settings, sweep, folder)) + "\n")
    return script


def _lines(jobs: Sequence[Job], settings: SlurmSettings, sweep: Path, folder: Path) -> Iterator[str]:
    most = f"%{settings.array_parallelism}" if settings.array_parallelism else ""
    options = {
        "job-name": _own_name(sweep),
        "array": ranges([job.index for job in jobs]) + most,
        "output": str(folder.absolute() / "%A_%a.out"),
        **settings.options(jobs[0]),
    }
    yield "#!/bin/bash"
    for flag in flags(options):
        yield f"#SBATCH {shlex.quote(flag)}"
    yield ""
    yield from settings.setup
    step = shlex.join(["srun", *settings.step(jobs[0])])
    entry = shlex.join([sys.executable, "-P", "-m", "pth_exp.launchers.sbatch", str((folder / RUNS).absolute())])
    yield f"{step} {entry}"


def name_of(sweep: Path) -> str | None:
    """What the jobs of a sweep's scripts are called, no other sweep's ones; None before the first script.

    The number of a task is its run's, so such a job is known before it begins, though nobody saw it submitted.
    """
    try:
        return (sweep / FOLDER / NAME).read_text().strip() or None
    except FileNotFoundError:
        return None


def _own_name(sweep: Path) -> str:
    (sweep / FOLDER).mkdir(exist_ok=True)
    with contextlib.suppress(FileExistsError):
        create(sweep / FOLDER / NAME, f"{job_name(sweep)}-{secrets.token_hex(3)}\n".encode())
    return (sweep / FOLDER / NAME).read_text().strip()


def ranges(numbers: Sequence[int]) -> str:
    """As SLURM writes them: ``0-3,7``."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def main(arguments: Sequence[str]) -> int:
    """A task of the array: execute its run."""
    runs = json.loads(Path(arguments[0]).read_text())
    run = runs[os.environ["SLURM_ARRAY_TASK_ID"]]
    print(f"job {this_job()}: {run['run_dir']}", flush=True)
    return SlurmRun(**{**run, "run_dir": Path(run["run_dir"])}).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
