"""What ``stack.overrides`` may change of verl's settings, and what it may not, with the reason.

A setting that a field of the project's decides is refused with that field: after an override of it the frozen config would say
one thing and the run do another, and two runs could be told apart by nothing but a line of text. So is a setting that nothing
reads here, since the project has its own loss, penalty, rewards, data, records and start: verl would take it without a word. What
is left is how verl executes a run. Needs neither verl nor torch, so that a sweep is refused wherever it is composed; whether verl
knows a setting, and which values it takes, its own environment says (`pth_exp.verl_stack.render`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pth_exp.refusal import Objection

FIELD = "stack.overrides"

_ACTOR, _REF, _ROLLOUT, _MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "ref", "rollout", "model"))


def _in(branch: str, settings: Mapping[str, str]) -> dict[str, str]:
    return {f"{branch}.{name}": value for name, value in settings.items()}


_BATCHING = (
    *("ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu", "ppo_infer_micro_batch_size_per_gpu"),
    *("use_dynamic_bsz", "ppo_max_token_len_per_gpu", "ppo_infer_max_token_len_per_gpu"),
)
_LOG_PROB_BATCHING = tuple(
    f"log_prob_{name}" for name in ("micro_batch_size", "micro_batch_size_per_gpu", "use_dynamic_bsz", "max_token_len_per_gpu")
)

FIELDS: dict[str, str] = {
    "algorithm": "arm and kl",
    "algorithm.adv_estimator": "arm.advantage",
    "algorithm.norm_adv_by_std_in_grpo": "arm.advantage",
    "data": "task, seeds.data and the sizes",
    "data.train_batch_size": "prompts_per_update",
    "data.gen_batch_size": "prompts_per_update",
    "data.max_prompt_length": "max_prompt_tokens",
    "data.max_response_length": "max_response_tokens",
    "data.seed": "seeds.data",
    "data.shuffle": "seeds.data",
    "trainer": "updates, validation, stack",
    "trainer.total_epochs": "updates",
    "trainer.total_training_steps": "updates",
    "trainer.test_freq": "validation.every",
    "trainer.val_before_train": "validation.every",
    "trainer.n_gpus_per_node": "stack.ranks",
    "trainer.nnodes": "stack.ranks",
    "trainer.device": "stack.device",
    "trainer.save_freq": "stack.checkpoint_every",
    "trainer.max_actor_ckpt_to_keep": "stack.keep_checkpoints",
    "ray_kwargs": "stack.ray_address",
    **_in(_ACTOR, {
        "ppo_mini_batch_size": "optimizer.steps_per_batch",
        "ppo_epochs": "optimizer.steps_per_batch",
        **dict.fromkeys(_BATCHING, "stack.micro_batch_rows"),
        "grad_clip": "optimizer.max_grad_norm",
        "optim": "optimizer",
        "optim.lr": "lr",
        "optim.clip_grad": "optimizer.max_grad_norm",
        "optim.weight_decay": "optimizer.weight_decay",
        "optim.betas": "optimizer.beta1 and optimizer.beta2",
        "optim.override_optimizer_config.eps": "optimizer.eps",
        "fsdp_config.model_dtype": "model.dtype",
        "fsdp_config.dtype": "model.dtype",
        "fsdp_config.mixed_precision": "model.dtype",
        "fsdp_config.seed": "seeds.init",
        "policy_loss": "arm",
        "loss_agg_mode": "arm.aggregation",
        "loss_scale_factor": "arm.norm_tokens",
        "clip_ratio": "arm.clip_low and arm.clip_high",
        "clip_ratio_low": "arm.clip_low",
        "clip_ratio_high": "arm.clip_high",
        "clip_ratio_c": "arm.dual_clip",
        "use_kl_loss": "kl.coef",
        "kl_loss_coef": "kl.coef",
        "kl_loss_type": "kl.estimator",
        "rollout_n": "responses_per_prompt",
    }),
    **_in(_REF, {
        "rollout_n": "responses_per_prompt",
        **dict.fromkeys(_LOG_PROB_BATCHING, "stack.micro_batch_rows"),
        "fsdp_config.model_dtype": "model.dtype",
        "fsdp_config.dtype": "model.dtype",
        "fsdp_config.mixed_precision": "model.dtype",
        "fsdp_config.seed": "seeds.init",
    }),
    **_in(_ROLLOUT, {
        "n": "responses_per_prompt",
        "temperature": "temperature",
        "prompt_length": "max_prompt_tokens",
        "response_length": "max_response_tokens",
        "max_model_len": "max_prompt_tokens and max_response_tokens",
        "max_num_seqs": "stack.sampler_rows",
        "gpu_memory_utilization": "stack.gpu_memory",
        "dtype": "model.dtype",
        "seed": "seeds.sampling",
        "calculate_log_probs": "stack.record_sampler_logp",
        "n_gpus_per_node": "stack.ranks",
        "engine_kwargs.vllm.seed": "seeds.sampling",
        "engine_kwargs.vllm.dtype": "model.dtype",
        "engine_kwargs.vllm.model": "model.path",
        "engine_kwargs.vllm.tokenizer": "model.path",
        "engine_kwargs.vllm.max_model_len": "max_prompt_tokens and max_response_tokens",
        "engine_kwargs.vllm.max_num_seqs": "stack.sampler_rows",
        "engine_kwargs.vllm.gpu_memory_utilization": "stack.gpu_memory",
        **dict.fromkeys(_LOG_PROB_BATCHING, "stack.micro_batch_rows"),
    }),
    **_in(_MODEL, {
        "path": "model.path",
        "hf_config_path": "model.path",
        "tokenizer_path": "model.path",
        "custom_chat_template": "task.chat_template",
    }),
}  # fmt: skip
"""verl's setting, or branch of settings, to the project's field that decides it."""

_FROM_MODEL = "verl takes it from actor_rollout_ref.model"
_ENGINE = {
    "strategy": "the stack trains with FSDP2",
    "fsdp_config.strategy": "the stack trains with FSDP2",
    "fsdp_config.turbo_config": "the stack trains with FSDP2, which does not read it",
    "fsdp_config.use_orig_params": "the stack trains with FSDP2, which does not read it",
    "fsdp_config.full_determinism": "it would give every response the same random stream",
    "fsdp_config.qat": "weights are transferred and fingerprinted whole",
    "fsdp_config.router_replay": "nothing is replayed",
    **dict.fromkeys(("fsdp_config.use_remove_padding", "fsdp_config.use_fused_kernels"), _FROM_MODEL),
    **dict.fromkeys(
        (f"fsdp_config.{name}" for name in ("use_dynamic_bsz", "max_token_len_per_gpu", "micro_batch_size_per_gpu",
         "infer_max_token_len_per_gpu", "infer_micro_batch_size_per_gpu")), "verl fills it in"
    ),
    **dict.fromkeys(
        (f"{engine}entropy_{name}" for engine in ("", "fsdp_config.")
         for name in ("from_logits_with_chunking", "from_logits_chunk_size", "checkpointing")),
        "no entropy is computed",
    ),
}  # fmt: skip
_OWN_LOSS = "the arm's own loss and penalty train, and do not read it"
_WHOLE_WEIGHTS = "weights are transferred and fingerprinted whole"
_TEMPERATURE_ALONE = "log q is recorded for sampling at a temperature, and nothing else"
_STAYS = "a frozen sampler's weights must stay where they are"

FIXED: dict[str, str] = {
    "model_engine": "the stack trains with FSDP2",
    "critic": "advantages are those of groups; there is no critic",
    "distillation": "there is no teacher",
    "reward": "the task scores responses",
    "reward_model": "the task scores responses",
    "custom_reward_function": "the task scores responses",
    "sandbox_fusion": "the task scores responses",
    "skip": "a run samples its own responses",
    "trainer.logger": "the project's records are written in place of verl's metrics",
    "trainer.project_name": "the project's records are written in place of verl's metrics",
    "trainer.experiment_name": "the project's records are written in place of verl's metrics",
    "trainer.v1": "the stack brings its own trainer",
    "trainer.use_v1": "the stack brings its own trainer",
    "algorithm.rollout_correction": "the arm corrects for the sampler; its loss reads no weight of verl's, and a mask of verl's "
    "would change its batch unseen",
    "algorithm.use_kl_in_reward": "the penalty stands in the loss; in the reward as well it would count twice",
    "algorithm.kl_ctrl": "the penalty stands in the loss",
    "algorithm.kl_penalty": "the penalty stands in the loss",
    "algorithm.filter_groups": "an update trains on the prompts that were drawn for it",
    "algorithm.use_pf_ppo": "an update trains on the responses that were drawn for it",
    "algorithm.pf_ppo": "an update trains on the responses that were drawn for it",
    "actor_rollout_ref.hybrid_engine": "learner and sampler share their GPUs",
    "transfer_queue.enable": "verl's trainer needs its queue",
    **_in(_ACTOR, {
        **_ENGINE,
        "fsdp_config.forward_only": "the learner trains",
        "use_remove_padding": _FROM_MODEL,
        "use_fused_kernels": _FROM_MODEL,
        "qat": _WHOLE_WEIGHTS,
        "checkpoint": "a resumed run depends on all that the stack's checkpoints hold",
        "shuffle": "rows are sorted, so that identical runs have identical mini-batches",
        "data_loader_seed": "rows are sorted, so that identical runs have identical mini-batches",
        "entropy_coeff": _OWN_LOSS,
        "calculate_entropy": "the project's records do not hold it",
        "calculate_sum_pi_squared": "the project's records do not hold it",
        "tau_pos": _OWN_LOSS,
        "tau_neg": _OWN_LOSS,
        "use_rollout_log_probs": _OWN_LOSS,
        "global_batch_info": "verl fills it in",
        "engine": "verl fills it in",
        "model_config": "verl fills it in",
        "optim.lr_scheduler_type": "the learning rate is constant",
        "optim.lr_warmup_steps": "the learning rate is constant",
        "optim.lr_warmup_steps_ratio": "the learning rate is constant",
        "optim.min_lr_ratio": "the learning rate is constant",
        "optim.num_cycles": "the learning rate is constant",
        "optim.warmup_style": "the learning rate is constant",
        "optim.zero_indexed_step": "the learning rate is constant",
    }),
    **_in(_REF, {
        **_ENGINE,
        "fsdp_config.forward_only": "the reference does not train",
    }),
    **_in(_ROLLOUT, {
        "name": "the sampler is vLLM",
        "mode": "the sampler is vLLM's server",
        "top_p": _TEMPERATURE_ALONE,
        "top_k": _TEMPERATURE_ALONE,
        "do_sample": _TEMPERATURE_ALONE,
        "repetition_penalty": _TEMPERATURE_ALONE,
        "ignore_eos": "a response ends where its end token stands",
        "logprobs_mode": _TEMPERATURE_ALONE,
        "engine_kwargs.vllm.generation_config": _TEMPERATURE_ALONE,
        "engine_kwargs.vllm.override_generation_config": _TEMPERATURE_ALONE,
        "engine_kwargs.vllm.logprobs_mode": _TEMPERATURE_ALONE,
        "engine_kwargs.vllm.logits_processors": _TEMPERATURE_ALONE,
        "engine_kwargs.vllm.enable_sleep_mode": _STAYS,
        "engine_kwargs.vllm.enable_lora": _WHOLE_WEIGHTS,
        "engine_kwargs.vllm.quantization": _WHOLE_WEIGHTS,
        "engine_kwargs.vllm.hf_overrides": _WHOLE_WEIGHTS,
        "engine_kwargs.vllm.worker_cls": "the stack looks at the weights through its own extension",
        "engine_kwargs.vllm.worker_extension_cls": "the stack looks at the weights through its own extension",
        "engine_kwargs.vllm.trust_remote_code": "no hash covers code out of a model's repository",
        "engine_kwargs.sglang": "the sampler is vLLM, which does not read it",
        "engine_kwargs.trtllm": "the sampler is vLLM, which does not read it",
        "server": "the sampler is vLLM, which does not read it",
        "sglang_engine_mode": "the sampler is vLLM, which does not read it",
        "over_sample_rate": "the sampler is vLLM, which does not read it",
        "moe_tensor_parallel_size": "the sampler is vLLM, which does not read it",
        "full_determinism": "it would give every response the same random stream",
        "val_kwargs": "validation is greedy, one response a problem",
        "free_cache_engine": _STAYS,
        "enable_sleep_mode": _STAYS,
        "agent.default_agent_loop": "the project renders prompts, seeds requests and scores responses",
        "agent.agent_loop_config_path": "the project renders prompts, seeds requests and scores responses",
        "agent.agent_loop_manager_class": "the project renders prompts, seeds requests and scores responses",
        "agent.custom_async_server": "the stack brings its own server",
        "multi_turn": "a response is one turn",
        "checkpoint_engine.backend": "verl's trainer sets it",
        "checkpoint_engine.engine_kwargs": "the backend that verl's trainer sets takes none",
        "checkpoint_engine.custom_backend_module": "the backend is the one that verl's trainer sets",
        "checkpoint_manager_class": "the stack transfers weights itself",
        "custom": "nothing reads it",
        "disaggregation": "the stack's servers sample whole responses",
        "nnodes": "learner and sampler share their GPUs",
        "mtp": _WHOLE_WEIGHTS,
        "qat": _WHOLE_WEIGHTS,
        "quantization": _WHOLE_WEIGHTS,
        "quantization_config_file": _WHOLE_WEIGHTS,
    }),
    **_in(_MODEL, {
        "trust_remote_code": "no hash covers code out of a model's repository",
        "external_lib": "no hash covers it; a study's code is my_losses.py",
        "lora": _WHOLE_WEIGHTS,
        "lora_rank": _WHOLE_WEIGHTS,
        "lora_alpha": _WHOLE_WEIGHTS,
        "lora_adapter_path": _WHOLE_WEIGHTS,
        "target_modules": _WHOLE_WEIGHTS,
        "target_parameters": _WHOLE_WEIGHTS,
        "exclude_modules": _WHOLE_WEIGHTS,
        "mtp": _WHOLE_WEIGHTS,
        **dict.fromkeys(
            ("local_path", "local_hf_config_path", "local_tokenizer_path", "hf_config", "generation_config", "tokenizer",
             "processor", "architectures", "model_type", "load_tokenizer"), "verl fills it in"
        ),
    }),
}  # fmt: skip
"""verl's setting, or branch, to why no run of this stack may have another."""

FREE = (
    "trainer.balance_batch",
    "trainer.ray_wait_register_center_timeout",
    "reward.num_workers",
    f"{_ACTOR}.optim.override_optimizer_config.foreach",
    f"{_ACTOR}.optim.override_optimizer_config.fused",
)
"""Settings within a branch of the above that may be changed all the same."""


def objections(overrides: Sequence[str]) -> Iterator[Objection]:
    """What is wrong with ``name=value`` texts, as far as it can be told without verl."""
    seen: set[str] = set()
    for text in overrides:
        name, equals, value = text.partition("=")
        if not equals or not name or name.startswith(("+", "~")):
            yield Objection(FIELD, text, "not of the form name=value", "write it as verl's config names it")
        elif name in seen:
            yield Objection(FIELD, text, f"{name} is given twice", "give it once")
        elif value.lstrip().startswith("{") or _is_branch(name):
            yield Objection(FIELD, text, f"sets all of {name} at once", f"name each setting: {name}.NAME=VALUE")
        else:
            yield from _refused(name, text)
        seen.add(name)


def _refused(name: str, text: str) -> Iterator[Objection]:
    """The longest entry that speaks of a setting decides."""
    for entry in _entries(name):
        if entry in FREE:
            return
        if entry in FIXED:
            yield Objection(FIELD, text, f"{entry} is not to be changed: {FIXED[entry]}", "leave it out")
            return
        if entry in FIELDS:
            yield Objection(FIELD, text, f"{entry} is set from {FIELDS[entry]}", f"set {FIELDS[entry]} instead")
            return


def _is_branch(name: str) -> bool:
    """Whether a name stands for several settings, some of which are decided elsewhere."""
    decided = {**FIELDS, **FIXED}
    return name not in decided and any(entry.startswith(f"{name}.") for entry in decided)


def _entries(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[:length]) for length in range(len(parts), 0, -1))
