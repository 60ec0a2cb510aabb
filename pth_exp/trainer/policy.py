"""A causal language model read as a distribution over the next token; sampler, learner and reference read it the same way."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache


@dataclass(frozen=True, slots=True)
class Prefix:
    """Prompts that the model has read, left-padded to a common width W.

    Attributes:
        cache: keys and values of the R rows.
        mask: [R, W] int64, 1 at prompt tokens.
        lengths: [R] int64 tokens of each prompt.
        logits: [R, V] for the first response token.
    """

    cache: Any
    mask: Tensor
    lengths: Tensor
    logits: Tensor

    def select(self, rows: Tensor) -> Prefix:
        """The rows named by ``rows`` [R'], repeated as often as they are named; differentiable; this prefix is left as it is."""
        cache = copy.copy(self.cache)
        cache.layers = [copy.copy(layer) for layer in cache.layers]
        cache.batch_select_indices(rows)
        return Prefix(cache, self.mask[rows], self.lengths[rows], self.logits[rows])


class Policy:
    """A model with the temperature and the forbidden tokens that define its distribution.

    Args:
        model: a Hugging Face causal LM. Its generation config is never read.
        temperature: divides the logits.
        forbidden: tokens that have probability 0: the padding token.
    """

    def __init__(self, model: nn.Module, temperature: float, forbidden: Sequence[int]) -> None:
        self.model = model.eval()
        self.device = next(model.parameters()).device
        self.temperature = temperature
        self.forbidden = tuple(forbidden)
        # transformers renamed the argument on the way from 5.9 to 5.40
        names = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in names else "past_key_values"
        self._config = cast(Any, model.config)
        self._bias = torch.zeros(self._config.get_text_config().vocab_size, device=self.device)
        self._bias[list(forbidden)] = -torch.inf

    def log_probs(self, logits: Tensor) -> Tensor:
        """[..., V] float32 log-probabilities at the temperature, with the forbidden tokens left out."""
        return torch.log_softmax(torch.add(self._bias, logits, alpha=1 / self.temperature), dim=-1)

    def read(self, prompts: Sequence[Sequence[int]]) -> Prefix:
        """Runs the model over R prompts. Positions count a row's own tokens, so left padding does not shift them."""
        width = max(len(prompt) for prompt in prompts)
        tokens = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=self.device)
        lengths = torch.tensor([len(p) for p in prompts], device=self.device)
        positions = torch.arange(width, device=self.device) - (width - lengths)[:, None]
        mask = (positions >= 0).long()
        cache = DynamicCache(config=self._config)
        logits = self._forward(tokens, mask, positions.clamp(min=0), cache, logits_to_keep=1)
        return Prefix(cache, mask, lengths, logits[:, -1])

    def continue_with(self, prefix: Prefix, tokens: Tensor) -> Tensor:
        """[R, L, V] logits after each of ``tokens`` [R, L], which follow the prefix. Appends to the prefix's cache."""
        rows, length = tokens.shape
        mask = torch.cat([prefix.mask, prefix.mask.new_ones(rows, length)], dim=1)
        positions = prefix.lengths[:, None] + torch.arange(length, device=self.device)
        return self._forward(tokens, mask, positions, prefix.cache)

    def step(self, prefix: Prefix, tokens: Tensor, number: int) -> Prefix:
        """The prefix grown by response token ``number`` (from 0) of every row."""
        mask = torch.cat([prefix.mask, prefix.mask.new_ones(len(tokens), 1)], dim=1)
        logits = self._forward(tokens[:, None], mask, (prefix.lengths + number)[:, None], prefix.cache)[:, -1]
        return Prefix(prefix.cache, mask, prefix.lengths, logits)

    def _forward(self, tokens: Tensor, mask: Tensor, positions: Tensor, cache: Any, logits_to_keep: int = 0) -> Tensor:
        arguments = {self._cache_argument: cache, "use_cache": True, "logits_to_keep": logits_to_keep}
        output = self.model(input_ids=tokens, attention_mask=mask, position_ids=positions, **arguments)
        logits: Tensor = output.logits
        return logits
