"""``probe.shadow_arms`` on the way to a frozen file: resolved in the run's own context, typed, refused where it cannot be had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from sweeping import freeze_sweep, pth

from pth_exp import freeze, schema


def frozen(*overrides: str) -> list[dict[str, Any]]:
    _, jobs = freeze_sweep(*overrides)
    return [yaml.safe_load((job.run_dir / "frozen.yaml").read_text()) for job in jobs]


def test_a_shadow_is_the_arm_that_the_run_would_have(here: Path) -> None:
    """``arm.*`` speaks of the run's own arm; everything else holds for the shadow too."""
    _, jobs = freeze_sweep("arm=tis_ppo", "arm.cap=1.5", "probe.shadow_arms=[tis_reinforce,san]")
    run = freeze.load(jobs[0].run_dir / "frozen.yaml")
    shadows = run.config.probe.shadows
    assert list(shadows) == ["tis_reinforce", "san"]
    assert isinstance(shadows["tis_reinforce"], schema.TisReinforceArm) and isinstance(shadows["san"], schema.SanArm)
    assert shadows["tis_reinforce"].cap == 2.0 and shadows["tis_reinforce"].correction is schema.Correction.weight
    assert isinstance(run.config.arm, schema.TisPpoArm) and run.config.arm.cap == 1.5
    assert run.config_values["probe"]["shadows"]["san"]["loss"] == "san"


def test_values_that_an_arm_takes_from_the_run_are_the_runs(here: Path) -> None:
    (here / "conf" / "arm").mkdir(parents=True)
    (here / "conf" / "arm" / "capped.yaml").write_text(
        "defaults: [/schema/arm/tis_reinforce@_here_, _self_]\n"
        "name: capped\nloss: tis_reinforce\nlabel: capped\nequation: null\ncorrection: weight\ncap: ${max_response_tokens}\n"
    )
    (run,) = frozen("arm=san", "max_response_tokens=7", "probe.shadow_arms=[capped]")
    assert run["config"]["probe"]["shadows"]["capped"]["cap"] == 7.0


def test_the_runs_own_arm_is_no_shadow_of_itself(here: Path) -> None:
    runs = frozen("arm=grpo,san", "probe.shadow_arms=[grpo,san]")
    assert [list(run["config"]["probe"]["shadows"]) for run in runs] == [["san"], ["grpo"]]


def test_identity_and_design_are_blind_to_shadows(here: Path) -> None:
    """They train nothing: the same runs with and without have one identity, and differ in nothing that a design declares."""
    (with_shadow,) = frozen("arm=san", "probe.shadow_arms=[grpo]")
    (without,) = frozen("arm=san")
    assert with_shadow["config_id"] == without["config_id"]
    runs = frozen("arm=grpo,san", "seed=1,2", "probe.shadow_arms=[grpo,san,ppo_clip]")
    assert len({run["config_id"] for run in runs}) == 4


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["probe.shadow_arms=[tis_reinfroce]"], ["probe.shadow_arms=tis_reinfroce", "no such", "did you mean tis_reinforce?"]),
        (["probe.shadow_arms=grpo"], ["probe.shadow_arms=grpo", "no list"]),
        (
            ["probe.shadow_arms=[tis_ppo]", "stack.record_sampler_logp=false"],
            ["probe.shadow_arms=tis_ppo", "stack.record_sampler_logp=true", "leave tis_ppo out"],
        ),
        (["probe.shadows={san: 1}"], ["probe.shadows", "probe.shadow_arms"]),
    ],
)  # fmt: skip
def test_refused(here: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], said: list[str]) -> None:
    code, _, err = pth(capsys, "run", "arm=san", *overrides)
    assert code == 2
    assert all(text in err for text in said), err
    assert not (here / "multirun_outputs").exists()


def test_a_shadow_that_needs_a_reference(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "conf" / "arm").mkdir(parents=True)
    (here / "conf" / "arm" / "referring.yaml").write_text(
        "defaults: [/schema/arm/san@_here_, _self_]\n"
        "name: referring\nloss: san\nlabel: r\nequation: null\ncorrection: none\nneeds_reference: true\n"
    )
    code, _, err = pth(capsys, "run", "arm=san", "kl=none", "model.reference=none", "probe.shadow_arms=[referring]")
    assert code == 2 and "probe.shadow_arms=referring" in err and "set model.reference=initial, or leave referring out" in err
