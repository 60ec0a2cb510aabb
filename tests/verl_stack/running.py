"""Calling ``pth`` on verl from the tests, with runs that are as small as they can be and still show what they should."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

INTERVAL, UPDATES = 4, 12
ARMS = ("grpo", "ppo_clip", "tis_ppo", "san")
SMALL = (
    *("stack=verl", f"refresh_interval={INTERVAL}", "prompts_per_update=4", "responses_per_prompt=4", "max_response_tokens=24"),
    *("task.train_problems=12", "validation.problems=16", "seed=7"),
)
"""Three batches an epoch."""
TWO_RANKS = ("arm=tis_ppo", *SMALL, "updates=5", "stack.ranks=2", "stack.micro_batch_rows=4", "validation.every=null")


def pth(folder: Path, verl_python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs ``pth`` in a folder; the result has its exit code and what it printed."""
    environment = {**os.environ, "PTH_VERL_PYTHON": str(verl_python)}
    command = [sys.executable, "-P", "-m", "pth_exp.cli", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True, timeout=2700, check=False)
