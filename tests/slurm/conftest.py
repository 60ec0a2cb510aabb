"""A SLURM for the tests of this folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "dispatch"))

from cluster import Slurm, slurm_of_tests


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """They wait for timers of SLURM's more than they compute: begun first, they run beside all others."""
    items.sort(key=lambda item: Path(__file__).parent not in item.path.parents)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Slurm]:
    with slurm_of_tests() as running:
        yield running


@pytest.fixture(autouse=True)
def _on_it(cluster: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
