"""What verl's built objects hold, read back from them in the terms of the project's config."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, cast

from omegaconf import OmegaConf

from pth_exp.schema import Advantage, Config, GradNorm, OldPolicy
from pth_exp.tasks.order import PromptOrder


def whole(trainer: Any) -> dict[str, Any]:
    """verl's config as the trainer holds it, after whatever verl changed in it."""
    return cast(dict[str, Any], OmegaConf.to_container(trainer.config))


def received(config: Config, trainer: Any, places: dict[str, Any]) -> dict[str, Any]:
    """Dotted field of the config to the value that arrived, and some facts besides.

    ``places`` are the settings that are not in the frozen ``verl.yaml``, as this attempt set them.
    """
    verl, worker = trainer.config, trainer.actor_rollout_wg.received()[0]
    generator_seed = trainer.train_dataloader.sampler.generator.initial_seed()
    default_seed = PromptOrder(config.prompts_per_update, config.prompts_per_update, None).generator_seed
    rollout, actor = verl.actor_rollout_ref.rollout, verl.actor_rollout_ref.actor
    values = {
        **{name: value for name, value in worker.items() if name != "objects"},
        "arm.old_policy": OldPolicy.sampler if verl.algorithm.rollout_correction.bypass_mode else OldPolicy.recomputed,
        "arm.advantage": Advantage.group_std if verl.algorithm.norm_adv_by_std_in_grpo else Advantage.group_mean,
        "optimizer.grad_norm": GradNorm.clip,  # verl has no other
        "optimizer.max_grad_norm": None if actor.optim.clip_grad == float("inf") else actor.optim.clip_grad,
        "optimizer.steps_per_batch": actor.ppo_epochs,
        "temperature": rollout.temperature,
        "prompts_per_update": verl.data.train_batch_size,
        "responses_per_prompt": rollout.n,
        "max_prompt_tokens": verl.data.max_prompt_length,
        "max_response_tokens": verl.data.max_response_length,
        "model.dtype": rollout.dtype,
        "seeds.data": None if verl.data.seed is None and generator_seed == default_seed else generator_seed,
        "updates": trainer.total_training_steps,
        "objects": {
            **worker["objects"],
            "data_generator_seed": generator_seed,
            "training_problems": len(trainer.train_dataset),
            "evaluation_problems": len(trainer.val_dataset),
            "sampler_servers": len(trainer.llm_server_manager.server_handles),
            "places": places,
        },
    }
    return {name: value.value if isinstance(value, StrEnum) else value for name, value in values.items()}
