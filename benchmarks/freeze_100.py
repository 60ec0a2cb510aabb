"""CPU time of freezing 100 runs: compose, resolve, check, hash and write, as `pth run` does before it starts anything.

    python benchmarks/freeze_100.py [RUNS]

The bound that the project keeps is 15 s for 100 runs on one core. Printed beside it, as a measure of the machine: Hydra composing
the same jobs twice each, which is what its own sweeper and a launcher together do.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"


def main(runs: int) -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.types import HydraContext, RunMode

    from pth_exp import run
    from pth_exp.launchers.blocks import expand
    from pth_exp.launchers.freezing import FreezingLauncher
    from pth_exp.launchers.place import Job, RunResult

    class Nowhere:
        """A place that starts nothing."""

        def dispatch(self, jobs: Sequence[Job]) -> list[RunResult]:
            return []

    folder = Path(tempfile.mkdtemp(prefix="freeze_100_"))
    overrides = ["arm=grpo,san", f"seed=range(0,{runs // 2})", f"hydra.sweep.dir={folder}/sweep"]
    with run.hydra_over(None) as hydra:
        from hydra._internal.callbacks import Callbacks

        started = time.process_time()
        OverridesParser.create().parse_overrides(overrides)
        master = hydra.compose_config("config", overrides[2:], RunMode.MULTIRUN)
        launcher = FreezingLauncher(Nowhere(), HydraContext(hydra.config_loader, Callbacks()), master)
        jobs, launcher.plan.swept = expand([[]], {}, overrides[:2], hydra.config_loader)
        launcher.launch(jobs)
        frozen = time.process_time() - started

        started = time.process_time()
        for job in jobs[:10]:
            hydra.config_loader.load_sweep_config(master, job)
        hydras = (time.process_time() - started) / 10 * len(jobs) * 2
    written = len(list(folder.rglob("frozen.yaml")))
    print(f"{written} runs frozen in {frozen:.2f} CPU-s, {1e3 * frozen / written:.1f} ms a run")
    print(f"Hydra composing each twice: {hydras:.1f} CPU-s")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
