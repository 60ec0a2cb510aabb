"""The order in which prompts are drawn, the same permutations as verl's on every stack, and the fixed evaluation subset."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torchdata.stateful_dataloader.sampler import RandomSampler

from pth_exp.tasks.base import Problem


class PromptOrder:
    """Batches of prompt indices, epoch after epoch from one generator; the last incomplete batch of an epoch is dropped.

    verl builds torchdata's RandomSampler over ``torch.Generator()`` and seeds that generator only if ``data.seed`` is set, so
    without a seed the order is a shuffle by torch's default generator seed: fixed, and not file order. Each epoch draws a new
    permutation from the same generator. Batch ``i`` depends on ``i`` alone, so a resumed run needs no other state.
    """

    def __init__(self, n: int, prompts_per_batch: int, seed: int | None) -> None:
        """Raises ``ValueError`` if not even one batch fits into an epoch."""
        if not 1 <= prompts_per_batch <= n:
            raise ValueError(
                f"prompts_per_update: {prompts_per_batch} is not possible with {n} training problems; it must be from 1 to {n}"
            )
        self.batches_per_epoch = n // prompts_per_batch
        self._n, self._size, self._seed = n, prompts_per_batch, seed
        self._permutation: list[int] = []
        self._restart()

    @property
    def generator_seed(self) -> int:
        """The seed that the generator really started from."""
        return self._generator.initial_seed()

    def batch(self, draw_index: int) -> list[int]:
        """The prompt indices of batch ``draw_index``, counted from 0 over all epochs."""
        epoch, within = divmod(draw_index, self.batches_per_epoch)
        if epoch < self._epoch:
            self._restart()
        while self._epoch < epoch:
            self._permutation = list(self._sampler)
            self._epoch += 1
        return self._permutation[within * self._size : (within + 1) * self._size]

    def _restart(self) -> None:
        self._generator = torch.Generator()
        if self._seed is not None:
            self._generator.manual_seed(self._seed)
        self._sampler = RandomSampler(range(self._n), generator=self._generator)
        self._epoch = -1


def evaluation_subset(problems: Sequence[Problem], size: int, seed: int) -> list[Problem]:
    """``size`` problems chosen by ``seed``, in the order of the split; all of them when it has no more."""
    if size >= len(problems):
        return list(problems)
    chosen = np.random.Generator(np.random.Philox(seed)).choice(len(problems), size, replace=False)
    return [problems[i] for i in sorted(chosen.tolist())]
