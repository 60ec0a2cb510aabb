"""What a frozen config becomes in verl's, read off the settings; and the guards around a job. No verl is needed here."""

from __future__ import annotations

import dataclasses
from multiprocessing import shared_memory as segments
from pathlib import Path
from typing import Any

import pytest

from pth_exp import marked, schema
from pth_exp.armfiles import CONF, read_arm
from pth_exp.schema import Aggregation, Correction, OldPolicy
from pth_exp.validity import objections
from pth_exp.verl_stack.host import _device
from pth_exp.verl_stack.mapping import settings

ARM = schema.PpoClipArm("ppo_clip", "ppo_clip", "PPO clip", None, OldPolicy.sampler, Correction.ratio)


def made(arm: schema.Arm = ARM, **changes: Any) -> schema.Config:
    """A run with some fields changed; dots of a nested field are written as ``__``."""
    config = schema.Config(
        arm=arm,
        stack=schema.VerlStack("verl", device="cpu"),
        task=schema.ArithmeticTask("arithmetic"),
        model=schema.ModelConfig("embedded", "embedded"),
        seeds=schema.Seeds(data=3, sampling=4, init=5),
    )
    for path, value in changes.items():
        *parents, name = path.split("__")
        node: Any = config
        for parent in parents:
            node = getattr(node, parent)
        setattr(node, name, value)
    return config


def mapped(arm: schema.Arm = ARM, **changes: Any) -> dict[str, Any]:
    """Its settings."""
    return settings(made(arm, **changes))


@pytest.mark.parametrize(("old_policy", "bypass"), [(OldPolicy.sampler, True), (OldPolicy.recomputed, False)])
def test_the_old_policy_decides_whose_probabilities_verl_hands_out(old_policy: OldPolicy, bypass: bool) -> None:
    found = mapped(dataclasses.replace(ARM, old_policy=old_policy))
    assert found["algorithm.rollout_correction.bypass_mode"] is bypass


def test_one_step_sees_the_whole_batch_and_micro_batches_only_divide_it() -> None:
    whole = mapped(prompts_per_update=6, responses_per_prompt=4)
    assert whole["data.train_batch_size"] == whole["actor_rollout_ref.actor.ppo_mini_batch_size"] == 6
    assert whole["actor_rollout_ref.rollout.n"] == 4
    assert whole["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"] == 24
    parts = mapped(prompts_per_update=6, responses_per_prompt=4, stack__ranks=2, stack__micro_batch_rows=3)
    names = (
        "actor.ppo_micro_batch_size_per_gpu",
        "rollout.log_prob_micro_batch_size_per_gpu",
        "ref.log_prob_micro_batch_size_per_gpu",
    )
    assert {parts[f"actor_rollout_ref.{name}"] for name in names} == {3}
    assert parts["actor_rollout_ref.actor.ppo_mini_batch_size"] == 6 and parts["trainer.n_gpus_per_node"] == 2
    assert mapped(optimizer__steps_per_batch=3)["actor_rollout_ref.actor.ppo_epochs"] == 3


def test_the_penalty_is_the_projects_and_verl_only_computes_the_reference() -> None:
    for changes, reference in (({}, True), ({"kl__coef": 0.0}, False), ({"kl__coef": 0.0, "arm__needs_reference": True}, True)):
        found = mapped(dataclasses.replace(ARM), **changes)
        assert found["actor_rollout_ref.actor.use_kl_loss"] is reference, changes
        assert found["actor_rollout_ref.actor.kl_loss_coef"] == 0 and found["algorithm.use_kl_in_reward"] is False


@pytest.mark.parametrize("changes", [{}, {"stack__micro_batch_rows": 64}, {"stack__ranks": 2}, {"stack__micro_batch_rows": 8}])
@pytest.mark.parametrize(("name", "sum_of_parts"), [("m2po", False), ("mis_geo", False), ("mis", True), ("grpo", True)])
def test_only_a_loss_that_is_a_sum_over_responses_is_handed_parts(name: str, sum_of_parts: bool, changes: dict[str, Any]) -> None:
    arm = read_arm(name, CONF).arm
    divided = bool(changes) and changes != {"stack__micro_batch_rows": 64}  # of 8 x 8 responses
    found = [str(objection) for objection in objections(made(arm, **changes))]
    assert len(found) == (divided and not sum_of_parts), found
    assert all(f"arm {name}" in text and "set stack.ranks=1 and stack.micro_batch_rows=null" in text for text in found)
    # a shadow arm is evaluated on the whole batch, whatever is handed to the arm that trains
    assert not list(objections(made(probe__shadows={name: arm}, **changes)))


def test_a_seed_of_null_stays_null() -> None:
    assert mapped()["data.seed"] == 3 and mapped(seeds__data=None)["data.seed"] is None
    assert mapped()["data.shuffle"] is True


def test_validation_and_its_absence() -> None:
    assert (mapped()["trainer.val_before_train"], mapped()["trainer.test_freq"]) == (True, 10)
    never = mapped(validation__every=None)
    assert (never["trainer.val_before_train"], never["trainer.test_freq"]) == (False, -1)


def test_optimiser() -> None:
    found = mapped(lr=3e-4, optimizer__beta2=0.9, optimizer__eps=1e-6, optimizer__max_grad_norm=None)
    optim = {k.removeprefix("actor_rollout_ref.actor.optim."): v for k, v in found.items() if ".actor.optim." in k}
    assert (optim["lr"], optim["betas"], optim["override_optimizer_config"]) == (3e-4, [0.9, 0.9], {"eps": 1e-6})
    assert optim["clip_grad"] == float("inf") and optim["lr_warmup_steps"] == 0 and optim["lr_scheduler_type"] == "constant"


def test_a_frozen_sampler_never_sleeps_and_records_what_it_samples_from() -> None:
    rollout = {k.removeprefix("actor_rollout_ref.rollout."): v for k, v in mapped(temperature=0.7).items()}
    assert not rollout["free_cache_engine"] and not rollout["enable_sleep_mode"]
    assert rollout["logprobs_mode"] == "processed_logprobs" and rollout["temperature"] == 0.7
    assert (rollout["top_p"], rollout["top_k"]) == (1.0, -1) and rollout["engine_kwargs.vllm"] == {"generation_config": "vllm"}


def test_an_arms_aggregation_is_not_verls_business() -> None:
    found = mapped(dataclasses.replace(ARM, aggregation=Aggregation.seq_mean_token_sum))
    assert not [name for name in found if "loss_agg" in name or "clip_ratio" in name]


def test_another_stack_is_no_verl_stack() -> None:
    with pytest.raises(ValueError, match="this is the stack 'verl'"):
        mapped(stack=schema.TrainerStack("trainer"))


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pth_exp.machine.visible_gpus", lambda: [])
    assert _device("auto") == "cpu"
    with pytest.raises(ValueError, match=r"stack\.device=cuda"):
        _device("cuda")
    assert _device("cuda", on_cluster=True) == "cuda", "the GPUs may be on the cluster's other nodes"
    monkeypatch.setattr("pth_exp.machine.visible_gpus", lambda: ["0"])
    assert _device("auto") == "cuda" and _device("cpu") == "cpu"


def test_segments_of_this_job_are_found_and_removed_and_no_others() -> None:
    mine = segments.SharedMemory(create=True, size=64)
    try:
        path = Path("/dev/shm") / mine.name.lstrip("/")
        assert path in marked.held("PTH_NO_SUCH_VARIABLE", "x")
        marked.remove({path, path.with_name("never-there")})
        assert not path.exists()
    finally:
        mine.close()
        path.touch()  # for the interpreter's own tracker, which unlinks it once more
        mine.unlink()
