"""Check 2 on verl, on records that are whole and on doctored ones."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import sweeps
import yaml

from pth_exp.checks import config as check_config
from pth_exp.checks.result import Outcome, Verdict
from pth_exp.records.reader import Sweep

ASKED = {
    "actor": {"optim": {"lr": 2e-6, "betas": [0.9, 0.999], "clip_grad": float("inf")}, "path": "a/hub-name"},
    "rollout": {"top_p": 1.0, "engine_kwargs": {}},
    "none": None,
}
PLACES = {"actor.path": "/models/here"}
BUILT = {"actor.optim.clip_grad": float("inf"), "rollout.top_p": 1.0, "actor.optim.betas": [0.9, 0.999]}


def verl_run(root: Path) -> Path:
    """The only run of a sweep, with files as the verl stack leaves them."""
    sweeps.make(root, {"grpo": sweeps.config("grpo")})
    (run,) = root.glob("0*")
    (run / "verl.yaml").write_text(yaml.safe_dump(ASKED))
    frozen = yaml.safe_load((run / "frozen.yaml").read_text())
    text = yaml.safe_dump(frozen | {"files": {"verl.yaml": sha256((run / "verl.yaml").read_bytes())}}, sort_keys=False)
    (run / "frozen.yaml").write_text(text)
    index = json.loads((root / "index.json").read_text())
    index["runs"][0]["frozen_sha256"] = sha256(text.encode())
    (root / "index.json").write_text(json.dumps(index))
    hold(run)
    told(run)
    return run


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def hold(run: Path, **changes: Any) -> None:
    """What verl's config is in the job; changes by dotted name, with ``__`` for the dots."""
    held = json.loads(json.dumps(ASKED))
    for name, value in ({"actor__path": "/models/here"} | changes).items():
        *groups, leaf = name.split("__")
        node = held
        for group in groups:
            node = node[group]
        node[leaf] = value
    (run / "received_verl.yaml").write_text(yaml.safe_dump(held))


def told(run: Path, **objects: Any) -> None:
    received = yaml.safe_load((run / "received.yaml").read_text())
    received["objects"] |= {"places": PLACES, "verl": BUILT, "source": "5" * 64} | objects
    (run / "received.yaml").write_text(yaml.safe_dump(received))


def judge(run: Path) -> Verdict:
    (verdict,) = check_config.check(Sweep.load(run.parent))
    return verdict


def test_what_is_held_as_frozen_passes(tmp_path: Path) -> None:
    assert judge(verl_run(tmp_path / "s")).outcome == "pass"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"actor__optim__lr": 1e-6}, "actor.optim.lr"),
        ({"rollout__top_p": 0.9}, "rollout.top_p"),
        ({"none": 3}, "none"),
        ({"more": 3}, "more"),
        ({"rollout": {"engine_kwargs": {}}}, "rollout.top_p"),
        ({"rollout__engine_kwargs": {"vllm": {"seed": 3}}}, "rollout.engine_kwargs"),
        ({"actor__path": "/models/elsewhere"}, "actor.path"),
    ],
)
def test_a_setting_that_verl_does_not_hold_fails(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    run = verl_run(tmp_path / "s")
    hold(run, **changes)
    verdict = judge(run)
    assert verdict.outcome == "fail" and named in verdict.number and "verl's config in the job has" in verdict.reason


@pytest.mark.parametrize(
    "built", [{"rollout.top_p": 0.9}, {"actor.optim.clip_grad": 1.0}, {"actor.optim.betas": [0.9, 0.99]}, {"actor.optim.lr": 1.0}]
)
def test_an_object_that_holds_another_value_fails_though_the_config_agrees(built: dict[str, Any], tmp_path: Path) -> None:
    run = verl_run(tmp_path / "s")
    told(run, verl=BUILT | built)
    verdict = judge(run)
    assert verdict.outcome == "fail" and next(iter(built)) in verdict.number and "what verl built" in verdict.reason


def test_other_source_in_the_actors_process_fails(tmp_path: Path) -> None:
    run = verl_run(tmp_path / "s")
    told(run, source="6" * 64)
    assert judge(run).number == "source differs"


def test_an_edited_file_fails_and_a_missing_one_is_no_pass(tmp_path: Path) -> None:
    run = verl_run(tmp_path / "s")
    (run / "received_verl.yaml").unlink()
    verdict = judge(run)
    assert verdict.outcome == "not measured" and verdict.number == "no received_verl.yaml"
    hold(run)
    (run / "verl.yaml").write_text(yaml.safe_dump(ASKED) + "\n")
    assert judge(run).number == "verl.yaml edited"
    (run / "verl.yaml").unlink()
    assert judge(run).number == "verl.yaml edited" and "gone" in judge(run).reason


@pytest.mark.parametrize("name", ["verl", "source"])
def test_what_was_built_is_not_taken_on_trust(tmp_path: Path, name: str) -> None:
    run = verl_run(tmp_path / "sweep")
    received = yaml.safe_load((run / "received.yaml").read_text())
    del received["objects"][name]
    (run / "received.yaml").write_text(yaml.safe_dump(received))
    verdict = judge(run)
    assert (verdict.outcome, verdict.number) == (Outcome.not_measured, f"no objects.{name} in received.yaml")
