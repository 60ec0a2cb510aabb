"""The registry's loss as verl calls it: micro-batch by micro-batch, with every log-probability that the arm may read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pth_exp.losses import BoundLoss, Totals, kl_penalty
from pth_exp.losses.types import TokenBatch
from pth_exp.schema import KlConfig

Row = tuple[int, int]
"""A response: its prompt's place in the data set, and its number."""


@dataclass(slots=True)
class StepParts:
    """What one optimiser step of one rank saw, summed over its micro-batches; tensors by row, without padding.

    Attributes:
        rows: the responses, in the order in which they were seen.
        logp: of each, under the learner.
        token_coef: d loss / d surprisal.
        logp_grad: d total loss / d logp, out of the backward pass.
        loss: this rank's part of the total loss.
        pg_loss: of the arm's loss.
        kl_loss: of the penalty before its coefficient; None without one.
        metrics: of the loss's metrics.
        grad_norm: global norm before the clip.
        lr: that the step used.
    """

    rows: list[Row] = field(default_factory=list)
    logp: list[Tensor] = field(default_factory=list)
    token_coef: list[Tensor] = field(default_factory=list)
    logp_grad: list[Tensor] = field(default_factory=list)
    loss: float = 0.0
    pg_loss: float = 0.0
    kl_loss: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    grad_norm: float | None = None
    lr: float | None = None


class PolicyLoss:
    """What ``set_loss_fn`` is given; keeps what the records need until it is fetched.

    Args:
        loss: the arm's.
        kl: the penalty to the reference policy.
    """

    def __init__(self, loss: BoundLoss, kl: KlConfig) -> None:
        self.loss, self.kl = loss, kl
        self.steps: list[StepParts] = [StepParts()]

    def take(self) -> list[StepParts]:
        """The optimiser steps since the last call."""
        taken, self.steps = self.steps[:-1], [StepParts()]
        return taken

    def step_done(self, grad_norm: float, lr: float) -> None:
        """Called once a rank after each optimiser step."""
        self.steps[-1].grad_norm, self.steps[-1].lr = grad_norm, lr
        self.steps.append(StepParts())

    def __call__(self, model_output: Any, data: Any, dp_group: Any = None) -> tuple[Tensor, dict[str, Any]]:
        """The loss of one micro-batch, as a part of the whole batch's, times the number of ranks: verl averages over them."""
        from verl.workers.utils.padding import no_padding_2_padding

        logp = no_padding_2_padding(model_output["log_probs"], data)
        batch = token_batch(logp, data)
        output = self.loss(batch)
        total, penalty = output.loss, None
        if self.kl.coef:
            reference = needed(batch.ref_logp, "ref_log_prob")
            kl = self.kl
            penalty = kl_penalty(logp, reference, batch.mask, kl.estimator, kl.clamp, kl.aggregation, batch.totals)
            total = total + kl.coef * penalty
        ranks = int(data["dp_size"])
        part = self.steps[-1]
        place = len(part.rows)
        lengths = batch.mask.sum(dim=1).tolist()
        part.rows += list(zip(_numbers(data["index"]), _numbers(data["session_id"]), strict=True))
        part.logp += _unpadded(logp, lengths)
        part.token_coef += _unpadded(output.token_coef, lengths)
        part.logp_grad += _unpadded(torch.full_like(logp, torch.nan), lengths)
        part.loss += float(total.detach())
        part.pg_loss += float(output.loss.detach())
        if penalty is not None:
            part.kl_loss = (part.kl_loss or 0.0) + float(penalty.detach())
        for name, value in output.metrics.items():
            part.metrics[name] = part.metrics.get(name, 0.0) + value

        def keep(gradient: Tensor) -> None:
            part.logp_grad[place : place + len(lengths)] = _unpadded(gradient / ranks, lengths)

        logp.register_hook(keep)
        return total * ranks, {}


def token_batch(logp: Tensor, data: Any) -> TokenBatch:
    """verl's micro-batch as the losses take it; raises ``ValueError`` for an input that verl should have and has not.

    ``old_log_probs`` is the sampler's or the recomputed policy's, as ``algorithm.rollout_correction.bypass_mode`` says.
    """
    present = set(data.keys())
    names = [n for n in ("response_mask", "advantages", "rollout_log_probs", "old_log_probs", "ref_log_prob") if n in present]
    padded = data.select(*names).to_padded_tensor()
    mask = needed(padded.get("response_mask", None), "response_mask").bool()
    advantages = needed(padded.get("advantages", None), "advantages")
    old = needed(padded.get("old_log_probs", None), "old_log_probs")
    totals = Totals(int(data["batch_num_tokens"]), int(data["global_batch_size"]))
    return TokenBatch(
        logp=logp,
        advantage=advantages[:, 0],
        mask=mask,
        sampler_logp=padded.get("rollout_log_probs", None),
        old_logp=old,
        ref_logp=padded.get("ref_log_prob", None),
        totals=None if totals == Totals.of(mask) else totals,
    )


def needed(value: Tensor | None, name: str) -> Tensor:
    if value is None:
        raise ValueError(f"verl's batch has no {name}, which the loss reads; nothing stands in for it")
    return value


def _unpadded(values: Tensor, lengths: list[int]) -> list[Tensor]:
    return [row[:length].detach().cpu().clone() for row, length in zip(values, lengths, strict=True)]


def _numbers(values: Any) -> list[int]:
    return [int(getattr(value, "data", value)) for value in (values.tolist() if hasattr(values, "tolist") else values)]
