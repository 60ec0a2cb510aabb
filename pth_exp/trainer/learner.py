"""The learner: the policy in training, its reference, its optimiser."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pth_exp.losses.kl import kl_penalty
from pth_exp.losses.types import Loss, LossOutput, TokenBatch
from pth_exp.schema import Activations, KlConfig, OldPolicy
from pth_exp.trainer.optimizer import GradientReport, MasterOptimizer
from pth_exp.trainer.policy import Policy, Prefix
from pth_exp.trainer.rollout import Rollout


@dataclass(frozen=True, slots=True)
class StepReport:
    """One optimiser step on a batch.

    Attributes:
        batch: what the loss was given; ``logp`` is detached.
        output: what it returned.
        loss: the total loss.
        kl_loss: the penalty before its coefficient, None when there is none.
        logp_grad: [B, T] d total loss / d logp, from the backward pass.
        gradient: what became of the gradient before the step.
    """

    batch: TokenBatch
    output: LossOutput
    loss: float
    kl_loss: float | None
    logp_grad: Tensor
    gradient: GradientReport


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """All steps on one batch.

    Attributes:
        steps: one report an optimiser step.
        ref_seconds: wall time of the reference's forward pass.
    """

    steps: Sequence[StepReport]
    ref_seconds: float


class Learner:
    """Trains a policy on whole batches.

    Args:
        policy: trained in place.
        reference: the reference policy, or None when nothing reads it.
        optimizer: over the policy's parameters.
        loss: the arm's loss.
        old_policy: whose log-probabilities are ``old_logp``; they are fixed at the first step on a batch.
        kl: the penalty to the reference policy.
        steps_per_batch: optimiser steps on each batch.
        micro_batch_tokens: padded response tokens of one forward pass.
        activations: whether all graphs of a batch are alive during the backward pass.
    """

    def __init__(
        self,
        policy: Policy,
        reference: Policy | None,
        optimizer: MasterOptimizer,
        loss: Loss,
        old_policy: OldPolicy,
        kl: KlConfig,
        steps_per_batch: int,
        micro_batch_tokens: int,
        activations: Activations,
    ) -> None:
        self.policy, self.reference, self.optimizer, self.loss = policy, reference, optimizer, loss
        self.old_policy, self.kl, self.steps_per_batch = old_policy, kl, steps_per_batch
        self.micro_batch_tokens, self.activations = micro_batch_tokens, activations

    def update(self, rollout: Rollout, advantage: Tensor) -> UpdateReport:
        """``steps_per_batch`` optimiser steps on one batch; ``advantage`` is [B]."""
        device = self.policy.device
        mask, advantage = rollout.mask.to(device), advantage.to(device)
        sampler_logp = None if rollout.sampler_logp is None else rollout.sampler_logp.to(device)
        clock = Clock(device)
        with torch.no_grad():
            ref_logp = None if self.reference is None else self._log_probs(self.reference, rollout)
        ref_seconds = clock.lap("ref")

        steps: list[StepReport] = []
        old_logp: Tensor | None = None
        for step in range(self.steps_per_batch):
            logp = self._forward(rollout)
            if step == 0:
                # The policy at the start of the update is the one of the first forward pass. It is not run twice, so the ratio to
                # a recomputed old policy is 1 to the last bit.
                old_logp = logp.detach().clone() if self.old_policy is OldPolicy.recomputed else sampler_logp
            batch = TokenBatch(logp, advantage, mask, sampler_logp, old_logp, ref_logp)
            output = self.loss(batch)
            total, kl_loss = output.loss, None
            if self.kl.coef and ref_logp is not None:
                penalty = kl_penalty(logp, ref_logp, mask, self.kl.estimator, self.kl.clamp, self.kl.aggregation)
                total, kl_loss = total + self.kl.coef * penalty, float(penalty.detach())
            logp_grad = self._backward(rollout, logp, total)
            gradient = self.optimizer.step()
            seen = TokenBatch(logp.detach(), advantage, mask, sampler_logp, old_logp, ref_logp)
            steps.append(StepReport(seen, output, float(total.detach()), kl_loss, logp_grad, gradient))
        return UpdateReport(steps, ref_seconds)

    def _forward(self, rollout: Rollout) -> Tensor:
        """[B, T] log-probabilities that the loss differentiates: with their graph, or as a leaf."""
        if self.activations is Activations.whole_batch:
            logp = self._log_probs(self.policy, rollout)
            logp.retain_grad()
            return logp
        with torch.no_grad():
            return self._log_probs(self.policy, rollout).requires_grad_()

    def _backward(self, rollout: Rollout, logp: Tensor, total: Tensor) -> Tensor:
        """Accumulates d total / d parameters; returns [B, T] d total / d logp.

        With micro-batches the loss has been differentiated on the whole batch with respect to ``logp``; what is left is the
        product of that vector with d logp / d parameters, which is a sum over rows and can be taken a few rows at a time.
        """
        torch.autograd.backward(total)
        gradient = logp.grad
        if gradient is None:
            raise RuntimeError("the loss did not read logp: no gradient reaches the policy")
        return gradient if self.activations is Activations.whole_batch else self._backward_in_parts(rollout, gradient)

    def _backward_in_parts(self, rollout: Rollout, gradient: Tensor) -> Tensor:
        """Returns what arrived of [B, T] ``gradient`` at the log-probabilities of the parts, so that a lost row is seen."""
        arrived = torch.zeros_like(gradient)
        for rows in micro_batches(rollout.lengths, self.micro_batch_tokens):
            part = _rows_log_probs(self.policy, rollout, rows, None)
            part.retain_grad()
            here = rows.to(gradient.device)
            torch.autograd.backward(part, gradient[here, : part.shape[1]])
            if part.grad is not None:
                arrived[here, : part.shape[1]] = part.grad
        return arrived

    def _log_probs(self, policy: Policy, rollout: Rollout) -> Tensor:
        parts, order = [], []
        # With gradients, the graph of a prefix that is shared by all micro-batches lives as long as theirs do.
        shared = policy.read([p.tokens for p in rollout.prompts]) if self.activations is Activations.whole_batch else None
        width = rollout.tokens.shape[1]
        for rows in micro_batches(rollout.lengths, self.micro_batch_tokens):
            part = _rows_log_probs(policy, rollout, rows, shared)
            parts.append(F.pad(part, (0, width - part.shape[1])))
            order.append(rows)
        back = torch.argsort(torch.cat(order)).to(policy.device)
        return torch.cat(parts)[back]


def micro_batches(lengths: Tensor, tokens: int) -> Iterator[Tensor]:
    """Splits rows [B] by length so that each part has at most ``tokens`` padded tokens, one row at least; longest first."""
    order = torch.argsort(lengths, descending=True, stable=True)
    start = 0
    while start < len(order):
        count = max(1, tokens // max(1, int(lengths[order[start]])))
        yield order[start : start + count]
        start += count


def _rows_log_probs(policy: Policy, rollout: Rollout, rows: Tensor, shared: Prefix | None) -> Tensor:
    """[R, W] log-probabilities of the tokens of ``rows``, W the longest of their lengths, 0 in padding. A prompt is read once."""
    width = max(1, int(rollout.lengths[rows].max()))
    owner = rollout.group[rows]
    if shared is None:
        present, owner = torch.unique(owner, return_inverse=True)
        shared = policy.read([rollout.prompts[i].tokens for i in present])
    prefix = shared.select(owner.to(policy.device))
    tokens = rollout.tokens[rows, :width].to(policy.device)
    first = prefix.logits[:, None]
    logits = torch.cat([first, policy.continue_with(prefix, tokens[:, :-1])], dim=1) if width > 1 else first
    logp = policy.log_probs(logits).gather(2, tokens[:, :, None]).squeeze(2)
    padding = torch.arange(width) >= rollout.lengths[rows, None]
    return logp.masked_fill(padding.to(policy.device), 0.0)


class Clock:
    """Wall time by part; waits for the device so that a part pays for its own work."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds: dict[str, float] = {}
        self._last = self._now()

    def lap(self, part: str) -> float:
        """Adds the time since the last lap to ``part``."""
        now = self._now()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self._last = now
        return self.seconds[part]

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
