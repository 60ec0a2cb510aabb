"""How much memory a run will take, before it has been run: an estimate from the model's config and the run's sizes.

With P parameters, of b bytes each in ``model.dtype``, R ranks, and n tokens in a rank's micro-batch (its responses times
``max_prompt_tokens + max_response_tokens``):

=====================  ==========================================================================================
on each GPU, verl      bytes
=====================  ==========================================================================================
weights                4 P / R: float32 masters, sharded
gradients              4 P / R
Adam's moments         8 P / R
gathered weights       b (parameters outside the layers + those of one layer): FSDP2 gathers layer by layer
activations            b n (L h + 8 h + 4 i): each layer's input is kept, one layer is computed again
logits                 2 · 4 n V: themselves and their gradient
vLLM                   ``stack.gpu_memory`` of the GPU; of that it needs at least b P / (GPUs of a server), and
                       2 L k d b bytes of cache for each token of ``stack.sampler_rows`` responses at once
=====================  ==========================================================================================

In the machine's memory: `VERL_PROCESSES`; the reference, 4 P, which FSDP2 keeps there; the sampler's weights put aside for
validation, b P a server. On a CPU everything is there. The trainer has weights and gradients of its own type beside
float32 masters, a sampler that is the learner, and activations of the responses that ``stack.activations`` keeps alive. What is
left out: CUDA's own memory, fragmentation, kernels' workspace.
"""

from __future__ import annotations

from dataclasses import dataclass

from pth_exp import machine
from pth_exp.freeze import FrozenError, FrozenRun
from pth_exp.launchers.shapes import NoShape, Shape, shape_of
from pth_exp.schema import Activations, Config, Dtype, OptimizerName, TrainerStack, VerlStack
from pth_exp.verl_stack.mapping import needs_reference

GIB = 1 << 30
GB = 10**9

VERL_PROCESSES = 64 * GB // 10
"""Bytes of the processes of a verl job with a model of next to no size: the most that 22 of them held, on a CPU."""

LIBRARIES = 1 * GB // 2
"""Bytes of a trainer's process before it has a model: measured."""

_BYTES = {Dtype.float32: 4, Dtype.bfloat16: 2}


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes, by what takes them.

    Attributes:
        device: on each GPU, without vLLM; empty on a CPU.
        sampler: what vLLM needs on each GPU at least, within its share.
        host: in the machine's memory.
        share: of a GPU that vLLM takes.
    """

    device: dict[str, int]
    sampler: dict[str, int]
    host: dict[str, int]
    share: float

    @property
    def smallest_gpu(self) -> int:
        """Bytes of the smallest GPU on which learner and sampler both find room."""
        learner, sampler = sum(self.device.values()), sum(self.sampler.values())
        return round(max(learner / (1 - self.share), sampler / self.share if sampler else 0))


def estimate(config: Config, shape: Shape) -> Estimate:
    """Of one run; where ``stack.device`` is auto, as it would be on this machine."""
    if isinstance(config.stack, VerlStack):
        return _verl(config, config.stack, shape)
    assert isinstance(config.stack, TrainerStack)
    return _trainer(config, config.stack, shape)


def of_verl_job(run: FrozenRun) -> int:
    """Bytes of the machine's memory for a frozen run on verl; 0 for another stack's. At the least what its processes take."""
    if run.config_values["stack"]["name"] != "verl":
        return 0
    try:
        return sum(estimate(run.config, shape_of(run.config.model)).host.values())
    except (NoShape, FrozenError):  # whatever else is wrong, the worker says it
        return VERL_PROCESSES


def _verl(config: Config, stack: VerlStack, shape: Shape) -> Estimate:
    size, parameters = _BYTES[config.model.dtype], shape.parameters
    rows = config.prompts_per_update * config.responses_per_prompt // stack.ranks
    length = config.max_prompt_tokens + config.max_response_tokens
    tokens = min(stack.micro_batch_rows or rows, rows) * length
    learner = {
        "weights": 4 * parameters // stack.ranks,
        "gradients": 4 * parameters // stack.ranks,
        "Adam's moments": 8 * parameters // stack.ranks,
        "gathered weights": size * (shape.ends + shape.layer),
        "activations": _activations(size, tokens, shape, again=True),
        "logits": 8 * tokens * shape.vocabulary,
    }
    sampler = {"weights": size * parameters, "cache": _cache(size, stack.sampler_rows * length, shape)}
    reference = {"reference": 4 * parameters} if needs_reference(config) else {}
    aside = {"sampler's weights put aside": size * parameters * stack.ranks} if config.validation.every is not None else {}
    beside = {"processes": VERL_PROCESSES, **reference, **aside}
    if stack.device != "cpu":
        return Estimate(learner, sampler, beside, stack.gpu_memory)
    every_rank = {f"learner's {name}": stack.ranks * amount for name, amount in learner.items()}
    every_server = {f"sampler's {name}": stack.ranks * amount for name, amount in sampler.items()}
    return Estimate({}, {}, {**beside, **every_rank, **every_server}, 0.0)


def _trainer(config: Config, stack: TrainerStack, shape: Shape) -> Estimate:
    size, parameters = _BYTES[config.model.dtype], shape.parameters
    copies = 0 if size == 4 else 8  # float32 masters and, during a step, their gradients
    rows = config.prompts_per_update * config.responses_per_prompt
    if stack.activations is Activations.micro_batch:
        rows = min(rows, -(-stack.micro_batch_tokens // config.max_response_tokens))
    prompts = -(-rows // config.responses_per_prompt)  # a prompt is computed once for its responses
    responses = rows * config.max_response_tokens
    length = config.max_prompt_tokens + config.max_response_tokens
    learner = {
        "weights": (size + copies // 2) * parameters,
        "gradients": (size + copies // 2) * parameters,
        "Adam's moments": (8 if config.optimizer.name is OptimizerName.adamw else 2) * parameters,
        "reference": size * parameters if needs_reference(config) else 0,
        "activations": _activations(size, prompts * config.max_prompt_tokens + responses, shape, again=False),
        "logits": 8 * responses * shape.vocabulary,
        "cache": _cache(size, stack.sampler_rows * length, shape),
    }
    if stack.device == "cpu" or (stack.device == "auto" and not machine.visible_gpus()):
        return Estimate({}, {}, {"libraries": LIBRARIES, **learner}, 0.0)
    return Estimate(learner, {}, {"libraries": LIBRARIES}, 0.0)


def _activations(size: int, tokens: int, shape: Shape, again: bool) -> int:
    """Of a backward pass over ``tokens``; ``again``: layers are computed once more, so that one layer's are alive at a time."""
    one = 8 * shape.hidden + 4 * shape.intermediate
    return size * tokens * (shape.layers * shape.hidden + one if again else shape.layers * one)


def _cache(size: int, tokens: int, shape: Shape) -> int:
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * size * tokens


def told(estimate: Estimate) -> str:
    """The estimate in a few lines, in units of 10^9 bytes."""
    lines = []
    if estimate.device:
        lines.append(f"each GPU, learner: {_amounts(estimate.device)}")
    if estimate.sampler:
        lines.append(f"each GPU, vLLM: {estimate.share:.0%} of it; needs at least {_amounts(estimate.sampler)}")
    if estimate.device:
        lines.append(f"smallest GPU for that: {estimate.smallest_gpu / GB:.1f} GB")
    if estimate.host:
        lines.append(f"the machine's memory: {_amounts(estimate.host)}")
    return "\n".join(lines)


def _amounts(parts: dict[str, int]) -> str:
    named = ", ".join(f"{name} {amount / GB:.1f}" for name, amount in parts.items() if amount >= GB / 20)
    return f"{sum(parts.values()) / GB:.1f} GB" + f" ({named})" * bool(named)
