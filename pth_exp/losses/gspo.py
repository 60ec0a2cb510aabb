"""Group sequence policy optimisation: the clip acts on the ratio of a response."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pth_exp.losses.aggregate import aggregate, response_mean, token_share
from pth_exp.losses.ppo import check_clip
from pth_exp.losses.ratio import geometric_log_ratio, log_ratio
from pth_exp.losses.registry import register, required
from pth_exp.losses.types import TokenBatch
from pth_exp.schema import Aggregation


@register("gspo", check=check_clip)
def gspo(batch: TokenBatch, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> tuple[Tensor, Mapping[str, Tensor]]:
    """GSPO (Zheng et al., 2025, arXiv 2507.18071).

    s = exp(clamp(mean_t(logp - old_logp), -20, 20)), the geometric mean of a response's token ratios;
    term = max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high)); the loss is the mean of the terms over the responses.

    The clip range is the paper's, and so is the mean over responses; verl writes the same gradient token by token (a detached s
    times pi/sg(pi)), aggregates it as it is told, token-mean unless it is told otherwise, and clamps the log-ratio above at 10
    only. There is no dual clip: a bad response's ratio is not bounded above.

    A reading: the paper's old policy generated the responses. Recomputed at the start of an update, as verl's is unless it is
    told to bypass that, it makes s 1 with one step a batch; the arm therefore takes ``old_logp`` from the sampler.

    Raises ``ValueError`` if the batch has no ``old_logp``.
    """
    old_logp = required(batch, "old_logp")
    ratio = geometric_log_ratio(batch.logp, old_logp, batch.mask).exp().squeeze(1)
    free = -batch.advantage * ratio
    clipped = -batch.advantage * ratio.clamp(1 - clip_low, 1 + clip_high)
    return response_mean(torch.maximum(free, clipped), batch.mask, batch.totals), {
        "actor/pg_clipfrac": token_share((clipped > free)[:, None], batch.mask, batch.totals),
        "actor/ppo_kl": aggregate(-log_ratio(batch.logp, old_logp), batch.mask, Aggregation.token_mean, totals=batch.totals),
    }
