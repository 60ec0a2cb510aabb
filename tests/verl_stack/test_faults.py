"""The fault that matters most, on a real verl job of a Ray head that the launcher owns. All of them: faults.py."""

from __future__ import annotations

import os
from pathlib import Path

import faults
import pytest

from pth_exp.interpreters import NoInterpreter, interpreter

pytest.importorskip("ray", reason="pip install 'pth-exp[ray]'")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]


@pytest.mark.skipif(os.environ.get("PTH_TEST_FAULTS") != "1", reason="PTH_TEST_FAULTS=1: four minutes, as faults.py has more of")
def test_a_fault_ends_in_a_state_with_its_reason(tmp_path: Path) -> None:
    """And harms no other run, and leaves no process."""
    try:
        interpreter("verl", None)
    except NoInterpreter as error:
        if os.environ.get("PTH_TEST_VERL"):  # `make test` has built the environment
            raise
        pytest.skip(str(error))
    outcome = faults.run("ray_learner_killed", tmp_path)
    assert not outcome.wrong, outcome
