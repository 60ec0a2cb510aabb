"""All that is measured on one update, as entries of its row in the records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pth_exp.losses.registry import BoundLoss
from pth_exp.losses.types import Loss, LossOutput, TokenBatch
from pth_exp.probes.coefficient import coefficient_entries, sampler_response
from pth_exp.probes.ess import CAP, effective_sample_share, truncated_share
from pth_exp.probes.kl import kl_entries
from pth_exp.probes.ratio import log_policy_over_sampler, ratio_entries
from pth_exp.schema import OldPolicy

LOSS_METRICS = (
    "actor/pg_clipfrac",
    "actor/pg_clipfrac_lower",
    "actor/ppo_kl",
    "rollout_corr/rollout_rs_masked_fraction",
    "rollout_corr/rollout_rs_seq_masked_fraction",
)
"""Metrics of losses that have a column of their own; the others of a loss go under ``extra/``."""


def probe_update(loss: Loss, batch: TokenBatch, outputs: Sequence[LossOutput], old_policy: OldPolicy) -> dict[str, Any]:
    """Entries of an update's row: ``ratio/``, ``rollout_corr/``, ``coef/``, the loss's metrics and ``tokens/trained``.

    What was not, or cannot be, measured is None. No gradient is kept and nothing is changed.

    Args:
        loss: the arm's loss, evaluated once more here.
        batch: the whole batch of the first optimiser step, taken at the parameters at the start of the update.
        outputs: the loss's output at each optimiser step on the batch, the first step's first.
        old_policy: the arm's, which says whether ``old_logp`` is the sampler's.
    """
    log_ratio = log_policy_over_sampler(batch)
    clip_fractions = [o.metrics["actor/pg_clipfrac"] for o in outputs if "actor/pg_clipfrac" in o.metrics]
    coef = outputs[0].token_coef
    own = dict.fromkeys(name for output in outputs for name in output.metrics if name not in LOSS_METRICS)
    return {
        **{name: _mean([o.metrics[name] for o in outputs if name in o.metrics]) for name in LOSS_METRICS},
        **{f"extra/{name}": _mean([o.metrics[name] for o in outputs if name in o.metrics]) for name in own},
        **ratio_entries(batch),
        "ratio/clipfrac_by_step": clip_fractions or None,
        **kl_entries(log_ratio),
        "rollout_corr/ess": None if log_ratio is None else effective_sample_share(log_ratio),
        "rollout_corr/rollout_is_ratio_fraction_high": None if log_ratio is None else truncated_share(log_ratio, _cap(loss)),
        **coefficient_entries(batch, coef),
        "coef/sampler_response": sampler_response(loss, batch, coef, old_policy),
        "tokens/trained": int(batch.mask.sum()),
    }


def _cap(loss: Loss) -> float:
    """The arm's own cap on pi_theta/q, or the paper's."""
    cap = loss.parameters.get("cap") if isinstance(loss, BoundLoss) else None
    return CAP if cap is None else float(cap)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
