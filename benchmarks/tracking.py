"""A run's time with its trackers: with none, with wandb offline, and with a server that is not there, at the same time.

    python benchmarks/tracking.py [ROUNDS] [UPDATES]

The three runs of a round start together and so meet the same load, each time in another order. A server that accepts connections
and never answers stands for one that cannot be reached: a refused connection is over sooner. Printed for each kind are medians
over the rounds: seconds from the worker's start to the run's last state, their ratio to the run's without tracker in the same
round, and the seconds that the worker then still takes to end.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

KINDS = {
    "none": ["tracking=file"],
    "wandb offline": ["tracking=wandb"],
    "wandb online, no server": ["tracking=wandb", "tracking.mode=online"],
}


def main(rounds: int, updates: int) -> None:
    os.environ |= {"OMP_NUM_THREADS": "1", "WANDB_API_KEY": "0" * 40}
    folder = Path(tempfile.mkdtemp(prefix="tracking_"))
    taken: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in KINDS}
    with socket.socket() as silent, ThreadPoolExecutor(len(KINDS)) as threads:
        silent.bind(("127.0.0.1", 0))
        silent.listen(64)
        os.environ["WANDB_BASE_URL"] = f"http://127.0.0.1:{silent.getsockname()[1]}"
        for number in range(rounds):
            kinds = [*KINDS][number % 3 :] + [*KINDS][: number % 3]
            frozen = [_freeze(folder / f"{number}-{place}", KINDS[kind], updates) for place, kind in enumerate(kinds)]
            times = dict(zip(kinds, threads.map(_run, frozen), strict=True))
            for kind, (whole, after) in times.items():
                taken[kind].append((whole, whole / times["none"][0], after))
    print(f"{rounds} rounds of {updates} updates, three runs at a time; load {os.getloadavg()[0]:.1f}")
    for kind, rows in taken.items():
        whole, ratio, after = (statistics.median(column) for column in zip(*rows, strict=True))
        ratios = " ".join(f"{row[1]:.3f}" for row in rows)
        print(f"{kind:<24} {whole:6.1f} s, {ratio:.3f} of none's ({ratios}), then {after:.2f} s to end")


def _freeze(folder: Path, overrides: list[str], updates: int) -> Path:
    folder.mkdir()
    command = [sys.executable, "-P", "-m", "pth_exp.cli", "run", "arm=san", f"updates={updates}", "validation.every=null"]
    subprocess.run([*command, "hydra/launcher=pth_freeze", *overrides], cwd=folder, check=True, capture_output=True)
    (frozen,) = (folder / "multirun_outputs" / "latest").resolve().glob("*/frozen.yaml")
    return frozen


def _run(frozen: Path) -> tuple[float, float]:
    sha256 = frozen.with_name("frozen.sha256").read_text().strip()
    begin = time.time()
    worker = [sys.executable, "-P", "-m", "pth_exp.worker", "--frozen", str(frozen), "--sha256", sha256]
    subprocess.run(worker, check=True, capture_output=True)
    end = time.time()
    last = json.loads(frozen.with_name("states.0001.jsonl").read_text().splitlines()[-1])
    done = datetime.fromisoformat(last["at"]).timestamp()
    return done - begin, end - done


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:3]]
    main(*(numbers + [3, 40][len(numbers) :]))
