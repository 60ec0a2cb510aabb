"""A run's time with its trackers: the same run, side by side, with none, with wandb offline, and with a server that is not there.

    python benchmarks/tracking.py [ROUNDS] [UPDATES]

A server that accepts connections and never answers stands for one that cannot be reached: a refused connection is over sooner.
The kinds take turns; printed are seconds from the worker's start to its end, and those between its first and last update.
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
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(64)
        os.environ["WANDB_BASE_URL"] = f"http://127.0.0.1:{silent.getsockname()[1]}"
        times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
        for number in range(rounds):
            for kind in [*KINDS][number % 3 :] + [*KINDS][: number % 3]:
                times[kind].append(_run(folder / f"{number}-{[*KINDS].index(kind)}", KINDS[kind], updates))
    print(f"{rounds} rounds of {updates} updates; load {os.getloadavg()[0]:.1f}")
    base = statistics.median(whole for whole, _ in times["none"])
    for kind, taken in times.items():
        whole, training = (statistics.median(values) for values in zip(*taken, strict=True))
        print(f"{kind:<24} {whole:6.1f} s, training {training:6.1f} s, {whole / base:.3f} of none's")


def _run(folder: Path, overrides: list[str], updates: int) -> tuple[float, float]:
    folder.mkdir()
    command = [sys.executable, "-P", "-m", "pth_exp.cli", "run", "arm=san", f"updates={updates}", "validation.every=null"]
    subprocess.run([*command, "hydra/launcher=pth_freeze", *overrides], cwd=folder, check=True, capture_output=True)
    (run,) = (folder / "multirun_outputs" / "latest").resolve().glob("*/frozen.yaml")
    sha256 = run.with_name("frozen.sha256").read_text().strip()
    begin = time.monotonic()
    worker = [sys.executable, "-P", "-m", "pth_exp.worker", "--frozen", str(run), "--sha256", sha256]
    subprocess.run(worker, check=True, capture_output=True)
    whole = time.monotonic() - begin
    states = [json.loads(line) for line in (run.parent / "states.0001.jsonl").read_text().splitlines()]
    started, ended = (datetime.fromisoformat(row["at"]) for row in (states[0], states[-1]))
    return whole, (ended - started).total_seconds()


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:3]]
    main(*(numbers + [3, 40][len(numbers) :]))
