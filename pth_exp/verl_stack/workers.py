"""verl's actor, with the project's loss in it and a way to read back what it holds."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import torch
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils import tensordict_utils
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from pth_exp.freeze import file_hash, source_hash
from pth_exp.losses import get_loss
from pth_exp.models.load import special_tokens
from pth_exp.probes import probe_equation
from pth_exp.probes.weights import fingerprint_of
from pth_exp.verl_stack.environment import environment
from pth_exp.verl_stack.forbidden import forbid
from pth_exp.verl_stack.frozen import frozen_config
from pth_exp.verl_stack.loss import PolicyLoss, StepParts
from pth_exp.verl_stack.switch import on_cpu


class Training(TrainingWorker):
    """Forbids what the other stack forbids, and tells the loss when a step is done."""

    def __init__(self, config: Any) -> None:
        if on_cpu():
            from verl.utils.distributed import initialize_global_process_group_ray

            # verl would ask for the same backend under two names
            initialize_global_process_group_ray(backend="gloo")
        super().__init__(config)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def reset(self) -> None:
        super().reset()
        self.forbidden = special_tokens(self.model_config.hf_config, self.model_config.tokenizer).forbidden
        forbid(self.engine.module, self.forbidden)

    def train_batch(self, data: Any) -> Any:
        lr = self.engine.optimizer.param_groups[0]["lr"]
        output = super().train_batch(data)
        if isinstance(self.loss_fn, PolicyLoss):
            self.loss_fn.step_done(float(tensordict_utils.get(output, "metrics")["grad_norm"]), float(lr))
        return output


class Actor(ActorRolloutRefWorker):
    """The learner, with the transfer of its weights to vLLM, and the reference beside it."""

    actor_worker_cls = Training
    ref_worker_cls = Training

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        config = frozen_config()
        torch.manual_seed(config.seeds.init)
        super().init_model()
        self.policy_loss = PolicyLoss(get_loss(config.arm.loss, **config.arm.parameters()), config.kl)
        self.actor.set_loss_fn(self.policy_loss)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_steps(self) -> list[StepParts]:
        """The optimiser steps since the last call, this rank's part of each."""
        return self.policy_loss.take()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def equation(self) -> dict[str, Any]:
        """The loss that trains, in this very process, against the equation that its arm writes down."""
        return probe_equation(frozen_config().arm, self.policy_loss.loss)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weights_fingerprint(self) -> str:
        """Of the weights as a transfer would send them now, in the type that the sampler holds them in."""
        dtype = getattr(torch, frozen_config().model.dtype)
        engine = self.actor.engine
        tied = engine.model_config.hf_config.tie_word_embeddings
        weights, _ = engine.get_per_tensor_param()
        return fingerprint_of((name, w.to(dtype)) for name, w in weights if not (tied and name == "lm_head.weight"))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def received(self) -> dict[str, Any]:
        """What the built objects hold: dotted field of the project's config to value, and some facts besides."""
        engine, loss = self.actor.engine, self.policy_loss
        group = engine.optimizer.param_groups[0]
        weights = [weight for weight in engine.module.parameters()]
        return {
            "arm.loss": loss.loss.name,
            **{f"arm.{name}": value for name, value in loss.loss.parameters.items()},
            **{f"kl.{name}": value for name, value in dataclasses.asdict(loss.kl).items()},
            "lr": group["lr"],
            "optimizer.beta1": group["betas"][0],
            "optimizer.beta2": group["betas"][1],
            "optimizer.eps": group["eps"],
            "optimizer.weight_decay": group["weight_decay"],
            "seeds.init": torch.initial_seed(),
            "held": {
                **_micro_batches(engine, "actor.ppo_micro_batch_size_per_gpu", "rollout.log_prob_micro_batch_size_per_gpu"),
                **(
                    _micro_batches(self.ref.engine, None, "ref.log_prob_micro_batch_size_per_gpu") if self.ref is not None else {}
                ),
                "actor_rollout_ref.actor.optim.clip_grad": engine.optimizer_config.clip_grad,
                "actor_rollout_ref.actor.fsdp_config.strategy": engine.engine_config.strategy,
            },
            "environment": environment(),
            "objects": {
                "optimizer": type(engine.optimizer).__name__,
                "engine": type(engine).__name__,
                "parameters": sum(weight.numel() for weight in weights),
                "master_dtype": str(weights[0].dtype).removeprefix("torch."),
                "forward_dtype": str(engine._autocast_dtype).removeprefix("torch."),
                "device": str(weights[0].device),
                "forbidden_tokens": list(self.actor.forbidden),
                "reference": self.ref is not None,
                "loss_source": source_of(loss.loss.function),
                "source": source_hash(),
                "ranks": torch.distributed.get_world_size(),
                "micro_batch_rows": engine.engine_config.micro_batch_size_per_gpu,
            },
        }


def _micro_batches(engine: Any, training: str | None, inference: str) -> dict[str, int]:
    """Responses of a forward pass as an engine has them, under verl's names for them."""
    config = engine.engine_config
    found = {} if training is None else {training: config.micro_batch_size_per_gpu}
    return {
        f"actor_rollout_ref.{name}": rows for name, rows in {**found, inference: config.infer_micro_batch_size_per_gpu}.items()
    }


def source_of(function: Any) -> str:
    """sha256 of the file that a loss is written in."""
    return file_hash(Path(str(inspect.getsourcefile(inspect.unwrap(function)))))


if on_cpu():
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    @EngineRegistry.register(model_type="language_model", backend=["fsdp2"], device="cpu")
    class CpuEngine(FSDPEngineWithLMHead):
        """verl's FSDP2 engine; the reference is not kept in pinned memory, which only a GPU has."""

        engine_config: Any

        def _build_fsdp_module(self, module: Any) -> Any:
            settings: Any = self.engine_config
            self.engine_config = dataclasses.replace(settings, forward_only=False, offload_policy=False)
            try:
                return super()._build_fsdp_module(module)
            finally:
                self.engine_config = settings
