"""The same comparison on both stacks, beside each other, from the records of two sweeps.

pth run experiment=stacks_interval96 stack=trainer && pth run experiment=stacks_interval96 stack=verl
python benchmarks/stacks_table.py SWEEP SWEEP
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import mean, median

from pth_exp.records.reader import RunRecords, Sweep


def line(run: RunRecords) -> list[str]:
    config, rows = run.config, run.updates
    accuracies = {row["update"]: row["accuracy"] for row in run.evaluations}
    return [
        config["arm"]["name"],
        config["stack"]["name"],
        " ".join(f"{accuracies[update]:.3f}" for update in sorted(accuracies) if update % 30 == 0 or update == config["updates"]),
        f"{mean(row['reward/generated'] for row in rows[-10:]):.3f}",
        f"{rows[95]['rollout_corr/kl']:.3f}",
        f"{sum(row['actor/grad_clipped'] for row in rows)}",
        f"{median(row['timing_s/step'] for row in rows):.2f}",
    ]


def main() -> None:
    runs = [run for path in sys.argv[1:] for run in Sweep.load(Path(path)).runs]
    runs.sort(key=lambda run: (run.config["arm"]["name"], run.config["stack"]["name"]))
    titles = "arm | stack | accuracy at 0, 30, 60, 90, 100 | last-10 reward | KL at 95 | clip acted | seconds an update (median)"
    print(f"| {titles} |\n|{'---|' * 7}")
    for run in runs:
        print(f"| {' | '.join(line(run))} |")
    orders = {str(run.first_batches) for run in runs}
    print(f"\nprompt IDs of the first {len(runs[0].first_batches or [])} batches: {'equal' if len(orders) == 1 else 'DIFFERENT'}")


if __name__ == "__main__":
    main()
