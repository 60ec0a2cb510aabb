"""Combinations of values that no run can honour. Each is refused before a sweep starts."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

from pth_exp import schema
from pth_exp.refusal import Objection
from pth_exp.schema import Aggregation, Config, Correction, GradNorm, OldPolicy, Reference
from pth_exp.tasks.base import Split
from pth_exp.tasks.gsm8k import COUNTS
from pth_exp.tracking import BACKENDS
from pth_exp.verl_stack import overrides

_AT_LEAST: dict[str, float] = {
    "refresh_interval": 1, "replay_age": 0, "updates": 1, "prompts_per_update": 1, "responses_per_prompt": 2,
    "max_prompt_tokens": 1, "max_response_tokens": 1, "lr": 0, "seed": 0,
    "seeds.data": 0, "seeds.sampling": 0, "seeds.init": 0, "seeds.eval": 0,
    "kl.coef": 0, "validation.every": 1, "validation.problems": 1, "probe.first_batches": 1,
    "optimizer.beta1": 0, "optimizer.beta2": 0, "optimizer.weight_decay": 0, "optimizer.steps_per_batch": 1,
    "stack.ranks": 1, "stack.micro_batch_rows": 1,
    "stack.threads": 1, "stack.sampler_rows": 1, "stack.micro_batch_tokens": 1, "stack.checkpoint_every": 1,
    "stack.keep_checkpoints": 0, "task.train_problems": 1, "task.test_problems": 1, "task.min_steps": 1, "task.max_operand": 1,
    "arm.clip_low": 0, "arm.clip_high": 0, "arm.lower": 0, "arm.upper": 1,
}  # fmt: skip
_ABOVE: dict[str, float] = {
    "temperature": 0, "kl.clamp": 0, "optimizer.eps": 0, "optimizer.max_grad_norm": 0, "optimizer.skip_below": 0,
    "arm.cap": 0, "arm.dual_clip": 1, "arm.norm_tokens": 0, "arm.floor": 0, "arm.threshold": 0,
    "tracking.close_timeout": 0,
    "stack.start_timeout": 0, "stack.update_timeout": 0, "stack.gpu_memory": 0,
}  # fmt: skip
_BELOW: dict[str, float] = {"optimizer.beta1": 1, "optimizer.beta2": 1, "arm.clip_low": 1}
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")
_READS_SAMPLER = (Correction.weight, Correction.rejection)
_WHY = {
    "responses_per_prompt": "a group of one response has no group-normalised advantage",
    "refresh_interval": "the sampler is refreshed on every N-th update",
    "replay_age": "a batch cannot be trained on before it is generated",
}


def objections(config: Config) -> Iterator[Objection]:
    """Everything that is wrong with a run, field by field, and with it under each of its shadow arms."""
    own = list(_objections(config))
    yield from own
    for name, arm in config.probe.shadows.items():
        for found in _objections(dataclasses.replace(config, arm=arm)):
            if found not in own:
                why, remedy = str(found).split("\n    remedy: ")
                yield Objection("probe.shadow_arms", name, why, f"{remedy}, or leave {name} out of probe.shadow_arms")
    if isinstance(config.stack, schema.VerlStack):  # a shadow arm is evaluated on whole batches whatever the learner does
        yield from _parts(config, config.stack)


def _objections(config: Config) -> Iterator[Objection]:
    for info in schema.leaf_fields(config):
        value = _value(config, info.path)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            yield from _number(info.path, value)
    if config.name in ("", "latest") or config.name.startswith(".") or "/" in config.name:
        yield Objection(
            "name", repr(config.name), "is no name for a folder beside the link `latest`", "write letters, digits, - and _"
        )
    yield from _tracking(config.tracking)
    yield from _needs(config)
    yield from _aggregations(config)
    yield from _equation(config.arm)
    if config.optimizer.grad_norm is GradNorm.set and config.optimizer.max_grad_norm is None:
        yield Objection(
            "optimizer.max_grad_norm", "null", "optimizer.grad_norm=set has no norm to set",
            "set optimizer.max_grad_norm=1, as the paper does, or optimizer.grad_norm=clip",
        )  # fmt: skip
    yield from _sizes(config)
    if isinstance(config.stack, schema.VerlStack):
        yield from _verl(config, config.stack)


def _tracking(tracking: schema.TrackingConfig) -> Iterator[Objection]:
    for name in tracking.backends:
        if name not in BACKENDS:
            remedy = f"backends are {', '.join(BACKENDS)}{schema.nearest(name, BACKENDS)}"
            yield Objection("tracking.backends", name, "no such backend", remedy)
    if not _VARIABLE.fullmatch(tracking.key_variable):  # it may be the key itself, which is not to be printed
        why = "is no name of an environment variable; the key itself never enters a config"
        yield Objection("tracking.key_variable", "", why, "export the key as WANDB_API_KEY, or name another variable")


def _verl(config: Config, stack: schema.VerlStack) -> Iterator[Objection]:
    """What the verl stack does not do."""
    if config.replay_age > 0:
        yield Objection(
            "replay_age", str(config.replay_age), "verl trains on the batch that it has just drawn; it has no replay queue",
            "set replay_age=0 and lag the sampler with refresh_interval, or set stack=trainer",
        )  # fmt: skip
    if config.task.cut_at and not config.task.train_after_cut:
        yield Objection(
            "task.train_after_cut", "false", "on verl all tokens of a response train",
            "set task.train_after_cut=true, or stack=trainer",
        )  # fmt: skip
    if config.optimizer.name is not schema.OptimizerName.adamw:
        yield Objection("optimizer.name", config.optimizer.name, "the verl stack steps AdamW", "set optimizer=adamw")
    if config.optimizer.grad_norm is GradNorm.set:
        yield Objection("optimizer.grad_norm", "set", "verl clips the norm and cannot set it", "set optimizer.grad_norm=clip")
    rows = config.prompts_per_update * config.responses_per_prompt
    if stack.ranks >= 1 and rows % stack.ranks:
        yield Objection("stack.ranks", str(stack.ranks), f"a batch of {rows} responses has no equal parts", "let it divide them")
    elif stack.ranks >= 1 and stack.micro_batch_rows and rows // stack.ranks % stack.micro_batch_rows:
        yield Objection(
            "stack.micro_batch_rows", str(stack.micro_batch_rows),
            f"a rank's {rows // stack.ranks} responses have no equal parts", "let it divide them",
        )  # fmt: skip
    if stack.device not in ("auto", "cpu", "cuda"):
        yield Objection("stack.device", stack.device, "verl places its own workers", "set stack.device=auto, cpu or cuda")
    yield from overrides.objections(stack.overrides)


def _parts(config: Config, stack: schema.VerlStack) -> Iterator[Objection]:
    """A loss that needs the whole batch, and a stack that hands the loss parts of it."""
    rows = config.prompts_per_update * config.responses_per_prompt
    part = min(stack.micro_batch_rows or rows, rows // max(stack.ranks, 1))
    if not 1 <= part < rows:
        return
    from pth_exp.losses import get_loss  # and with it torch, where a batch is divided

    arm = config.arm
    try:
        if get_loss(arm.loss, **arm.parameters()).splittable:
            return
    except ValueError as error:
        yield Objection("arm", arm.name, str(error), "correct it")
        return
    field, value = ("stack.ranks", stack.ranks) if stack.ranks > 1 else ("stack.micro_batch_rows", stack.micro_batch_rows)
    counted = ", set arm.count_rejected=true" if hasattr(arm, "count_rejected") else ""
    yield Objection(
        field, str(value),
        f"arm {arm.name}: its loss {arm.loss} is no sum over responses and needs the batch of {rows} at once, not {part}",
        f"set stack.ranks=1 and stack.micro_batch_rows=null{counted}, choose another arm, or set stack=trainer",
    )  # fmt: skip


def _value(config: Config, path: str) -> object:
    node: object = config
    for name in path.split("."):
        node = getattr(node, name)
    return node


def _number(path: str, value: float) -> Iterator[Objection]:
    why = _WHY.get(path, "out of range")
    if not math.isfinite(value):
        yield Objection(path, str(value), "not a finite number", "write a finite number")
    elif path in _AT_LEAST and value < _AT_LEAST[path]:
        yield Objection(path, str(value), why, f"{path} must be at least {_AT_LEAST[path]}")
    elif path in _ABOVE and value <= _ABOVE[path]:
        yield Objection(path, str(value), why, f"{path} must be above {_ABOVE[path]}")
    elif path in _BELOW and value >= _BELOW[path]:
        yield Objection(path, str(value), why, f"{path} must be below {_BELOW[path]}")


def _needs(config: Config) -> Iterator[Objection]:
    arm = config.arm
    if config.model.reference is Reference.none:
        if arm.needs_reference:
            yield Objection(
                "model.reference", "none", f"arm {arm.name} reads the reference policy", "set model.reference=initial"
            )
        if config.kl.coef > 0:
            yield Objection(
                "model.reference", "none", f"kl.coef={config.kl.coef} penalises the distance to a reference policy",
                "set kl.coef=0 or model.reference=initial",
            )  # fmt: skip
    reads_sampler = arm.needs_sampler_logp or arm.old_policy is OldPolicy.sampler or arm.correction in _READS_SAMPLER
    if reads_sampler and not config.stack.record_sampler_logp:
        yield Objection(
            "stack.record_sampler_logp", "false", f"arm {arm.name} reads the sampler's log-probabilities",
            "set stack.record_sampler_logp=true",
        )  # fmt: skip


def _aggregations(config: Config) -> Iterator[Objection]:
    constant = Aggregation.seq_mean_token_sum_norm
    if getattr(config.arm, "aggregation", None) is constant and getattr(config.arm, "norm_tokens", None) is None:
        yield Objection(
            "arm.norm_tokens", "null", f"arm.aggregation={constant} divides each response's sum by it",
            "set arm.norm_tokens='${max_response_tokens}', or another number of tokens",
        )  # fmt: skip
    if config.kl.aggregation is constant:
        yield Objection(
            "kl.aggregation", constant, "a constant divisor of the penalty does nothing but rescale kl.coef",
            "set kl.aggregation=seq_mean_token_sum, and kl.coef to what it is divided by the constant",
        )  # fmt: skip


def _equation(arm: schema.Arm) -> Iterator[Objection]:
    """What check 4 could not evaluate, or what the stack would not hand to the loss."""
    if arm.equation is None:
        return
    from pth_exp.equations import EquationError, parse  # numpy is imported only where a sweep is composed
    from pth_exp.equations.references import REFERENCES

    parameters = arm.parameters()
    try:
        equation = parse(arm.equation, parameters)
    except EquationError as error:
        place = "" if error.line is None else f"line {error.line}, column {error.column}: "
        yield Objection("arm.equation", "", f"{place}{error.what}", error.remedy)
        return
    if equation.reference is not None and equation.reference not in REFERENCES:
        known = ", ".join(sorted(REFERENCES)) or "none"
        yield Objection("arm.equation", "", f"no reference {equation.reference!r} is registered", f"known are: {known}")
    for name in sorted(equation.parameters - {"aggregation"}):
        if isinstance(parameters[name], str):
            why = f"{equation.place(name)}: reads {name}, and arm.{name}={parameters[name]} is not a number"
            yield Objection("arm.equation", "", why, "write one equation for each choice, each in an arm of its own")
    for name, declared in {"ref_logp": "needs_reference", "sampler_logp": "needs_sampler_logp"}.items():
        if name in equation.inputs and not getattr(arm, declared):
            why = f"{equation.place(name)}: reads {name}, and arm.{declared}=false"
            yield Objection("arm.equation", "", why, f"set {declared}: true in the arm, or write an equation without {name}")


def _sizes(config: Config) -> Iterator[Objection]:
    task = config.task
    if isinstance(task, schema.ArithmeticTask):
        if task.max_steps < task.min_steps:
            yield Objection("task.max_steps", str(task.max_steps), f"below task.min_steps={task.min_steps}", "raise it")
        if config.prompts_per_update > task.train_problems:
            yield Objection(
                "prompts_per_update", str(config.prompts_per_update), f"the task has {task.train_problems} training problems",
                "lower it, or raise task.train_problems",
            )  # fmt: skip
        if config.validation.every is not None and config.validation.problems > task.test_problems:
            yield Objection(
                "validation.problems", str(config.validation.problems), f"the task has {task.test_problems} test problems",
                "lower it, or raise task.test_problems",
            )  # fmt: skip
    if isinstance(task, schema.Gsm8kTask):
        if "{question}" not in task.prompt:
            yield Objection("task.prompt", repr(task.prompt), "has no place for the question", "write {question} in it")
        if config.validation.every is not None and config.validation.problems > COUNTS[Split.test]:
            why = f"GSM8K has {COUNTS[Split.test]} test problems"
            yield Objection("validation.problems", str(config.validation.problems), why, "lower it")
    stack = config.stack
    eight_bit = config.optimizer.name is not schema.OptimizerName.adamw
    if eight_bit and isinstance(stack, schema.TrainerStack) and stack.device == "cpu":
        yield Objection("optimizer.name", config.optimizer.name, "needs a GPU, and stack.device=cpu", "set optimizer=adamw")
