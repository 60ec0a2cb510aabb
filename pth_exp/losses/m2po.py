"""Second-moment trust policy optimisation: tokens are masked until the batch's second moment is small enough."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pth_exp.losses.aggregate import aggregate, check_aggregation, token_share
from pth_exp.losses.ratio import log_ratio
from pth_exp.losses.registry import register, required
from pth_exp.losses.types import TokenBatch
from pth_exp.schema import Aggregation


def _check_m2po(*, threshold: float, harmful_only: bool, aggregation: Aggregation | str, norm_tokens: float | None) -> None:
    if not threshold > 0:
        raise ValueError(f"threshold is {threshold!r}; it must be above 0")
    check_aggregation(aggregation, norm_tokens)


def largest_kept(squares: Tensor, threshold: float) -> Tensor:
    """Scalar: the largest of the [n] squares up to which their mean is at most ``threshold``; -1 if there is none.

    Equal squares are kept or dropped together, so that no order of tokens decides.
    """
    ordered = squares.double().sort().values
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=ordered.device)
    last_of_its_kind = torch.ones_like(ordered, dtype=torch.bool)
    last_of_its_kind[:-1] = ordered[1:] != ordered[:-1]
    kept = ordered[(means <= threshold) & last_of_its_kind]
    return kept[-1] if len(kept) else ordered.new_tensor(-1.0)


@register("m2po", check=_check_m2po, splittable=False)
def m2po(
    batch: TokenBatch,
    *,
    threshold: float = 0.04,
    harmful_only: bool = False,
    aggregation: Aggregation | str = Aggregation.token_mean,
    norm_tokens: float | None = None,
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """M2PO (Zheng et al., 2025, arXiv 2510.01161): a reading.

    d_t = clamp(logp - old_logp, -20, 20); the tokens of the whole batch with the largest sg(d_t)^2 are masked until the mean of
    the others' is at most ``threshold``; term_t = -A exp(d_t) where a token is not masked, else 0, averaged over all tokens,
    masked ones counted. No clip is left. 0.04 is the paper's threshold for all its runs.

    What was established: the objective, M2 as the mean of squared log-ratios and the masking in words (paper, project page); the
    listing of the algorithm could not be read. The authors' released code considers only the tokens that a clip could stop (A > 0
    with r > 1, A < 0 with r < 1): ``harmful_only``; and then clips instead of masking, within floors. AReaL's port considers all,
    the default here, measures the proximal policy instead of pi_theta, and takes masked tokens out of the count. Ties are masked
    together, which no source says.

    A reading too: the old policy is the sampler, as the paper's behaviour policy is (see ``gspo``).

    Raises ``ValueError`` if the batch has no ``old_logp``.
    """
    log_r = log_ratio(batch.logp, required(batch, "old_logp"))
    shift = log_r.detach()
    square = shift.square()
    considered = batch.mask
    if harmful_only:
        considered = considered & (batch.advantage[:, None] * shift > 0)
    masked = considered & (square.double() > largest_kept(square[considered], threshold))
    terms = (-batch.advantage[:, None] * log_r.exp()).masked_fill(masked, 0.0)
    return aggregate(terms, batch.mask, aggregation, norm_tokens), {
        "actor/ppo_kl": aggregate(-log_r, batch.mask, Aggregation.token_mean),
        "rollout_corr/rollout_rs_masked_fraction": token_share(masked, batch.mask),
        "m2po/M2": aggregate(square, considered, Aggregation.token_mean),
        "m2po/M2_after": aggregate(square, considered & ~masked, Aggregation.token_mean),
    }
