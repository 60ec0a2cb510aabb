"""What a checkpoint of a verl run holds; `pth_exp.checkpoint` writes it whole, bounds their number and verifies it.

==============  =======================================================================================================
``learner/``    verl's own: weights, optimiser and random generators, files of each rank
``sampler/``    the weights inside vLLM, which may be older than the learner's: a file of each worker of one server; all
                servers hold the same
``data.pt``     where verl's data loader is
``state.json``  `State`
==============  =======================================================================================================

Sampling needs no more: each response's random stream is keyed by its draw, prompt and number.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

LEARNER, SAMPLER, DATA, STATE = "learner", "sampler", "data.pt", "state.json"


@dataclass(frozen=True, slots=True)
class State:
    """What else the rest of a run depends on, and what its restored parts are held against.

    Attributes:
        update: how many updates were done.
        sampler_version: of the weights inside vLLM, in updates.
        sampler_fingerprint: of those weights under the learner's names; None where it is not measured.
        sampler_parts: the fingerprint of each vLLM worker's part as the worker holds it.
        learner_fingerprint: of the learner's weights.
        first_batches: prompt IDs of the first batches, as far as they were drawn.
    """

    update: int
    sampler_version: int
    sampler_fingerprint: str | None
    sampler_parts: list[str]
    learner_fingerprint: str
    first_batches: list[list[str]]

    def write(self, checkpoint: Path) -> None:
        (checkpoint / STATE).write_text(json.dumps(dataclasses.asdict(self), indent=1))

    @classmethod
    def read(cls, checkpoint: Path) -> State:
        return cls(**json.loads((checkpoint / STATE).read_text()))
