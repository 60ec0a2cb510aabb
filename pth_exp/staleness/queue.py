"""The replay queue: which batches an update generates, and on which one it trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from pth_exp.schema import Queue

B = TypeVar("B")


class ReplayQueue(Generic[B]):
    """Batches between their generation and the update that trains on them; a batch is anything.

    Batches are numbered by draw, from 0 in order of generation. Both queues give data the same age (``schedule.data_age``):

    * ``unique_prefill``: k + 1 batches are drawn from the initial policy before update 0, which draws no more; update u > 0
      draws batch k + u. Update u trains on batch u: every update has a batch of its own.
    * ``warmup``: update u draws batch u and trains on the oldest of the newest k + 1 batches, max(0, u - k): the first k + 1
      updates all train on batch 0 (paper, section 4.3).

    Raises ``ValueError`` for a negative replay age or an unknown kind.
    """

    def __init__(self, kind: Queue | str, replay_age: int) -> None:
        if replay_age < 0:
            raise ValueError(f"replay_age is {replay_age}; it must be at least 0")
        self.kind = Queue(kind)
        self.replay_age = replay_age
        self._batches: dict[int, B] = {}

    def draws(self, update: int) -> range:
        """Draw indices of the batches to generate at ``update``, before it trains."""
        if self.kind is Queue.warmup:
            return range(update, update + 1)
        newest = self.replay_age + update
        return range(0 if update == 0 else newest, newest + 1)

    def trained(self, update: int) -> int:
        """Draw index of the batch on which ``update`` trains."""
        return max(0, update - self.replay_age) if self.kind is Queue.warmup else update

    def put(self, draw: int, batch: B) -> None:
        """Adds a generated batch. Raises ``ValueError`` if the queue holds that draw already."""
        if draw in self._batches:
            raise ValueError(f"batch {draw} is in the queue already")
        self._batches[draw] = batch

    def take(self, update: int) -> B:
        """The batch on which ``update`` trains; batches that no later update needs are dropped.

        Raises ``LookupError`` if that batch was never put here, or an earlier ``take`` has moved past it.
        """
        draw = self.trained(update)
        if draw not in self._batches:
            raise LookupError(f"update {update} trains on batch {draw}, which the queue does not hold; it holds {self.held}")
        batch = self._batches[draw]
        needed = self.trained(update + 1)
        self._batches = {d: b for d, b in self._batches.items() if d >= needed}
        return batch

    @property
    def held(self) -> list[int]:
        """Draw indices of the batches in the queue, oldest first."""
        return sorted(self._batches)

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs: kind, replay age and the batches by draw."""
        return {"kind": self.kind.value, "replay_age": self.replay_age, "batches": dict(self._batches)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Puts back what ``state`` returned. Raises ``ValueError`` if it is of another kind or replay age."""
        for field, own in (("kind", self.kind.value), ("replay_age", self.replay_age)):
            if state[field] != own:
                raise ValueError(f"the checkpoint's queue has {field} {state[field]!r}, this run's has {own!r}")
        self._batches = dict(state["batches"])
