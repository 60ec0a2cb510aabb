"""The structured config: every field of a run, with its type, unit, meaning and role.

A role says what a field does to a comparison:

* ``science``    decides the numbers that a run produces; the science fields together are the run's identity (``config_id``)
* ``derived``    computed from science fields, kept because people look for it
* ``execution``  where and how fast a run executes; must not change its numbers beyond floating-point rounding
* ``output``     names and places

This module imports neither Hydra nor torch: the worker builds the same dataclasses from a frozen file.
"""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Optional

MISSING: Any = "???"
"""OmegaConf's marker of a mandatory value, spelled out so that reading a schema does not import OmegaConf."""


class Role(StrEnum):
    science = "science"
    derived = "derived"
    execution = "execution"
    output = "output"


class OldPolicy(StrEnum):
    """Whose log-probabilities are ``old_logp``, the denominator of the PPO ratio (paper, section 4.1)."""

    sampler = "sampler"
    recomputed = "recomputed"


class Correction(StrEnum):
    """How an arm claims to correct for the sampler's lag; check 1 holds the arm to it."""

    none = "none"
    ratio = "ratio"
    weight = "weight"
    behaviour_free = "behaviour_free"


class Aggregation(StrEnum):
    """How token terms become one number; verl spells the same names with hyphens."""

    token_mean = "token_mean"
    seq_mean_token_mean = "seq_mean_token_mean"
    seq_mean_token_sum = "seq_mean_token_sum"


class KlEstimator(StrEnum):
    """Schulman's estimators of KL(policy || reference) from sampled tokens."""

    k1 = "k1"
    k2 = "k2"
    k3 = "k3"


class Queue(StrEnum):
    """The replay queue's behaviour before it holds ``replay_age + 1`` batches (paper, section 4.3)."""

    unique_prefill = "unique_prefill"
    warmup = "warmup"


class Gate(StrEnum):
    refuse = "refuse"
    label = "label"


class Reference(StrEnum):
    initial = "initial"
    none = "none"


class Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"


class Activations(StrEnum):
    """Whose activations are alive during a backward pass."""

    whole_batch = "whole_batch"
    micro_batch = "micro_batch"


class ChatTemplate(StrEnum):
    never = "never"
    always = "always"


class OptimizerName(StrEnum):
    adamw = "adamw"
    adamw_8bit = "adamw_8bit"
    paged_adamw_8bit = "paged_adamw_8bit"


def spec(default: Any, role: Role, meaning: str, unit: str = "", follows: str = "") -> Any:
    """A dataclass field with its documentation; ``follows`` names the field whose change it takes part in."""
    metadata = {"role": role, "meaning": meaning, "unit": unit, "follows": follows}
    if isinstance(default, (list, dict)):
        frozen = default.copy()
        return field(default_factory=lambda: frozen.copy(), metadata=metadata)
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


_SCIENCE, _DERIVED, _EXECUTION, _OUTPUT = Role.science, Role.derived, Role.execution, Role.output


# ---------------------------------------------------------------------------------------------------------------- arms


@dataclass
class Arm:
    """One method of a comparison. A subclass adds its loss's parameters; nothing outside the arm can be set from it."""

    name: str = spec(MISSING, _SCIENCE, "name of the arm")
    loss: str = spec(MISSING, _SCIENCE, "name of the loss in the registry of pth_exp.losses")
    label: str = spec(MISSING, _OUTPUT, "how the arm is called in tables and figures")
    equation: str = spec(MISSING, _OUTPUT, "the loss as written, for people")
    old_policy: OldPolicy = spec(OldPolicy.recomputed, _SCIENCE, "whose log-probabilities are old_logp")
    correction: Correction = spec(MISSING, _SCIENCE, "how the arm claims to correct for the sampler's lag")
    needs_reference: bool = spec(False, _SCIENCE, "the loss reads the reference policy's log-probabilities")
    needs_sampler_logp: bool = spec(False, _SCIENCE, "the loss, or its old policy, reads the sampler's log-probabilities")

    def parameters(self) -> dict[str, Any]:
        """The arguments of the arm's loss: the fields that the subclass adds."""
        common = {f.name for f in dataclasses.fields(Arm)}
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in common}


@dataclass
class PpoClipArm(Arm):
    """PPO's clipped loss; ``grpo`` and ``ppo_clip`` differ only in whose log-probabilities are ``old_logp``."""

    clip_low: float = spec(0.2, _SCIENCE, "the ratio is clipped below at 1 - clip_low")
    clip_high: float = spec(0.2, _SCIENCE, "the ratio is clipped above at 1 + clip_high")
    dual_clip: Optional[float] = spec(3.0, _SCIENCE, "bound c of verl's dual clip for negative advantages; null: off")
    aggregation: Aggregation = spec(Aggregation.token_mean, _SCIENCE, "how token terms become one number")


@dataclass
class TisPpoArm(PpoClipArm):
    """The PPO-clip loss times the detached truncated importance weight."""

    cap: float = spec(2.0, _SCIENCE, "the weight is truncated above at this value")


@dataclass
class TisReinforceArm(Arm):
    """REINFORCE times the detached truncated importance weight."""

    cap: float = spec(2.0, _SCIENCE, "the weight is truncated above at this value")
    aggregation: Aggregation = spec(Aggregation.seq_mean_token_sum, _SCIENCE, "how token terms become one number")


@dataclass
class SanArm(Arm):
    """Self-anchored normalisation; it has no parameters."""


# --------------------------------------------------------------------------------------------------------------- parts


@dataclass
class StackConfig:
    name: str = spec(MISSING, _SCIENCE, "which stack trains: trainer")
    record_sampler_logp: bool = spec(True, _SCIENCE, "the sampler records the log-probability of each token it samples")


@dataclass
class TrainerStack(StackConfig):
    """The single-GPU trainer with Hugging Face models."""

    device: str = spec("auto", _EXECUTION, "auto, cpu, cuda or cuda:N; auto takes a visible GPU if there is one")
    threads: int = spec(1, _EXECUTION, "CPU threads of one run", "threads")
    sampler_rows: int = spec(256, _EXECUTION, "responses generated at a time", "rows")
    micro_batch_tokens: int = spec(1024, _EXECUTION, "padded response tokens of one forward pass of the learner", "tokens")
    activations: Activations = spec(Activations.whole_batch, _EXECUTION, "micro_batch: one more forward pass, less memory")
    checkpoint_every: Optional[int] = spec(20, _EXECUTION, "a checkpoint after every so many updates; null: none", "updates")
    keep_checkpoints: int = spec(1, _EXECUTION, "older checkpoints kept beside the newest", "checkpoints")


@dataclass
class TaskConfig:
    name: str = spec(MISSING, _SCIENCE, "name of the task in pth_exp.tasks")
    cut_at: list[str] = spec([], _SCIENCE, "a response is cut before the first of these texts, then scored; empty: never cut")
    train_after_cut: bool = spec(True, _SCIENCE, "tokens after the cut still train; only matters with cut_at")
    chat_template: ChatTemplate = spec(ChatTemplate.never, _SCIENCE, "render prompts through the tokenizer's chat template")


@dataclass
class ArithmeticTask(TaskConfig):
    """Worded arithmetic, made from a seed."""

    train_problems: int = spec(4096, _SCIENCE, "size of the training split", "problems")
    test_problems: int = spec(512, _SCIENCE, "size of the test split; disjoint from the training split", "problems")
    min_steps: int = spec(4, _SCIENCE, "fewest operations in a problem", "operations")
    max_steps: int = spec(5, _SCIENCE, "most operations in a problem", "operations")
    max_operand: int = spec(5, _SCIENCE, "largest amount bought or lost in one operation")
    problem_seed: int = spec(0, _SCIENCE, "seed from which the problems are made; does not follow seed")


@dataclass
class Gsm8kTask(TaskConfig):
    """Grade-school word problems (Cobbe et al., 2021)."""

    path: Optional[str] = spec(None, _SCIENCE, "folder with train and test as .jsonl or .parquet; null: the hub's openai/gsm8k")
    prompt: str = spec(MISSING, _SCIENCE, "text of a prompt; {question} is replaced")


@dataclass
class ModelConfig:
    name: str = spec(MISSING, _OUTPUT, "how the model is called in tables")
    path: str = spec(MISSING, _SCIENCE, "embedded, smollm2_135m, a local folder, or a hub name")
    revision: Optional[str] = spec(None, _SCIENCE, "commit of a hub model; null: the hub's main at freeze time")
    dtype: Dtype = spec(Dtype.float32, _SCIENCE, "type of the weights and activations")
    reference: Reference = spec(Reference.initial, _SCIENCE, "the reference policy: the initial model, or none kept")


@dataclass
class OptimizerConfig:
    name: OptimizerName = spec(OptimizerName.adamw, _SCIENCE, "adamw; the 8-bit ones need the extra `8bit` and a GPU")
    beta1: float = spec(0.9, _SCIENCE, "decay of the first moment")
    beta2: float = spec(0.999, _SCIENCE, "decay of the second moment")
    eps: float = spec(1e-8, _SCIENCE, "Adam's denominator floor")
    weight_decay: float = spec(0.01, _SCIENCE, "decoupled weight decay")
    max_grad_norm: Optional[float] = spec(1.0, _SCIENCE, "global gradient norm is clipped to this; null: no clip")
    steps_per_batch: int = spec(1, _SCIENCE, "optimiser steps on each batch; old_logp is fixed at the first", "steps")


@dataclass
class KlConfig:
    """Penalty to the reference policy. verl's low_var_kl is k3 with clamp 10, and aggregates as the policy loss."""

    coef: float = spec(1e-3, _SCIENCE, "coefficient of the penalty in the loss")
    estimator: KlEstimator = spec(KlEstimator.k3, _SCIENCE, "estimator of the KL from sampled tokens")
    clamp: Optional[float] = spec(10.0, _SCIENCE, "each token's estimate is clamped to this; null: no clamp", "nats")
    aggregation: Aggregation = spec(Aggregation.token_mean, _SCIENCE, "how token terms become one number")


@dataclass
class ValidationConfig:
    """Greedy decoding of test problems with the learner's weights."""

    every: Optional[int] = spec(
        10, _SCIENCE, "validate before update 0, after every so many updates and at the end; null: never", "updates"
    )
    problems: int = spec(256, _SCIENCE, "size of the fixed subset of the test split", "problems")


@dataclass
class ProbeConfig:
    first_batches: int = spec(8, _SCIENCE, "how many first batches have their prompt IDs written and verified", "batches")


@dataclass
class Seeds:
    """What ``seed`` feeds. ``seed=null`` gives verl's default data order and leaves the other streams at 0."""

    data: Optional[int] = spec("${seed}", _SCIENCE, "data order; null: verl's default order, a fixed shuffle", follows="seed")
    sampling: int = spec("${pth_seed:${seed}}", _SCIENCE, "the sampler's draws", follows="seed")
    init: int = spec("${pth_seed:${seed}}", _SCIENCE, "weights that a checkpoint does not supply", follows="seed")
    eval: int = spec(0, _SCIENCE, "choice of the evaluation subset; does not follow seed")


@dataclass
class PerArm:
    """A field that deliberately differs between arms."""

    field: str = spec(MISSING, _OUTPUT, "name of the field")
    values: dict[str, Any] = spec({}, _OUTPUT, "arm name to value")
    reason: str = spec(MISSING, _OUTPUT, "why this belongs to the comparison")


@dataclass
class Expectation:
    """A verdict that `pth check` is to come to, other than a pass."""

    run: str = spec(MISSING, _OUTPUT, "glob over run labels")
    check: str = spec(MISSING, _OUTPUT, "ratio, config or batches")
    verdict: str = spec(MISSING, _OUTPUT, "fail, warn or not measured")
    reason: str = spec(MISSING, _OUTPUT, "why this is expected")


@dataclass
class DesignConfig:
    """What a comparison varies and holds fixed."""

    vary: Optional[list[str]] = spec(
        None, _OUTPUT, "fields that may differ within a block; null: those swept on the command line"
    )
    fixed: list[str] = spec([], _OUTPUT, "fields that must not differ anywhere in the sweep")
    per_arm: list[PerArm] = spec([], _OUTPUT, "fields that belong to an arm, with values and reason")
    blocks: list[str] = spec([], _OUTPUT, "fields that tell blocks apart; runs are compared within a block")
    replicate: list[str] = spec(["seed"], _OUTPUT, "fields whose values are replicates of one cell")
    extends: Optional[str] = spec(None, _OUTPUT, "an earlier sweep whose runs belong to the same comparison")
    gate: Gate = spec(Gate.refuse, _OUTPUT, "refuse to start a sweep that breaks its design, or label it and go on")
    expect: list[Expectation] = spec([], _OUTPUT, "verdicts other than a pass that are to come out")
    allow_reuse: bool = spec(False, _OUTPUT, "the design trains on a batch more than once")
    next_steps: list[str] = spec([], _OUTPUT, "commands to show after the checks")


@dataclass
class LeaseConfig:
    """How workers tell a living owner of a run from a lost one; see pth_exp.lifecycle."""

    heartbeat_every: float = spec(5.0, _EXECUTION, "the worker shows that it lives this often", "seconds")
    lost_after: float = spec(90.0, _EXECUTION, "a run whose worker has shown no life for so long may be taken over", "seconds")


@dataclass
class Config:
    """One run, complete."""

    arm: Arm = spec(MISSING, _SCIENCE, "the method")
    stack: StackConfig = spec(MISSING, _SCIENCE, "what trains it")
    task: TaskConfig = spec(MISSING, _SCIENCE, "prompts and reward")
    model: ModelConfig = spec(MISSING, _SCIENCE, "initial policy")
    optimizer: OptimizerConfig = spec(OptimizerConfig, _SCIENCE, "optimiser")
    kl: KlConfig = spec(KlConfig, _SCIENCE, "penalty to the reference policy")
    validation: ValidationConfig = spec(ValidationConfig, _SCIENCE, "greedy validation")
    probe: ProbeConfig = spec(ProbeConfig, _SCIENCE, "what is measured besides")
    seeds: Seeds = spec(Seeds, _SCIENCE, "random streams")
    design: DesignConfig = spec(DesignConfig, _OUTPUT, "what the comparison varies and holds fixed")
    lease: LeaseConfig = spec(LeaseConfig, _EXECUTION, "who may write a run's records, and for how long")

    seed: Optional[int] = spec(0, _SCIENCE, "replicate; feeds seeds.data, seeds.sampling and seeds.init")
    lr: float = spec(2e-4, _SCIENCE, "learning rate, constant")
    refresh_interval: int = spec(1, _SCIENCE, "the sampler takes the learner's weights on every N-th update", "updates")
    replay_age: int = spec(0, _SCIENCE, "each update trains on a batch generated this many updates earlier", "updates")
    queue: Queue = spec(Queue.unique_prefill, _SCIENCE, "how the replay queue starts")
    updates: int = spec(100, _SCIENCE, "length of the run; updates count from 0", "updates")
    prompts_per_update: int = spec(8, _SCIENCE, "prompts in a batch", "prompts")
    responses_per_prompt: int = spec(8, _SCIENCE, "responses in a group", "responses")
    max_prompt_tokens: int = spec(64, _SCIENCE, "a longer prompt is an error", "tokens")
    max_response_tokens: int = spec(56, _SCIENCE, "a longer response is truncated", "tokens")
    temperature: float = spec(1.0, _SCIENCE, "divides the logits of sampler, learner and reference alike")
    name: str = spec("adhoc", _OUTPUT, "name of the experiment; folder of its sweeps")


BUILTIN_ARMS: dict[str, type[Arm]] = {
    "grpo": PpoClipArm,
    "ppo_clip": PpoClipArm,
    "tis_ppo": TisPpoArm,
    "tis_reinforce": TisReinforceArm,
    "san": SanArm,
}
"""Loss name to the dataclass of the arms that use it; `pth_exp.extensions` adds a user's own."""

VARIANTS: dict[str, dict[str, type[Any]]] = {
    "stack": {"trainer": TrainerStack},
    "task": {"arithmetic": ArithmeticTask, "gsm8k": Gsm8kTask},
}
"""Groups whose members have fields of their own, by the member's ``name``."""


LOCATIONS: dict[str, tuple[str, ...]] = {
    "task.path": ("data",),
    "model.path": ("model", "tokenizer"),
    "model.revision": ("model", "tokenizer"),
}
"""Fields that say where an input lies. In a run's identity the input's own hash stands in their place."""


# ------------------------------------------------------------------------------------------------- reading the schema


@dataclass(frozen=True, slots=True)
class FieldInfo:
    """What the schema says of one leaf field."""

    path: str
    role: Role
    meaning: str
    unit: str
    follows: str


def leaf_fields(config: Config) -> Iterator[FieldInfo]:
    """Every leaf of a built config in declaration order; a leaf inherits nothing, its own role counts."""
    yield from _walk(config, "")


def _walk(node: Any, prefix: str) -> Iterator[FieldInfo]:
    for f in dataclasses.fields(node):
        path, value = prefix + f.name, getattr(node, f.name)
        if dataclasses.is_dataclass(value):
            yield from _walk(value, path + ".")
        else:
            m = f.metadata
            yield FieldInfo(path, m["role"], m["meaning"], m["unit"], m["follows"])


def field_table(arms: Mapping[str, type[Arm]] = BUILTIN_ARMS) -> dict[str, FieldInfo]:
    """Every leaf field that some run may have, by dotted path."""
    table: dict[str, FieldInfo] = {}

    def add(cls: type[Any], prefix: str) -> None:
        hints = typing.get_type_hints(cls)
        for f in dataclasses.fields(cls):
            path, m = prefix + f.name, f.metadata
            variants = [*arms.values()] if path == "arm" else [*VARIANTS.get(path, {}).values()]
            if dataclasses.is_dataclass(hints[f.name]):
                for node in variants or [hints[f.name]]:
                    add(node, path + ".")
            else:
                table.setdefault(path, FieldInfo(path, m["role"], m["meaning"], m["unit"], m["follows"]))

    add(Config, "")
    return table


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint at the known name that is closest to an unknown one; empty when none is close."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def build(values: Mapping[str, Any], arms: Mapping[str, type[Arm]] = BUILTIN_ARMS) -> Config:
    """The typed config of a resolved mapping, as read from a frozen file.

    Raises ``ValueError`` naming the field for a missing or an unknown key, or a value that its type cannot hold.
    """
    values = dict(values)
    types: dict[str, type[Any]] = {group: _variant(group, values, known) for group, known in VARIANTS.items()}
    types["arm"] = _variant("arm", values, arms, key="loss")
    return typing.cast(Config, _build(Config, values, "", types))


def _variant(group: str, values: Mapping[str, Any], known: Mapping[str, type[Any]], key: str = "name") -> type[Any]:
    node = values.get(group)
    if not isinstance(node, Mapping):
        raise ValueError(f"{group}: {node!r} is not a mapping; choose one with {group}=NAME")
    name = node.get(key)
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"{group}.{key}: {name!r} is not known; known are {', '.join(sorted(known))}")
    return known[name]


def _build(cls: type[Any], values: Mapping[str, Any], path: str, types: Mapping[str, type[Any]]) -> Any:
    hints = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]
    for key in values:
        if key not in names:
            raise ValueError(f"{path}{key}: unknown field, with value {values[key]!r}{nearest(str(key), names)}")
    for name in names:
        if name not in values:
            raise ValueError(f"{path}{name}: missing; give it a value with {path}{name}=...")
    return cls(**{n: _convert(types.get(path + n, hints[n]), values[n], path + n) for n in names})


def _convert(hint: Any, value: Any, path: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Union:
        return None if value is None else _convert(args[0], value, path)
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ValueError(f"{path}: {value!r} is not a mapping")
        return _build(typing.cast(type[Any], hint), value, path + ".", {})
    if origin is list:
        if not isinstance(value, list):
            raise ValueError(f"{path}: {value!r} is not a list")
        return [_convert(args[0], v, f"{path}[{i}]") for i, v in enumerate(value)]
    if origin is dict:
        return dict(value)
    if hint is Any:
        return value
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        try:
            return hint(value)
        except ValueError:
            raise ValueError(f"{path}: {value!r} is not one of {', '.join(hint)}") from None
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not hint:
        remedy = (
            "put it into quotes"
            if hint is str
            else "write a number without quotes"
            if isinstance(value, str)
            else f"write {hint.__name__}"
        )
        raise ValueError(f"{path}: {value!r} is not of type {hint.__name__}; {remedy}")
    return value
