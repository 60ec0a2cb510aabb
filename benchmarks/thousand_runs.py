"""A sweep of 1,000 runs, frozen and gated, then listed, shown and compared: seconds and memory of each command.

    python benchmarks/thousand_runs.py [SEEDS [FOLDER]]

Ten arms with SEEDS seeds each (100) are frozen by `pth run ... hydra/launcher=pth_freeze`, which does all that a launch does up
to the dispatch. Then every run is given the records of a finished one, of a few updates, by the recorder that runs use, and the
reading commands are timed: a fresh process each, the best of three, since other work on the machine only ever adds. The bounds
that the project keeps: 60 s to freeze, 2 s each for `pth status` and `pth diff`.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

ARMS = "grpo,ppo_clip,tis_ppo,tis_reinforce,san,gspo,cispo,m2po,seq_norm,seq_gain"
UPDATES = 20
PTH = str(Path(sys.executable).with_name("pth"))


def main(seeds: int, folder: Path) -> None:
    sweep = folder / "sweep"
    asked = [f"arm={ARMS}", f"seed=range(0,{seeds})", "hydra/launcher=pth_freeze", f"hydra.sweep.dir={sweep}"]
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; wall s, CPU s, MiB at most")
    show("pth run, up to the dispatch", [timed("run", *asked)])
    for state in ("frozen", "completed"):
        for command in ("list", "status", "status --json", "diff", "diff --only-unexpected", "diff --json"):
            arguments = [*command.split(), str(sweep)]
            show(f"pth {command}, {state}", [timed(*arguments) for _ in range(3)])
        if state == "frozen":
            complete(sweep)
    show("pth check --no-figure", [timed("check", "--no-figure", str(sweep))])
    print(f"load {os.getloadavg()[0]:.1f}")


def timed(*arguments: str) -> tuple[float, float, float]:
    """Wall seconds, CPU seconds and peak MiB of one process."""
    began = time.perf_counter()
    quiet = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_WRONLY, 0o666) for fd in (1, 2)]
    pid = os.posix_spawn(PTH, [PTH, *arguments], os.environ, file_actions=quiet)
    _, status, usage = os.wait4(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if code not in (0, 1):  # the made records are not what check expects of a run
        raise SystemExit(f"pth {' '.join(arguments)}: exit code {code}")
    return time.perf_counter() - began, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def show(what: str, measured: list[tuple[float, float, float]]) -> None:
    wall, cpu, memory = map(min, zip(*measured, strict=True))
    print(f"{what:<40} {wall:7.2f} {cpu:7.2f} {memory:6.0f}", flush=True)


def complete(sweep: Path) -> None:
    """Give every run what a finished one leaves behind; the numbers are made up."""
    from pth_exp import lifecycle, sections
    from pth_exp.lifecycle import State
    from pth_exp.records.writer import RunRecorder

    for entry in json.loads((sweep / "index.json").read_text())["runs"]:
        run_dir = sweep / entry["dir"]
        config = sections.load((run_dir / "frozen.yaml").read_bytes())["config"]
        lease = lifecycle.claim(run_dir, 5.0, 60.0, "here", None)
        with RunRecorder(run_dir, 1, lambda: None) as recorder:
            recorder.received({"lr": config["lr"], "seeds.data": config["seeds"]["data"]})
            recorder.first_batches(list(batches(config["seeds"]["data"], config["prompts_per_update"])))
            for update in range(UPDATES):
                recorder.batch({"update": update, "batch_id": str(update)})
                row = {"update": update, "reward/trained": 0.3, "rollout_corr/kl": 1e-3 * update, "data/age": 0}
                recorder.update(row | {"timing_s/step": 0.4, "sampler/fingerprint": "a" * 64, "learner/fingerprint": "b" * 64})
            recorder.evaluation(
                {"update": UPDATES, "accuracy": 0.5, "correct": [1, 0] * 128, "problems": ["test:0:0123456789ab"] * 256}
            )
        lease.end(State.COMPLETED)


def batches(seed: int, prompts: int) -> Iterator[list[str]]:
    draw = random.Random(seed)
    for _ in range(8):
        yield [f"train:{draw.randrange(4096)}:{draw.getrandbits(48):012x}" for _ in range(prompts)]


if __name__ == "__main__":
    asked_seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    if len(sys.argv) > 2:
        main(asked_seeds, Path(sys.argv[2]).absolute())
    else:
        with tempfile.TemporaryDirectory(prefix="thousand_runs_") as made:
            main(asked_seeds, Path(made))
