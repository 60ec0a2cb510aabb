"""What verl's built objects hold, read back from them in the terms of the project's config, and of verl's."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, cast

import ray
from omegaconf import OmegaConf

from pth_exp.schema import Advantage, Config, GradNorm, OldPolicy
from pth_exp.tasks.order import PromptOrder
from pth_exp.verl_stack.environment import environment
from pth_exp.verl_stack.vllm_server import Sampling


def whole(trainer: Any) -> dict[str, Any]:
    """verl's config as the trainer holds it, after whatever verl changed in it."""
    return cast(dict[str, Any], OmegaConf.to_container(trainer.config))


def received(config: Config, trainer: Any, places: dict[str, Any]) -> dict[str, Any]:
    """Dotted field of the config to the value that arrived, and some facts besides.

    Among these ``verl``: dotted setting of verl's to what an object has that was built from it. ``places`` are the settings that
    are not in the frozen ``verl.yaml``, as this attempt set them.
    """
    verl, ranks = trainer.config, trainer.actor_rollout_wg.received()
    servers = trainer.llm_server_manager.server_handles
    engines = [worker for server in ray.get([s.on_workers.remote("pth_received") for s in servers]) for worker in server]
    sampling = sorted({way for ways in ray.get([s.sampling.remote() for s in servers]) for way in ways})
    worker = ranks[0]
    generator_seed = trainer.train_dataloader.sampler.generator.initial_seed()
    default_seed = PromptOrder(config.prompts_per_update, config.prompts_per_update, None).generator_seed
    rollout, actor = verl.actor_rollout_ref.rollout, verl.actor_rollout_ref.actor
    bound = worker["held"]["actor_rollout_ref.actor.optim.clip_grad"]
    values = {
        **{name: value for name, value in worker.items() if name not in ("objects", "held", "environment")},
        "arm.old_policy": OldPolicy.sampler if verl.algorithm.rollout_correction.bypass_mode else OldPolicy.recomputed,
        "arm.advantage": Advantage.group_std if verl.algorithm.norm_adv_by_std_in_grpo else Advantage.group_mean,
        "optimizer.grad_norm": GradNorm.clip,  # verl has no other
        "optimizer.max_grad_norm": None if bound == float("inf") else bound,
        "optimizer.steps_per_batch": actor.ppo_epochs,
        "temperature": rollout.temperature,
        "prompts_per_update": verl.data.train_batch_size,
        "responses_per_prompt": rollout.n,
        "max_prompt_tokens": verl.data.max_prompt_length,
        "max_response_tokens": verl.data.max_response_length,
        "model.dtype": rollout.dtype,
        "seeds.data": None if verl.data.seed is None and generator_seed == default_seed else generator_seed,
        "seeds.sampling": engines[0]["held"]["actor_rollout_ref.rollout.seed"],
        "updates": trainer.total_training_steps,
        **_sampled(sampling),
        "objects": {
            **worker["objects"],
            "data_generator_seed": generator_seed,
            "training_problems": len(trainer.train_dataset),
            "evaluation_problems": len(trainer.val_dataset),
            "sampler_servers": len(servers),
            "places": places,
            "sampling": [way._asdict() for way in sampling],
            "verl": {**worker["held"], **engines[0]["held"], **_verls_sampling(sampling)},
            "environment": {
                "driver": environment(),
                **{f"actor {rank}": found["environment"] for rank, found in enumerate(ranks)},
                **{f"vLLM {number}": found["environment"] for number, found in enumerate(engines)},
            },
        },
    }
    return {name: value.value if isinstance(value, StrEnum) else value for name, value in values.items()}


def _training(sampling: list[Sampling]) -> Sampling | None:
    """How training responses were sampled; None before there were any. Raises RuntimeError when not all in one way."""
    ways = [way for way in sampling if way.temperature > 0]
    if len(ways) > 1:
        raise RuntimeError(f"vLLM was told to sample training responses in {len(ways)} ways: {ways}")
    return ways[0] if ways else None


def _sampled(sampling: list[Sampling]) -> dict[str, Any]:
    """In the terms of the project's config."""
    way = _training(sampling)
    return {} if way is None else {"temperature": way.temperature, "max_response_tokens": way.max_tokens}


def _verls_sampling(sampling: list[Sampling]) -> dict[str, Any]:
    """In verl's terms; vLLM writes 0 for all of the vocabulary, verl -1."""
    way = _training(sampling)
    if way is None:
        return {}
    held = {"temperature": way.temperature, "top_p": way.top_p, "top_k": way.top_k or -1}
    return {f"actor_rollout_ref.rollout.{name}": value for name, value in held.items()}
