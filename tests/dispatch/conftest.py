"""Fixtures: frozen sweeps that nobody has run yet, and workers run in this process."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from frozen_sweeps import SMALL_TASK, freeze_sweep

from pth_exp import worker


@pytest.fixture(scope="session")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return freeze_sweep(tmp_path_factory.mktemp("frozen"), "arm=grpo", "seed=1,2,3", "updates=12", *SMALL_TASK)


@pytest.fixture
def sweep(frozen: Path, tmp_path: Path) -> Path:
    """A sweep of three frozen runs of its own for each test."""
    return Path(shutil.copytree(frozen, tmp_path / "sweep"))


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., int]]:
    """Run a frozen run's worker in this process on a stack of tests/dispatch/stacks.py; its exit code."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    environment = dict(os.environ)

    def run(run_dir: Path, stack: str, sha256: str | None = None) -> int:
        monkeypatch.setitem(worker.STACKS, "trainer", f"stacks:{stack}")
        sha256 = sha256 or (run_dir / "frozen.sha256").read_text().strip()
        return worker.main(["--frozen", str(run_dir / "frozen.yaml"), "--sha256", sha256])

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)
    os.environ.clear()
    os.environ.update(environment)
