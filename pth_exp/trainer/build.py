"""The objects of a run, made from its config, and what they say of themselves."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pth_exp.losses import BoundLoss, get_loss, group_advantages
from pth_exp.models.load import load_policy, special_tokens
from pth_exp.probes import Shadow
from pth_exp.schema import Advantage, Arm, Config, Reference, TrainerStack
from pth_exp.tasks import Problem, Split, Task, load_task
from pth_exp.tasks.order import PromptOrder, evaluation_subset
from pth_exp.tasks.prompts import prompt_id, render
from pth_exp.trainer.learner import Learner
from pth_exp.trainer.optimizer import MasterOptimizer
from pth_exp.trainer.policy import Policy
from pth_exp.trainer.rollout import Prompt
from pth_exp.trainer.sampler import Sampler


@dataclass(frozen=True, slots=True)
class Run:
    """What a run consists of.

    Attributes:
        problems: the training split.
        order: which of them each draw takes.
        evaluation: the fixed subset of the test split.
        advantages: makes them of rewards and groups.
        shadows: arms that are evaluated on each batch and train nothing.
        initial_seed: what torch's global generator held when the model was built.
    """

    config: Config
    stack: TrainerStack
    task: Task
    tokenizer: Any
    problems: Sequence[Problem]
    order: PromptOrder
    evaluation: Sequence[Problem]
    advantages: partial[Tensor]
    loss: BoundLoss
    learner: Learner
    sampler: Sampler
    shadows: Sequence[Shadow]
    initial_seed: int

    @property
    def arm(self) -> Shadow:
        """The arm that trains, as the probes take it."""
        return Shadow(self.config.arm.name, self.learner.loss, self.learner.old_policy, self.advantages)

    def prompt(self, problem: Problem) -> Prompt:
        tokens = render(problem, self.tokenizer, self.config.task, self.config.max_prompt_tokens)
        return Prompt(problem.index, prompt_id(problem, tokens), tuple(tokens))

    def text(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))


def build(config: Config) -> Run:
    """Raises ValueError, naming the field and the remedy, for a config that this stack cannot run."""
    stack = config.stack
    if not isinstance(stack, TrainerStack):
        raise ValueError(f"stack.name is {stack.name!r}; this is the stack 'trainer'")
    arms = [config.arm, *config.probe.shadows.values()]
    needs_reference = any(arm.needs_reference for arm in arms) or config.kl.coef != 0
    if needs_reference and config.model.reference is Reference.none:
        raise ValueError(
            "model.reference is none, but kl.coef, the arm or a shadow arm asks for a reference; set model.reference=initial"
        )
    if any(arm.needs_sampler_logp for arm in arms) and not stack.record_sampler_logp:
        raise ValueError(
            "stack.record_sampler_logp is false, but the arm or a shadow arm reads what the sampler records; set it to true"
        )

    torch.set_num_threads(stack.threads)
    torch.manual_seed(config.seeds.init)
    initial_seed = torch.initial_seed()
    device = _device(stack.device)
    model, tokenizer = load_policy(config.model, device)
    special = special_tokens(model.config, tokenizer)
    policy = Policy(model, config.temperature, special.forbidden)
    reference = None
    if needs_reference:
        reference = Policy(copy.deepcopy(model).requires_grad_(False), config.temperature, special.forbidden)
    loss = get_loss(config.arm.loss, **config.arm.parameters())

    task = load_task(config.task)
    problems, test = task.problems(Split.train), task.problems(Split.test)
    return Run(
        config=config,
        stack=stack,
        task=task,
        tokenizer=tokenizer,
        problems=problems,
        order=PromptOrder(len(problems), config.prompts_per_update, config.seeds.data),
        evaluation=evaluation_subset(test, config.validation.problems, config.seeds.eval),
        advantages=_advantages(config.arm),
        loss=loss,
        learner=Learner(
            policy=policy,
            reference=reference,
            optimizer=MasterOptimizer(model, config.optimizer, config.lr),
            loss=loss,
            old_policy=config.arm.old_policy,
            kl=config.kl,
            steps_per_batch=config.optimizer.steps_per_batch,
            micro_batch_tokens=stack.micro_batch_tokens,
            activations=stack.activations,
        ),
        sampler=Sampler(policy, special.eos, config.max_response_tokens, stack.sampler_rows, config.seeds.sampling),
        shadows=[bind(name, arm) for name, arm in config.probe.shadows.items()],
        initial_seed=initial_seed,
    )


def bind(name: str, arm: Arm) -> Shadow:
    """An arm with its loss, as the probes take it."""
    return Shadow(name, get_loss(arm.loss, **arm.parameters()), arm.old_policy, _advantages(arm))


def _advantages(arm: Arm) -> partial[Tensor]:
    return partial(group_advantages, normalise_std=arm.advantage is Advantage.group_std)


def received(run: Run) -> dict[str, Any]:
    """What the built objects hold, read back from them: dotted field of the config to value, and some facts besides."""
    learner, sampler = run.learner, run.sampler
    optimizer = learner.optimizer.optimizer
    group, settings = optimizer.param_groups[0], learner.optimizer.settings
    model = learner.policy.model
    weights = list(model.parameters())
    values = {
        "arm.loss": run.loss.name,
        **{f"arm.{name}": value for name, value in run.loss.parameters.items()},
        "arm.old_policy": learner.old_policy,
        "arm.advantage": Advantage.group_std if run.advantages.keywords["normalise_std"] else Advantage.group_mean,
        "lr": learner.optimizer.lr,
        "optimizer.beta1": group["betas"][0],
        "optimizer.beta2": group["betas"][1],
        "optimizer.eps": group["eps"],
        "optimizer.weight_decay": group["weight_decay"],
        "optimizer.grad_norm": settings.grad_norm,
        "optimizer.max_grad_norm": settings.max_grad_norm,
        "optimizer.skip_below": settings.skip_below,
        "optimizer.steps_per_batch": learner.steps_per_batch,
        **{f"kl.{name}": value for name, value in asdict(learner.kl).items()},
        "temperature": learner.policy.temperature,
        "max_response_tokens": sampler.limit,
        "model.dtype": str(weights[0].dtype).removeprefix("torch."),
        "seeds.data": run.order.generator_seed if run.config.seeds.data is not None else None,
        "seeds.sampling": sampler.seed,
        "seeds.init": run.initial_seed,
        "stack.threads": torch.get_num_threads(),
        "stack.micro_batch_tokens": learner.micro_batch_tokens,
        "stack.activations": learner.activations,
        "objects": {
            "optimizer": type(optimizer).__name__,
            "parameters": sum(w.numel() for w in weights),
            "device": str(learner.policy.device),
            "data_generator_seed": run.order.generator_seed,
            "first_indices": run.order.batch(0),
            "evaluation_indices": [problem.index for problem in run.evaluation],
            "reference": learner.reference is not None,
            "sampler_temperature": sampler.policy.temperature,
            "forbidden_tokens": list(sampler.policy.forbidden),
            "end_tokens": list(sampler.ends),
            "attention": str(getattr(model.config, "_attn_implementation", "unknown")),
        },
    }
    return {name: value.value if isinstance(value, StrEnum) else value for name, value in values.items()}


def _device(name: str) -> torch.device:
    """Raises ValueError when a GPU is asked for that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"stack.device={name}: {torch.cuda.device_count()} GPUs are visible; use stack.device=auto or cpu")
    return device
