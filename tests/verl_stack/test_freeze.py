"""What real verl makes of a frozen config, and refuses, before any run starts."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from running import pth
from test_mapping import made, mapped

from pth_exp.design import flatten
from pth_exp.launchers.rendering import ask
from pth_exp.schema import Config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

ROLLOUT = "actor_rollout_ref.rollout"
REFUSED = {
    "actor_rollout_ref.rolout.x=1": ("actor_rollout_ref.rolout.x", "actor_rollout_ref.rollout.n"),
    f"{ROLLOUT}.enforce_eager=maybe": ("valid boolean", "False"),
    f"{ROLLOUT}.tensor_model_parallel_size=2": ("1 GPUs (stack.ranks)", "tensor_model_parallel_size"),
    f"{ROLLOUT}.cudagraph_capture_sizes=[1": ("cannot be read", "as in YAML"),
    f"{ROLLOUT}.cudagraph_capture_sizes=${{nowhere}}": ("cannot be read", "nowhere"),
    "actor_rollout_ref.actor.freeze_vision_towr=true": ("has no setting", "freeze_vision_tower"),
}
TAKEN = [f"{ROLLOUT}.enable_prefix_caching=false", f"{ROLLOUT}.engine_kwargs.vllm.block_size=16"]


@pytest.fixture(scope="module")
def rendered(verl_python: Path) -> dict[str, Any]:
    """One call of the renderer, as the launcher makes it: a run without overrides, one with, and some that are refused."""
    cases = {"": [], " ".join(TAKEN): TAKEN, **{text: [text] for text in REFUSED}}
    inputs = {"study": None, "plugins": {}}
    runs = [{"config": plain(made(stack__overrides=given)), "inputs": inputs} for given in cases.values()]
    return dict(zip(cases, ask(verl_python, {"runs": runs})["runs"], strict=True))


def plain(config: Config) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    return values


@pytest.mark.parametrize("override", REFUSED)
def test_verl_refuses_before_anything_starts(override: str, rendered: dict[str, Any]) -> None:
    (objection,) = rendered[override]["objections"]
    assert objection["field"] == "stack.overrides" and objection["value"] == override
    assert all(part in objection["why"] + objection["remedy"] for part in REFUSED[override]), objection


def test_the_file_holds_what_the_mapping_asks_for(rendered: dict[str, Any]) -> None:
    verl = yaml.safe_load(rendered[""]["text"])
    for name, value in mapped().items():
        node = verl
        for part in name.split("."):
            node = node[part]
        assert node == value, name


def test_the_file_names_no_place_of_this_machine(rendered: dict[str, Any]) -> None:
    text = rendered[""]["text"].replace("/tmp/ray/session_latest/", "")  # verl's own, for a service that is off
    here = {"/tmp", str(Path.home()), str(Path(__file__).parents[2]), sys.prefix}
    assert not [place for place in here if place in text]


def test_overrides_arrive_and_nothing_else_changes(rendered: dict[str, Any]) -> None:
    without, given = (flatten(yaml.safe_load(rendered[case]["text"])) for case in ("", " ".join(TAKEN)))
    different = {name: given[name] for name in given if repr(given[name]) != repr(without.get(name))}
    assert different == {f"{ROLLOUT}.enable_prefix_caching": False, f"{ROLLOUT}.engine_kwargs.vllm.block_size": 16}


def test_a_typing_error_stops_a_sweep_through_pth_run(verl_python: Path, tmp_path: Path) -> None:
    """Of three runs one, which is neither the first nor the last."""
    blocks = ["stack=verl arm=grpo", "stack=verl arm=san 'stack.overrides=[\"actor_rollout_ref.rolout.x=1\"]'", "arm=grpo"]
    done = pth(tmp_path, verl_python, "run", f"hydra.sweeper.blocks={json.dumps(blocks)}", "design.gate=label")
    assert done.returncode == 2 and "nothing was started" in done.stderr, done.stdout + done.stderr
    for part in ("arm=san", "stack.overrides=actor_rollout_ref.rolout.x=1", "did you mean actor_rollout_ref.rollout.n?"):
        assert part in done.stderr
    assert not (tmp_path / "multirun_outputs").exists()
