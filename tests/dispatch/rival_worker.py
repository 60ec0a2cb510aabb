"""The worker itself, on a stack that only writes rows; it claims its run when a rival is about to as well."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from pth_exp import lifecycle, worker
from pth_exp.records.writer import RunRecorder
from pth_exp.schema import Config

claim = lifecycle.claim


def claim_with_the_rival(run_dir: Path, **how: Any) -> lifecycle.Lease:
    gate = run_dir.parent / "gate"
    (gate / f"{os.getpid()}.ready").touch()
    deadline = time.monotonic() + 120
    while len(list(gate.glob("*.ready"))) < 2:
        assert time.monotonic() < deadline, "no rival came"
    return claim(run_dir, **how)


def run(config: Config, recorder: RunRecorder, checkpoints: Path, should_stop: Any) -> str:
    for update in range(config.updates):
        assert not should_stop()
        recorder.batch({"update": update})
        recorder.update({"update": update})
    return "completed"


if __name__ == "__main__":
    lifecycle.claim = claim_with_the_rival  # type: ignore[assignment]
    worker.verify_first_batches = lambda run_dir, config: 0  # type: ignore[attr-defined]
    worker._stack = lambda name: run
    code = worker.main()
    frozen = Path(sys.argv[sys.argv.index("--frozen") + 1])
    (frozen.parents[1] / "gate" / f"{os.getpid()}.exit").write_text(str(code))
    sys.exit(code)
