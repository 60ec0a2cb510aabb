"""Rows of the records, made from what the loop has in hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pth_exp.probes import (
    Shadow,
    batch_id,
    generation_id,
    is_due,
    probe_backward,
    probe_update,
    ratio_histogram,
    shadow_pairs,
)
from pth_exp.schema import Config
from pth_exp.trainer.learner import UpdateReport
from pth_exp.trainer.rollout import Rollout


def update_row(
    update: int,
    config: Config,
    trained: Rollout,
    drawn: Sequence[Rollout],
    arm: Shadow,
    shadows: Sequence[Shadow],
    lr: float,
    weights_before: str,
    report: UpdateReport,
) -> dict[str, Any]:
    """The row of ``updates`` without its timings; losses and norms are means over the batch's optimiser steps.

    On some updates (``is_due``) the first step's backward pass is held against the equations of the arm and of the penalty.
    """
    steps = report.steps
    first = steps[0]
    clipped = [step.gradient.clipped for step in steps]
    kl_losses = [step.kl_loss for step in steps if step.kl_loss is not None]
    row = {
        "update": update,
        "sampler/version": trained.version,
        "sampler/fingerprint": trained.fingerprint,
        "learner/fingerprint": weights_before,
        "data/age": update - trained.version,
        "data/batch_index": trained.draw,
        "reward/generated": float(torch.cat([rollout.rewards for rollout in drawn]).mean()),
        "reward/trained": float(trained.rewards.mean()),
        "actor/loss": _mean([step.loss for step in steps]),
        "actor/pg_loss": _mean([float(step.output.loss.detach()) for step in steps]),
        "actor/kl_loss": _mean(kl_losses) if kl_losses else None,
        "actor/grad_norm": _mean([step.gradient.norm for step in steps]),
        "actor/grad_clipped": None if clipped == [None] * len(steps) else any(clipped),
        "actor/grad_skipped": sum(step.gradient.skipped for step in steps),
        "actor/lr": lr,
        "response_length/mean": float(trained.lengths.double().mean()),
        "response_length/clip_ratio": float(trained.truncated.double().mean()),
        **probe_update(arm.loss, first.batch, [step.output for step in steps], arm.old_policy),
        "shadow/pairs": shadow_pairs(arm.name, first.batch, first.output.token_coef, shadows, trained.rewards, trained.group),
    }
    if is_due(update):
        row |= probe_backward(config.arm, config.kl, first.batch, first.loss, first.logp_grad)
    return row


def batch_row(update: int, trained: Rollout, drawn: Sequence[Rollout], report: UpdateReport) -> dict[str, Any]:
    """The row of ``batches``: which batch this update trained on, and what it drew."""
    rows = trained.rows()
    tokens = [row[:length] for row, length in zip(trained.tokens.tolist(), trained.lengths.tolist(), strict=True)]
    return {
        "update": update,
        "batch_id": batch_id([(prompt, row) for (prompt, _), row in zip(rows, tokens, strict=True)]),
        "generation_id": generation_id(trained.draw, trained.version),
        "draw": trained.draw,
        "prompt_ids": [prompt.id for prompt in trained.prompts],
        "rows": [[prompt, number] for prompt, number in rows],
        "rewards": trained.rewards.tolist(),
        "lengths": trained.lengths.tolist(),
        "generated": [{"draw": r.draw, "prompt_ids": [prompt.id for prompt in r.prompts]} for r in drawn],
        "histogram": ratio_histogram(report.steps[0].batch),
    }


def timings(seconds: Mapping[str, float], ref: float) -> dict[str, float]:
    """Columns of the wall times. ``ref`` seconds of ``update_actor`` went to the reference; ``step`` is the whole update."""
    parts = {**seconds, "ref": ref, "update_actor": seconds["update_actor"] - ref, "step": sum(seconds.values())}
    return {f"timing_s/{part}": value for part, value in parts.items()}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
