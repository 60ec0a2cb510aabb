"""Every rival through the user's path: it trains, check 1 sees its anchor under lag, and all is quiet at age 0."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_through_run import check, outcomes, pth, sentences

from pth_exp.records.reader import RunRecords

pytestmark = pytest.mark.slow

RIVALS = ("tis_seq", "decoupled_ppo", "mis", "mis_seq", "mis_geo", "icepop", "gspo", "cispo", "m2po", "dr_grpo")
RESPONSE = "coef/sampler_response"
SHORT = [
    "updates=4", "prompts_per_update=4", "responses_per_prompt=4", "validation.every=null", "seed=42", "refresh_interval=3",
    "task.train_problems=256", "task.test_problems=16", "stack.checkpoint_every=null",
]  # fmt: skip
"""Updates 0 and 3 have age 0, 1 and 2 a sampler that lags by as much."""


def run(cwd: Path, *overrides: str) -> Path:
    done = pth("run", *SHORT, *overrides, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return (cwd / "multirun_outputs" / "latest").resolve()


@pytest.fixture(scope="module")
def lagged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("rivals"), f"arm={','.join(RIVALS)}")


@pytest.fixture(scope="module")
def responses(lagged: Path) -> dict[str, list[float]]:
    runs = json.loads((lagged / "index.json").read_text())["runs"]
    return {entry["label"]: RunRecords.load(lagged / entry["dir"]).column(RESPONSE) for entry in runs}


def test_check_1_finds_the_anchor_that_each_arm_declares(lagged: Path) -> None:
    _, report = check(lagged)
    found = outcomes(report, "ratio")
    assert found.pop("mis_geo") in ("pass", "warn")  # as many responses as its bounds leave; below they are set
    assert found == {arm: "warn" if arm == "dr_grpo" else "pass" for arm in RIVALS if arm != "mis_geo"}
    assert set(outcomes(report, "config").values()) == set(outcomes(report, "batches").values()) == {"pass"}
    assert "No correction for the sampler's lag" in sentences(report, "dr_grpo", "ratio")


@pytest.mark.parametrize("arm", RIVALS)
def test_at_age_0_nothing_responds_but_rounding(responses: dict[str, list[float]], arm: str) -> None:
    quiet = [responses[arm][update] for update in (0, 3)]
    assert max(quiet) < 1e-4
    if arm in ("mis_geo", "dr_grpo"):
        assert quiet == [0.0, 0.0]


def test_rejection_is_judged_by_what_its_bounds_leave(tmp_path: Path) -> None:
    bounds = '"arm=mis_geo arm.upper=1.02 arm.lower=0.98","arm=mis_geo arm.upper=1.00001 arm.lower=0.99999"'
    sweep = run(tmp_path, f"hydra.sweeper.blocks=[{bounds}]", "design.vary=[arm.upper,arm.lower]")
    _, report = check(sweep)
    (wide, seen), (tight, nothing) = outcomes(report, "ratio").items()
    assert (seen, nothing) == ("pass", "warn")
    assert "Coefficients change where tokens are rejected" in sentences(report, wide, "ratio")
    assert "there the arm trains on nothing" in sentences(report, tight, "ratio")
