"""What the sampler hands to the learner: prompts, responses and who made them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered prompt.

    Attributes:
        index: its place in the data set's split.
        id: prompt ID, ``split:index:hash of the tokens``.
        tokens: the rendered tokens; at least one.
    """

    index: int
    id: str
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Response:
    """One sampled response.

    Attributes:
        tokens: sampled tokens; the end token counts as one.
        logp: log q of each token under the distribution it was drawn from, nats.
        truncated: no end token came within the limit.
    """

    tokens: tuple[int, ...]
    logp: tuple[float, ...]
    truncated: bool


@dataclass(frozen=True, slots=True)
class Rollout:
    """One batch: P prompts, n responses each, B = P·n rows ordered by prompt, then by response number.

    Attributes:
        draw: index of the batch in the data order.
        version: number of updates in the weights that generated it.
        fingerprint: of those weights, taken when they generated it.
        prompts: [P] in drawn order.
        tokens: [B, T] int64; slots outside ``mask`` hold 0.
        mask: [B, T] bool, true at response tokens that train.
        lengths: [B] int64 tokens of each response.
        sampler_logp: [B, T] float32 log q; None when the sampler was not to record it.
        truncated: [B] bool.
        rewards: [B] float32.
    """

    draw: int
    version: int
    fingerprint: str
    prompts: tuple[Prompt, ...]
    tokens: Tensor
    mask: Tensor
    lengths: Tensor
    sampler_logp: Tensor | None
    truncated: Tensor
    rewards: Tensor

    @property
    def group(self) -> Tensor:
        """[B] each row's prompt, as an index into ``prompts``."""
        return torch.arange(len(self.prompts)).repeat_interleave(self.tokens.shape[0] // len(self.prompts))

    def rows(self) -> list[tuple[str, int]]:
        """[B] prompt ID and response number of each row."""
        n = self.tokens.shape[0] // len(self.prompts)
        return [(prompt.id, number) for prompt in self.prompts for number in range(n)]

    def state(self) -> dict[str, Any]:
        """Plain values and tensors, as a checkpoint keeps them."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {**values, "prompts": [(p.index, p.id, list(p.tokens)) for p in self.prompts]}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        prompts = tuple(Prompt(index, name, tuple(tokens)) for index, name, tokens in state["prompts"])
        return cls(**{**state, "prompts": prompts})


def pad_rows(rows: Sequence[Sequence[Any]], dtype: torch.dtype, width: int | None = None) -> Tensor:
    """[B, T] rows side by side, right-padded with 0 to the longest, or to ``width``."""
    width = max(1, *(len(row) for row in rows)) if width is None else width
    return torch.tensor([list(row) + [0] * (width - len(row)) for row in rows], dtype=dtype)
