"""Which variables of a process go on record."""

from __future__ import annotations

import pytest

from pth_exp.launchers.secrets import looks_secret
from pth_exp.verl_stack.environment import ALLOWED, environment


def test_only_what_is_listed_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_TOKEN", "VLLM_API_KEY", "PTH_SOMETHING", "VERL_SOMETHING", "HF_TOKEN"):
        monkeypatch.setenv(name, "do not tell")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    found = environment()
    assert found["OMP_NUM_THREADS"] == "3" and "VERL_PLATFORM" not in found and "do not tell" not in found.values()


def test_nothing_that_is_listed_looks_like_a_secret() -> None:
    assert not [name for name in ALLOWED if looks_secret(name)] and len(set(ALLOWED)) == len(ALLOWED)
