"""The project's tables against the verl that is installed. Runs in verl's environment."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl", reason="not verl's environment: make verl")

from omegaconf import OmegaConf

from pth_exp import schema
from pth_exp.schema import Config, Correction, OldPolicy
from pth_exp.verl_stack import known
from pth_exp.verl_stack.mapping import settings, verl_config
from pth_exp.verl_stack.overrides import FIELDS, FIXED, FREE

CONFIG = Config(
    arm=schema.PpoClipArm("ppo_clip", "ppo_clip", "PPO clip", None, OldPolicy.sampler, Correction.ratio),
    stack=schema.VerlStack("verl", device="cpu"),
    task=schema.ArithmeticTask("arithmetic"),
    model=schema.ModelConfig("embedded", "embedded"),
    seeds=schema.Seeds(data=3, sampling=4, init=5),
)
MODEL = SimpleNamespace(to_dict=lambda: {"attention_dropout": 0.0})


def said(name: str, value: Any) -> list[str]:
    return [str(objection) for objection in known.objections(name, value, f"{name}={value}", lambda: MODEL)]


def test_verl_knows_every_setting_of_the_mapping_and_takes_its_value() -> None:
    """A setting that verl does not know would change nothing, and nobody would hear of it."""
    for name, value in settings(CONFIG).items():
        leaves = value.items() if isinstance(value, dict) else [(None, value)]
        for leaf, inner in leaves:
            full = name if leaf is None else f"{name}.{leaf}"
            if not full.startswith("actor_rollout_ref.") or "mixed_precision" not in full:
                assert not said(full, inner), full


def test_verl_holds_what_the_mapping_asks_for() -> None:
    verl = verl_config(CONFIG)
    for name, value in settings(CONFIG).items():
        held = OmegaConf.select(verl, name)
        assert (OmegaConf.to_container(held) if OmegaConf.is_config(held) else held) == value, name


def test_the_settings_that_may_not_be_changed_are_settings_of_verls() -> None:
    """One that is not would guard nothing: verl has renamed it."""
    for name in (*FIELDS, *FIXED, *FREE):
        objections = said(name, 1)
        assert not any("has no setting" in text for text in objections), objections


@pytest.mark.parametrize(
    ("name", "value", "nearest"),
    [
        ("actor_rollout_ref.rolout.x", 1, "actor_rollout_ref.rollout.n"),
        ("actor_rollout_ref.actor.fsdp_config.param_ofload", True, "actor_rollout_ref.actor.fsdp_config.param_offload"),
        ("actor_rollout_ref.rollout.cudagraph_sizes", [1], "actor_rollout_ref.rollout.cudagraph_capture_sizes"),
        ("actor_rollout_ref.model.override_config.attention_dropot", 0.1, "attention_dropout"),
        ("actor_rollout_ref.rollout.engine_kwargs.vllm.max_num_sqs", 4, "vllm.max_num_seqs"),
        ("actor_rollout_ref.actor.optim.override_optimizer_config.fusedd", True, "override_optimizer_config.fused"),
        ("actor_rollout_ref.actor._target_", "os.system", ""),
        ("actor_rollout_ref.rollout.enforce_eager.x", 1, ""),
    ],
)
def test_an_unknown_setting_is_named_with_the_nearest_known_one(name: str, value: Any, nearest: str) -> None:
    (text,) = said(name, value)
    assert f"verl has no setting {name}" in text and nearest in text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("actor_rollout_ref.rollout.enforce_eager", "maybe"),
        ("actor_rollout_ref.rollout.max_num_batched_tokens", 1.5),
        ("actor_rollout_ref.rollout.load_format", 3),
        ("actor_rollout_ref.actor.checkpoint.save_contents", "model"),
        ("actor_rollout_ref.actor.fsdp_config.fsdp_size", True),
        ("transfer_queue.backend.SimpleStorage.total_storage_size", "many"),
        ("trainer.balance_batch", 1),
    ],
)
def test_a_value_of_another_type_is_refused(name: str, value: Any) -> None:
    (text,) = said(name, value)
    assert "not a value that verl takes" in text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("actor_rollout_ref.rollout.enable_sleep_mode", False),  # known to a dataclass alone
        ("actor_rollout_ref.rollout.gpu_memory_utilization", 1),
        ("actor_rollout_ref.rollout.cudagraph_capture_sizes", [1, 2]),
        ("actor_rollout_ref.actor.optim.betas", [0.9, 0.9]),
        ("actor_rollout_ref.actor.fsdp_config.wrap_policy.min_num_params", 5),
        ("actor_rollout_ref.rollout.engine_kwargs.vllm.block_size", 16),
        ("global_profiler.steps", [1]),
    ],
)
def test_a_value_of_the_type_passes(name: str, value: Any) -> None:
    assert not said(name, value)
