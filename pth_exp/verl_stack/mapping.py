"""What each field of a frozen config becomes in verl's config: the one place where the two meet.

verl composes its own defaults; the settings here go on top, and ``stack.overrides`` last. The result is frozen as ``verl.yaml``
beside ``frozen.yaml``, and the job loads that. What an attempt alone can tell, it sets in named places
(`pth_exp.verl_stack.places`). The arm's loss, the penalty and the rewards are not in it: the stack hands verl the project's own
(`pth_exp.verl_stack.loss`, `pth_exp.verl_stack.rollout`).
"""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

from pth_exp.schema import Advantage, Config, OldPolicy
from pth_exp.verl_stack.frozen import verl_stack

_DTYPES = {"float32": "fp32", "bfloat16": "bf16"}


def needs_reference(config: Config) -> bool:
    """Whether anything reads the reference policy's log-probabilities."""
    arms = [config.arm, *config.probe.shadows.values()]
    return config.kl.coef != 0 or any(arm.needs_reference for arm in arms)


def settings(config: Config) -> dict[str, Any]:
    """Dotted names of verl's config to values; ``stack.device`` is cpu or cuda by now."""
    stack = verl_stack(config)
    device = stack.device
    rows = config.prompts_per_update * config.responses_per_prompt // stack.ranks
    micro = min(stack.micro_batch_rows or rows, rows)
    dtype, every = _DTYPES[config.model.dtype], config.validation.every
    precision = {"param_dtype": dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    engine = {
        "strategy": "fsdp2",
        "fsdp_config.strategy": "fsdp2",
        "fsdp_config.model_dtype": "fp32",  # masters; the forward pass is in model.dtype
        "fsdp_config.mixed_precision": precision,
        "fsdp_config.use_torch_compile": False,
    }
    actor = {
        **engine,
        "use_torch_compile": False,
        "ppo_mini_batch_size": config.prompts_per_update,  # one step sees the whole batch
        "ppo_epochs": config.optimizer.steps_per_batch,
        "ppo_micro_batch_size_per_gpu": micro,
        "use_dynamic_bsz": False,
        "shuffle": False,
        # makes verl compute the reference's log-probabilities; the penalty itself is in the project's loss
        "use_kl_loss": needs_reference(config),
        "kl_loss_coef": 0.0,
        "entropy_coeff": 0,
        "grad_clip": _bound(config),
        "optim.clip_grad": _bound(config),
        "optim.lr": config.lr,
        "optim.lr_scheduler_type": "constant",
        "optim.lr_warmup_steps": 0,
        "optim.betas": [config.optimizer.beta1, config.optimizer.beta2],
        "optim.weight_decay": config.optimizer.weight_decay,
        "optim.override_optimizer_config": {"eps": config.optimizer.eps},
    }
    rollout = {
        "name": "vllm",
        "mode": "async",
        "n": config.responses_per_prompt,
        "temperature": config.temperature,
        "top_p": 1.0,
        "top_k": -1,
        "val_kwargs.temperature": 0,
        "val_kwargs.n": 1,
        "calculate_log_probs": stack.record_sampler_logp,
        "logprobs_mode": "processed_logprobs",  # of the distribution that is sampled from: temperature included
        "dtype": config.model.dtype.value,
        "seed": config.seeds.sampling,  # every request has a seed of its own besides
        "tensor_model_parallel_size": 1,
        "load_format": "auto",
        "enforce_eager": True,
        # a frozen sampler keeps its weights: sleeping would throw them away until the next transfer
        "free_cache_engine": False,
        "enable_sleep_mode": False,
        "gpu_memory_utilization": stack.gpu_memory,
        "max_model_len": config.max_prompt_tokens + config.max_response_tokens,
        "max_num_seqs": stack.sampler_rows,
        "log_prob_micro_batch_size_per_gpu": micro,
        "log_prob_use_dynamic_bsz": False,
        "checkpoint_engine.update_weights_bucket_megabytes": 1024 if device == "cpu" else 2048,
        "engine_kwargs.vllm": {"generation_config": "vllm"},  # the model's own top-p, top-k and penalties are not read
        "agent.num_workers": 1,
        "agent.default_agent_loop": "pth",
    }
    return {
        "data.train_files": "train",
        "data.val_files": "test",
        "data.custom_cls.path": "pkg://pth_exp.verl_stack.data",
        "data.custom_cls.name": "ProblemDataset",
        "data.train_batch_size": config.prompts_per_update,
        "data.max_prompt_length": config.max_prompt_tokens,
        "data.max_response_length": config.max_response_tokens,
        "data.shuffle": True,
        "data.seed": config.seeds.data,  # null leaves verl's generator at torch's default seed
        "data.validation_shuffle": False,
        "data.dataloader_num_workers": 0,
        "algorithm.adv_estimator": "grpo",
        "algorithm.norm_adv_by_std_in_grpo": config.arm.advantage is Advantage.group_std,
        "algorithm.use_kl_in_reward": False,
        # whose log-probabilities are old_log_probs: the sampler's (bypass), or the learner's, recomputed
        "algorithm.rollout_correction.bypass_mode": config.arm.old_policy is OldPolicy.sampler,
        "critic.enable": False,
        "actor_rollout_ref.model.path": config.model.path,
        "actor_rollout_ref.model.trust_remote_code": False,
        "actor_rollout_ref.model.use_remove_padding": False,
        "actor_rollout_ref.model.enable_gradient_checkpointing": device != "cpu",
        "actor_rollout_ref.model.override_config": {"attn_implementation": "sdpa"},
        **{f"actor_rollout_ref.actor.{name}": value for name, value in actor.items()},
        **{f"actor_rollout_ref.ref.{name}": value for name, value in engine.items()},
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": micro,
        "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": False,
        "actor_rollout_ref.ref.use_torch_compile": False,
        **{f"actor_rollout_ref.rollout.{name}": value for name, value in rollout.items()},
        "reward.num_workers": 1,
        # what verl's trainer would set by itself, so that the job holds nothing that was not frozen
        "actor_rollout_ref.actor.optim.total_training_steps": config.updates,
        "critic.optim.total_training_steps": config.updates,
        "reward.reward_model.nnodes": 1,
        "reward.reward_model.n_gpus_per_node": stack.ranks,
        "trainer.use_v1": True,
        "trainer.v1.trainer_mode": "sync",
        "trainer.v1.sampler.max_off_policy_threshold": None,  # age is this study's subject
        "trainer.device": device,
        "trainer.nnodes": 1,
        "trainer.n_gpus_per_node": stack.ranks,
        "trainer.logger": [],
        "trainer.total_epochs": config.updates + 1,
        "trainer.total_training_steps": config.updates,
        "trainer.val_before_train": every is not None,
        "trainer.test_freq": -1 if every is None else every,
        "trainer.save_freq": -1,
        "trainer.resume_mode": "disable",
        "transfer_queue.enable": True,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
    }


def verl_config(config: Config) -> DictConfig:
    """verl's defaults, the settings, and ``stack.overrides`` on top, resolved. Needs verl's tree, not verl."""
    from pth_exp.verl_stack.known import defaults

    composed = defaults().copy()
    for name, value in settings(config).items():
        OmegaConf.update(composed, name, value, force_add=True, merge=False)
    OmegaConf.set_struct(composed, False)
    overridden = OmegaConf.merge(composed, OmegaConf.from_dotlist(verl_stack(config).overrides))
    assert isinstance(overridden, DictConfig)
    OmegaConf.resolve(overridden)
    return overridden


def _bound(config: Config) -> float:
    """verl always clips; no clip is a bound that nothing exceeds."""
    return float("inf") if config.optimizer.max_grad_norm is None else config.optimizer.max_grad_norm
