"""A SLURM for the tests of this folder: skipped where it is not installed, unless PTH_TEST_SLURM says that it must be."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "dispatch"))

from cluster import Slurm, missing, slurm


@pytest.fixture(scope="session")
def cluster() -> Iterator[Slurm]:
    if os.getuid() != 0 or (absent := missing()):
        why = "needs root" if os.getuid() != 0 else f"not installed: {', '.join(absent)} (make slurm)"
        if os.environ.get("PTH_TEST_SLURM") == "1":
            pytest.fail(f"PTH_TEST_SLURM=1, and SLURM {why}")
        pytest.skip(f"SLURM {why}")
    with tempfile.TemporaryDirectory(prefix="pth-slurm-") as folder, slurm(Path(folder), nodes=2) as running:
        yield running


@pytest.fixture(autouse=True)
def _on_it(cluster: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
