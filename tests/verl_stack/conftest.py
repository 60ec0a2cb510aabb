"""What the tests of the verl stack share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from allocation import Allocation, over_two_nodes
from cluster import slurm_of_tests
from running import ARMS, SMALL, TWO_RANKS, UPDATES, pth

from pth_exp.interpreters import NoInterpreter, interpreter
from pth_exp.records.reader import RunRecords, Sweep

SHARING = ("test_allocation.py", "test_ranks.py", "test_verl_stack.py")
"""Files whose tests look at the same runs, those of ``sweep`` and ``allocation``."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file's tests, and those of files that share runs, belong to one process: no run is made twice.

    xdist's own groups find none with pytest 9.2, which has its node IDs elsewhere.
    """
    from xdist.scheduler import LoadFileScheduling

    class Sharing(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "sharing" if file.endswith(SHARING) else file

    return Sharing(config, log)


@pytest.fixture(scope="session")
def verl_python() -> Path:
    """The interpreter of verl's environment."""
    try:
        return interpreter("verl", None)
    except NoInterpreter as error:
        if os.environ.get("PTH_TEST_VERL"):  # `make test` has built the environment
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def sweep(verl_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    """Four arms, one after the other, validated between refreshes and on them."""
    folder = tmp_path_factory.mktemp("verl")
    done = pth(folder, verl_python, "run", f"arm={','.join(ARMS)}", *SMALL, f"updates={UPDATES}", "validation.every=2")
    assert done.returncode == 0, done.stdout + done.stderr
    return Sweep.load(folder / "multirun_outputs")


@pytest.fixture(scope="session")
def runs(sweep: Sweep) -> dict[str, RunRecords]:
    """The sweep's runs by arm."""
    return dict(zip(ARMS, sweep.runs, strict=True))


@pytest.fixture(scope="session")
def allocation(verl_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Allocation:
    """The run of two ranks, in a SLURM job of two nodes."""
    with slurm_of_tests() as cluster:
        return over_two_nodes(cluster, verl_python, tmp_path_factory.mktemp("allocation"), *TWO_RANKS)
