"""The structured config: every field of a run, with its type, unit, meaning and role."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

from pth_exp.schema.arms import Arm
from pth_exp.schema.choices import (
    Activations,
    Aggregation,
    ChatTemplate,
    Dtype,
    Gate,
    GradNorm,
    KlEstimator,
    OptimizerName,
    Queue,
    Reference,
    TrackingMode,
)
from pth_exp.schema.fields import MISSING, Role, spec

_SCIENCE, _EXECUTION, _OUTPUT = Role.science, Role.execution, Role.output


@dataclass
class StackConfig:
    name: str = spec(MISSING, _SCIENCE, "which stack trains: trainer or verl")
    record_sampler_logp: bool = spec(True, _SCIENCE, "the sampler records the log-probability of each token it samples")
    checkpoint_every: Optional[int] = spec(
        20, _EXECUTION, "a checkpoint after every so many updates and the last; null: only when told to stop", "updates"
    )
    keep_checkpoints: int = spec(1, _EXECUTION, "older checkpoints kept beside the newest", "checkpoints")


@dataclass
class TrainerStack(StackConfig):
    """The single-GPU trainer with Hugging Face models."""

    device: str = spec("auto", _EXECUTION, "auto, cpu, cuda or cuda:N; auto takes a visible GPU if there is one")
    threads: int = spec(1, _EXECUTION, "CPU threads of one run", "threads")
    sampler_rows: int = spec(256, _EXECUTION, "responses generated at a time", "rows")
    micro_batch_tokens: int = spec(1024, _EXECUTION, "padded response tokens of one forward pass of the learner", "tokens")
    activations: Activations = spec(Activations.whole_batch, _EXECUTION, "micro_batch: one more forward pass, less memory")


@dataclass
class VerlStack(StackConfig):
    """verl's v1 trainer on Ray, with vLLM as the sampler. It has an environment and an interpreter of its own: `make verl`."""

    device: str = spec("auto", _EXECUTION, "auto, cpu or cuda; auto is settled at freeze: cuda if a GPU is visible")
    python: Optional[str] = spec(
        None, _EXECUTION, "interpreter of verl's environment; null: PTH_VERL_PYTHON, or .venv-verl here or beside the package"
    )
    ray_address: Optional[str] = spec(None, _EXECUTION, "a running Ray cluster; null: one of this run's own")
    ranks: int = spec(1, _EXECUTION, "processes of the learner, one GPU each", "ranks")
    threads: int = spec(1, _EXECUTION, "CPU threads of each process", "threads")
    sampler_rows: int = spec(256, _EXECUTION, "responses that vLLM generates at a time", "rows")
    micro_batch_rows: Optional[int] = spec(
        None, _EXECUTION, "responses of one forward pass of a rank; null: all it has", "responses"
    )
    gpu_memory: float = spec(0.4, _EXECUTION, "share of a GPU's memory that vLLM takes")
    start_timeout: float = spec(900.0, _EXECUTION, "a start that takes longer fails", "seconds")
    update_timeout: float = spec(1800.0, _EXECUTION, "an update, or a validation, that takes longer fails", "seconds")
    overrides: list[str] = spec([], _SCIENCE, "more of verl's own settings, as name=value")


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
    grad_norm: GradNorm = spec(GradNorm.clip, _SCIENCE, "clip: max_grad_norm bounds the global norm; set: every step has it")
    max_grad_norm: Optional[float] = spec(1.0, _SCIENCE, "global gradient norm is clipped or set to this; null: no clip")
    skip_below: float = spec(
        1e-6, _SCIENCE, "with grad_norm=set, a smaller gradient takes no step: what rounding leaves of equal rewards in float32"
    )
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
    shadow_arms: list[str] = spec([], _OUTPUT, "other arms whose losses are evaluated on each batch and train nothing")
    shadows: dict[str, Arm] = spec({}, _OUTPUT, "those arms' configs, filled in when the run is frozen")


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
    check: str = spec(MISSING, _OUTPUT, "ratio, config, batches or losses")
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
class TrackingConfig:
    """Where the numbers of a run's records go besides. What fails there, or hangs, changes nothing of the run."""

    backends: list[str] = spec(["console", "file"], _OUTPUT, "console, file (the records: always written), wandb")
    mode: TrackingMode = spec(TrackingMode.offline, _OUTPUT, "wandb: online needs the key; without it, or a server, offline")
    project: str = spec("${name}", _OUTPUT, "wandb: the project; the experiment's name")
    entity: Optional[str] = spec(None, _OUTPUT, "wandb: a user or a team; null: the key's own")
    key_variable: str = spec(
        "WANDB_API_KEY", _OUTPUT, "wandb: NAME of the environment variable that holds the key, never the key"
    )
    close_timeout: float = spec(10.0, _OUTPUT, "trackers that are not done so long after the run are ended", "seconds")


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
    tracking: TrackingConfig = spec(TrackingConfig, _OUTPUT, "where numbers go besides the records")
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


VARIANTS: dict[str, dict[str, type[Any]]] = {
    "stack": {"trainer": TrainerStack, "verl": VerlStack},
    "task": {"arithmetic": ArithmeticTask, "gsm8k": Gsm8kTask},
}
"""Groups whose members have fields of their own, by the member's ``name``."""


LOCATIONS: dict[str, tuple[str, ...]] = {
    "task.path": ("data",),
    "model.path": ("model", "tokenizer"),
    "model.revision": ("model", "tokenizer"),
}
"""Fields that say where an input lies. In a run's identity the input's own hash stands in their place."""
