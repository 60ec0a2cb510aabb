"""A worker without a trainer: takes its run as the real one does, then does what PTH_TEST_DEED says."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType

from pth_exp import lifecycle
from pth_exp.lifecycle import State
from pth_exp.records.reader import read_yaml
from pth_exp.records.writer import RunRecorder

run_dir = Path(sys.argv[sys.argv.index("--frozen") + 1]).parent
frozen = read_yaml(run_dir / "frozen.yaml")
deed = os.environ["PTH_TEST_DEED"]
if deed == "refuse":
    print("refused: not today")
    sys.exit(2)
job_id = os.environ.get("PTH_JOB_ID")
lease = lifecycle.claim(run_dir, heartbeat_every=5.0, lost_after=60.0, place=os.environ["PTH_PLACE"], job_id=job_id)


def obey(_number: int, _frame: FrameType | None) -> None:
    lease.end(State.PREEMPTED)
    sys.exit(3)


def defy(_number: int, _frame: FrameType | None) -> None:
    (run_dir / "asked").touch()


with RunRecorder(run_dir, lease.attempt.attempt, lease.check) as recorder:
    for update in range(frozen["config"]["updates"]):
        recorder.update({"update": update})
if deed in ("wait", "defy"):
    signal.signal(signal.SIGTERM, obey if deed == "wait" else defy)
    (run_dir / "ready.tmp").write_text(str(os.getpid()))
    (run_dir / "ready.tmp").rename(run_dir / "ready")
    while True:
        signal.pause()
if deed == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if deed == "raise":
    print(f"last words of {frozen['run']['label']}", flush=True)
    lease.end(State.FAILED, "the cat ate it")
    sys.exit(1)
lease.end(State.COMPLETED)
