"""Tokens without any probability, as on the trainer stack: the padding token, in vLLM, the learner and the reference alike.

A model gives its padding token some probability. Where one engine counts it and another does not, their log-probabilities differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from torch import nn

LOWEST: Final = -1e4
"""The logit of such a token: its probability is 0 in every type, and finite, since verl's entropy multiplies the two."""

VLLM_LOWEST: Final = -100.0
"""What vLLM is to add to the logit: the least that it takes, which leaves a probability of 1e-44 times what it was."""


def forbid(model: nn.Module, tokens: Sequence[int]) -> None:
    """From now on ``model``'s logits at ``tokens`` are ``LOWEST``; no gradient reaches them."""
    if not tokens:
        return
    places = list(tokens)

    def lower(_module: nn.Module, _inputs: Any, output: Any) -> None:
        output.logits[..., places] = LOWEST

    model.register_forward_hook(lower)
