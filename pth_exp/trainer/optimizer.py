"""AdamW over a policy's parameters, with the gradient's norm clipped or set; low-precision weights get float32 masters."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pth_exp.schema import GradNorm, OptimizerConfig, OptimizerName


@dataclass(frozen=True, slots=True)
class GradientReport:
    """What became of the gradient of one optimiser step.

    Attributes:
        norm: global norm, before it was clipped or set.
        clipped: whether the clip acted; None where the norm is set.
        skipped: there was no step, the norm being too small to be set.
    """

    norm: float
    clipped: bool | None
    skipped: bool = False


class MasterOptimizer:
    """An optimiser that steps float32 copies of the weights when the weights are of lower precision.

    A bfloat16 number has 8 bits of mantissa: a step of 1e-5 on a weight of 0.02 would be rounded away. float32 weights are
    stepped in place.

    Args:
        model: whose parameters are stepped.
        config: optimiser, and what happens to the gradient's norm before a step.
        lr: learning rate.
    """

    def __init__(self, model: nn.Module, config: OptimizerConfig, lr: float) -> None:
        self.weights = [p for p in model.parameters() if p.requires_grad]
        self.masters = [p if p.dtype == torch.float32 else p.detach().float().requires_grad_() for p in self.weights]
        self._copies = [(p, m) for p, m in zip(self.weights, self.masters, strict=True) if p is not m]
        self.settings = config
        self.optimizer = _build(self.masters, config, lr)

    @property
    def lr(self) -> float:
        """The learning rate that the next step will use."""
        return float(self.optimizer.param_groups[0]["lr"])

    def step(self) -> GradientReport:
        """One step, after the gradient was clipped to ``max_grad_norm`` or rescaled to it (``grad_norm``); clears the gradients.

        A gradient below ``skip_below`` has no direction to rescale: weights, moments and weight decay are left as they are.
        """
        for weight, master in self._copies:
            master.grad, weight.grad = None if weight.grad is None else weight.grad.float(), None
        gradients = [m.grad for m in self.masters if m.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        report = self._scale(gradients, norm)
        if not report.skipped:
            self.optimizer.step()
            with torch.no_grad():
                for weight, master in self._copies:
                    weight.copy_(master)
        self.optimizer.zero_grad(set_to_none=True)
        return report

    def _scale(self, gradients: list[Tensor], norm: Tensor) -> GradientReport:
        target = self.settings.max_grad_norm
        if self.settings.grad_norm is GradNorm.set:
            if target is None:
                raise ValueError("optimizer.grad_norm=set needs a norm; set optimizer.max_grad_norm=1")
            if norm < self.settings.skip_below:
                return GradientReport(float(norm), None, skipped=True)
            torch._foreach_mul_(gradients, target / norm)
            return GradientReport(float(norm), None)
        clipped = target is not None and bool(norm > target)
        if target is not None and clipped:
            nn.utils.clip_grads_with_norm_(self.masters, target, norm)
        return GradientReport(float(norm), clipped)

    def state(self) -> dict[str, Any]:
        """For a checkpoint: the optimiser's state, and the masters that differ from the weights."""
        return {"optimizer": self.optimizer.state_dict(), "masters": [m.detach() for _, m in self._copies]}

    @torch.no_grad()
    def load_state(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        for (_, master), saved in zip(self._copies, state["masters"], strict=True):
            master.copy_(saved)


def _build(parameters: list[Tensor], config: OptimizerConfig, lr: float) -> torch.optim.Optimizer:
    """Raises ValueError, naming the field, when an 8-bit optimiser is asked for and cannot run here."""
    arguments: dict[str, Any] = {
        "lr": lr,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "weight_decay": config.weight_decay,
    }
    if config.name is OptimizerName.adamw:
        return torch.optim.AdamW(parameters, fused=True, **arguments)
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError(f"optimizer.name={config.name} needs pip install 'pth-exp[8bit]', or optimizer.name=adamw")
    device = parameters[0].device
    if device.type != "cuda":
        raise ValueError(f"optimizer.name={config.name} needs a GPU, and this run is on {device}; set optimizer.name=adamw")
    library = importlib.import_module("bitsandbytes.optim")
    kind = {OptimizerName.adamw_8bit: "AdamW8bit", OptimizerName.paged_adamw_8bit: "PagedAdamW8bit"}[config.name]
    optimizer: torch.optim.Optimizer = getattr(library, kind)(parameters, **arguments)
    return optimizer
