from __future__ import annotations

import os
from pathlib import Path

import pytest


def gsm8k_folder() -> Path:
    """The real files: $PTH_GSM8K, or shared/data/gsm8k beside the repository; skips if there is neither."""
    folder = Path(os.environ.get("PTH_GSM8K") or Path(__file__).parents[3] / "shared" / "data" / "gsm8k")
    if not folder.is_dir():
        pytest.skip(f"the real GSM8K is not at {folder}; set PTH_GSM8K to the folder that holds train.jsonl and test.jsonl")
    return folder
