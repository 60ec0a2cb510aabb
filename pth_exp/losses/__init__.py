"""Losses: pure functions of a TokenBatch, and their registry."""

from pth_exp.losses import (  # noqa: F401  importing a module registers its losses
    cispo,
    decoupled,
    gspo,
    m2po,
    masked,
    ppo,
    san,
    san_reference,
    sequence,
    tis,
)
from pth_exp.losses.advantage import group_advantages
from pth_exp.losses.aggregate import aggregate, aggregation_weights, check_aggregation
from pth_exp.losses.kl import kl_penalty
from pth_exp.losses.ratio import LOG_RATIO_LIMIT, log_ratio
from pth_exp.losses.registry import BoundLoss, get_loss, loss_names, register, required
from pth_exp.losses.types import Loss, LossOutput, TokenBatch, Totals

__all__ = [
    "LOG_RATIO_LIMIT",
    "BoundLoss",
    "Loss",
    "LossOutput",
    "TokenBatch",
    "Totals",
    "aggregate",
    "aggregation_weights",
    "check_aggregation",
    "get_loss",
    "group_advantages",
    "kl_penalty",
    "log_ratio",
    "loss_names",
    "register",
    "required",
]
