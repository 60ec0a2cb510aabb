"""What an equation is evaluated on, and what comes of it. Log-probabilities are in nats."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class WrittenBatch:
    """A batch without padding: the tokens of all responses in one row, response after response. Kept in float64.

    Attributes:
        lengths: [B] number of tokens of each response; a response may have none.
        advantage: [B] advantage of each response.
        logp: [n] log-probability of each token under the learner.
        sampler_logp: [n] under the sampler, as it recorded it.
        old_logp: [n] the denominator of the PPO ratio.
        ref_logp: [n] under the reference policy.

    Raises ``ValueError`` for arrays whose sizes do not belong together.
    """

    lengths: Array
    advantage: Array
    logp: Array
    sampler_logp: Array | None = None
    old_logp: Array | None = None
    ref_logp: Array | None = None

    def __post_init__(self) -> None:
        lengths = np.asarray(self.lengths)
        if lengths.ndim != 1 or (lengths.size and (lengths.dtype.kind not in "iu" or lengths.min() < 0)):
            raise ValueError(f"lengths is {lengths!r}, not a row of whole numbers of tokens")
        object.__setattr__(self, "lengths", lengths.astype(np.int64))
        for name in (f.name for f in fields(self)[1:]):
            given = getattr(self, name)
            if given is None:
                continue
            value = np.asarray(given, dtype=np.float64)
            size = len(lengths) if name == "advantage" else int(lengths.sum())
            if value.shape != (size,):
                raise ValueError(f"{name} has shape {value.shape}, not ({size},)")
            object.__setattr__(self, name, value)


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """A loss on a batch.

    Attributes:
        value: the loss.
        gradient: [n] d loss / d logp, with every sg(...) held constant.
    """

    value: float
    gradient: Array
