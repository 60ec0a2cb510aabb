"""Which of verl's settings a user may change, told without verl."""

from __future__ import annotations

import pytest
from test_mapping import mapped

from pth_exp import schema
from pth_exp.verl_stack.overrides import FIELDS, FIXED, FREE, objections

LEFT_TO_THE_USER = {
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile",
    "actor_rollout_ref.actor.use_torch_compile",
    "actor_rollout_ref.model.enable_gradient_checkpointing",
    "actor_rollout_ref.model.override_config",
    "actor_rollout_ref.model.use_remove_padding",
    "actor_rollout_ref.ref.fsdp_config.use_torch_compile",
    "actor_rollout_ref.ref.use_torch_compile",
    "actor_rollout_ref.rollout.agent.num_workers",
    "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes",
    "actor_rollout_ref.rollout.enforce_eager",
    "actor_rollout_ref.rollout.load_format",
    "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "reward.num_workers",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units",
}
"""Settings of the mapping that change how a run executes, and nothing that the project's config states."""


def refused(*overrides: str) -> list[str]:
    return [str(objection) for objection in objections(overrides)]


def test_no_setting_of_the_mapping_can_be_overridden_unless_it_is_listed() -> None:
    """A setting that the mapping takes from a field would let the frozen config say one thing and the run do another."""
    assert {name for name in mapped() if not refused(f"{name}=1")} == LEFT_TO_THE_USER


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("actor_rollout_ref.actor.optim.lr=1", "lr"),
        ("data.seed=3", "seeds.data"),
        ("actor_rollout_ref.rollout.n=4", "responses_per_prompt"),
        ("actor_rollout_ref.rollout.temperature=0.5", "temperature"),
        ("actor_rollout_ref.actor.optim.override_optimizer_config.eps=1e-3", "optimizer.eps"),
        ("actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=bf16", "model.dtype"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=gspo", "arm"),
        ("actor_rollout_ref.actor.kl_loss_coef=0.1", "kl.coef"),
        ("actor_rollout_ref.rollout.engine_kwargs.vllm.seed=1", "seeds.sampling"),
        ("trainer.n_gpus_per_node=2", "stack.ranks"),
    ],
)
def test_a_setting_with_a_field_of_the_projects_is_refused_with_that_field(override: str, field: str) -> None:
    (said,) = refused(override)
    assert said.startswith(f"stack.overrides={override}") and f"set {field} instead" in said


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("algorithm.rollout_correction.rollout_is=token", "reads no weight of verl's"),
        ("algorithm.rollout_correction.rollout_rs=token", "reads no weight of verl's"),
        ("algorithm.rollout_correction.bypass_mode=true", "reads no weight of verl's"),
        ("algorithm.use_kl_in_reward=true", "count twice"),
        ("algorithm.filter_groups.enable=true", "prompts that were drawn"),
        ("actor_rollout_ref.actor.entropy_coeff=0.1", "do not read it"),
        ("actor_rollout_ref.rollout.top_p=0.9", "at a temperature, and nothing else"),
        ("actor_rollout_ref.rollout.repetition_penalty=1.1", "at a temperature, and nothing else"),
        ("actor_rollout_ref.rollout.free_cache_engine=true", "must stay"),
        ("actor_rollout_ref.rollout.full_determinism=true", "the same random stream"),
        ("actor_rollout_ref.model.lora_rank=8", "whole"),
        ("critic.optim.lr=1", "no critic"),
        ("actor_rollout_ref.actor.checkpoint.save_contents=[model]", "a resumed run depends on all"),
        ("trainer.logger=[wandb]", "records"),
    ],
)
def test_what_the_projects_loss_would_ignore_or_double_is_refused_with_the_reason(override: str, why: str) -> None:
    (said,) = refused(override)
    assert why in said


def test_the_longest_name_decides_and_the_rest_is_verls_business() -> None:
    assert refused("trainer.resume_mode=auto") and not refused("trainer.balance_batch=false")
    assert refused("actor_rollout_ref.actor.optim.optimizer=SGD")
    assert not refused("actor_rollout_ref.actor.optim.override_optimizer_config.fused=true")
    assert not refused("actor_rollout_ref.actor.fsdp_config.param_offload=true", "global_profiler.steps=[1]")


def test_a_branch_cannot_be_set_at_once_nor_a_setting_twice() -> None:
    for text in ("actor_rollout_ref.rollout={n: 3}", "actor_rollout_ref.rollout=null", "actor_rollout_ref=null"):
        assert "at once" in refused(text)[0]
    assert "given twice" in refused("global_profiler.steps=[1]", "global_profiler.steps=[2]")[0]
    for text in ("trainer", "=1", "+a.b=1", "~a.b=1"):
        assert "name=value" in refused(text)[0]


def test_the_fields_named_are_fields() -> None:
    known = set(schema.field_table()) | {"arm", "kl", "task", "validation", "stack", "optimizer", "the sizes"}
    named = {part for text in FIELDS.values() for part in text.replace(" and ", ", ").split(", ")}
    assert named <= known, named - known


def test_no_entry_stands_in_two_tables() -> None:
    assert not set(FIELDS) & set(FREE) and not set(FIXED) & set(FREE)
    assert set(FIELDS) & set(FIXED) == set()
