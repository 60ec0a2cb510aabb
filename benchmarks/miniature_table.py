"""The README's table of the miniature comparisons, from the records of their sweeps.

pth run experiment=miniature_interval96 && pth run experiment=miniature_age32 && pth run experiment=miniature_table4
python benchmarks/miniature_table.py multirun_outputs/miniature_*/latest
"""

from __future__ import annotations

import sys
from collections import defaultdict
from itertools import combinations
from math import nan
from pathlib import Path
from statistics import mean, median

from pth_exp.records.reader import RunRecords, Sweep

BEFORE_REFRESH = {"miniature_interval96": 90, "miniature_age32": 50, "miniature_table4": 60}
"""Validation shown beside the last one: the last before the refresh; about halfway for the replay runs."""

PAIRS = {
    "miniature_table4": [
        ("seq_gain", "seq_norm"),
        ("san", "seq_norm"),
        ("token_weights", "seq_norm"),
        ("token_weights, norm set to 1", "seq_norm, norm set to 1"),
        ("san", "tis_reinforce"),
        ("asympo_reading", "seq_norm"),
    ]
}
"""The differences that the paper's Table 4 is read for; of another sweep, those of all pairs are shown."""

COLUMNS = {"before": ".3f", "end": ".3f", "reward": ".3f", "kl": ".3f", "batches": "g", "clipped": "g"}


def cell(run: RunRecords) -> str:
    """The run's arm and what else tells its block apart."""
    kl, parts = run.config["kl"], [run.config["arm"]["name"]]
    if run.config["name"] == "miniature_table4":
        parts += ["norm set to 1"] * (run.config["optimizer"]["grad_norm"] == "set")
    elif run.config["replay_age"]:
        parts.append(run.config["queue"])
    elif kl["coef"] == 0:
        parts.append("no KL penalty")
    elif kl["clamp"] is None:
        parts.append("KL not clamped")
    return ", ".join(parts)


def accuracy(run: RunRecords, update: int) -> float:
    return next(float(row["accuracy"]) for row in run.evaluations if row["update"] == update)


def numbers(run: RunRecords, halfway: int) -> dict[str, float]:
    rows = run.updates
    return {
        "before": accuracy(run, halfway),
        "end": accuracy(run, run.config["updates"]),
        "reward": mean(row["reward/generated"] for row in rows[-10:]),
        "kl": rows[95]["rollout_corr/kl"],
        "batches": len({row["batch_id"] for row in run.batches}),
        "clipped": nan if run.config["optimizer"].get("grad_norm") == "set" else sum(row["actor/grad_clipped"] for row in rows),
    }


def main() -> None:
    for path in sys.argv[1:]:
        sweep = Sweep.load(Path(path))
        name = sweep.index["name"]
        halfway = BEFORE_REFRESH[name]
        cells: dict[str, dict[int, dict[str, float]]] = defaultdict(dict)
        for run in sweep.runs:
            cells[cell(run)][run.config["seed"]] = numbers(run, halfway)
        seeds = sorted(next(iter(cells.values())))
        print(f"\n{name}, seeds {' / '.join(map(str, seeds))}\n")
        titles = f"accuracy at {halfway} | accuracy at 100 | last-10 reward | KL at update 95 | distinct batches | clip acted"
        print(f"| arm | {titles} |\n|{'---|' * 7}")
        for label, by_seed in cells.items():
            shown = [" ".join(format(by_seed[s][key], form) for s in seeds) for key, form in COLUMNS.items()]
            print(f"| {label} | {' | '.join(shown)} |")
        print(f"\n| difference at 100, points | {' | '.join(map(str, seeds))} | mean |\n|{'---|' * (len(seeds) + 2)}")
        for one, other in PAIRS.get(name, combinations(cells, 2)):
            paired = [100 * (cells[one][s]["end"] - cells[other][s]["end"]) for s in seeds]
            print(f"| {one} − {other} | {' | '.join(f'{d:+.1f}' for d in paired)} | {mean(paired):+.1f} |")
        likenesses(sweep)


def likenesses(sweep: Sweep) -> None:
    """Cosine of the token coefficients of each two arms on the same batches: median and least over all updates of all runs."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in (row for run in sweep.runs for row in run.updates):
        for pair in row.get("shadow/pairs") or ():
            if pair["cosine"] is not None:
                found[min(pair["a"], pair["b"]), max(pair["a"], pair["b"])].append(pair["cosine"])
    if found:
        print("\n| two arms on one batch | median cosine | least | updates |\n|---|---|---|---|")
    for (one, other), cosines in sorted(found.items(), key=lambda item: -median(item[1])):
        print(f"| {one}, {other} | {median(cosines):.3f} | {min(cosines):.3f} | {len(cosines)} |")


if __name__ == "__main__":
    main()
