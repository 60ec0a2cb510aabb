"""What the tests of the verl stack share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pth_exp.interpreters import NoInterpreter, interpreter


@pytest.fixture(scope="session")
def verl_python() -> Path:
    """The interpreter of verl's environment."""
    try:
        return interpreter("verl", None)
    except NoInterpreter as error:
        if os.environ.get("PTH_TEST_VERL"):  # `make test` has built the environment
            raise
        pytest.skip(str(error))
