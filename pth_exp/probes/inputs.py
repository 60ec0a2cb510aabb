"""Batches on which a loss is held against its equation: fixed ones for the corners, random ones for the rest.

All numbers are float32's, so that both precisions see the same inputs. Advantages are not centred: those of a group sum to
about 0, and so does then the value of a loss such as SAN's whatever its formula. Learner, sampler, old policy and reference are
kept apart: with learner = reference the two forms of ``san_ref`` agree exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pth_exp.equations import WrittenBatch

DISTANCES = (0.03, 1.0, 6.0)
"""Nats. How far random log-probabilities of two policies lie apart: a step, a stale sampler, another model."""


@dataclass(frozen=True, slots=True)
class Input:
    name: str
    batch: WrittenBatch


def _input(name: str, lengths: ArrayLike, advantage: ArrayLike, surprisal: ArrayLike, **others: ArrayLike) -> Input:
    """All in nats of surprisal; a policy that is not named lies 0.3 nats to either side of the learner, token by token."""
    learner = np.asarray(surprisal)
    aside = np.where(np.arange(len(learner)) % 2 == 0, 0.3, -0.3)
    policies = {f"{policy}_logp": -np.asarray(others.get(policy, abs(learner + aside))) for policy in ("sampler", "old", "ref")}
    given = {"advantage": np.asarray(advantage), "logp": -learner, **policies}
    rounded = {key: value.astype(np.float32) for key, value in given.items()}
    return Input(name, WrittenBatch(np.asarray(lengths), **rounded))


def fixed_inputs() -> list[Input]:
    """The corners: one token, none, surprisal 0 or rounded below it, log-ratios beyond the clamp at 20, ratios of exactly 1."""
    surprisal = [0.4, 2.0, 0.05, 1.1, 0.0, 3.0, 0.7, 0.2, 0.9]
    lengths, advantage = [1, 3, 0, 5], [1.5, -0.8, 2.0, 0.6]
    apart = {
        "sampler": [0.7, 1.1, 0.3, 1.2, 0.4, 2.1, 0.9, 0.1, 1.6],
        "old": [0.5, 1.7, 0.1, 1.3, 0.1, 2.6, 0.8, 0.15, 1.2],
        "ref": [0.2, 3.0, 0.6, 0.8, 0.9, 1.4, 1.9, 0.5, 0.3],
    }
    same = dict.fromkeys(apart, surprisal)
    far = {"sampler": [50.4, 0.0, 25.0, 0.1, 5.0, 0.4, 3.7, 40.0, 0.5], "ref": [8.0, 0.1, 30.0, 0.2, 6.0, 0.3, 45.0, 2.0, 0.1]}
    sure = [3e-8, 1e-7, 0.0, -6e-8, 4e-7, 2e-8]  # one of them as rounding leaves it
    surer = [2e-8, 3e-8, 0.0, 1e-8, 1e-7, 5e-8]
    beyond = [24.4, 27.0, 25.0, 3.0, 5.0]  # every token of a response on one side of the clamp
    return [
        _input("policies apart", lengths, advantage, surprisal, **apart),
        _input("learner far from all", lengths, advantage, [0.4, 50.0, 0.05, 9.0, 0.0, 30.0, 0.7, 0.2, 12.0], **apart),
        _input("all far from the learner", lengths, advantage, surprisal, **far, old=far["sampler"]),
        _input("all policies equal", lengths, advantage, surprisal, **same),
        _input("equal surprisals", [4, 2, 1], [1.0, -2.0, 0.5], [0.5] * 4 + [2.0] * 2 + [1e-3]),
        _input("a certain learner", [3, 2, 4, 1], [1.0, -1.0, 0.7, -0.4], [0.0] * 5 + [1e-7, 1e-8, 0.0, 1e-7, 1e-5]),
        _input("all certain", [2, 3, 1], [1.0, -0.7, 0.4], sure, sampler=surer, old=surer, ref=surer),
        _input("a certain reference", [3, 2], [0.9, -1.2], [0.6, 2.0, 0.1, 1.4, 0.3], ref=[0.0, 0.0, 0.0, 0.0, 0.2]),
        _input("ratios beyond the clamp", [3, 2], [1.1, -0.5], [0.4, 1.0, 2.0, 26.0, 31.0], sampler=beyond, old=beyond),
        _input(
            "all ratios below the clamp", [2, 1], [1.1, -0.5], [24.0, 33.0, 28.0], sampler=[0.4, 1.1, 0.0], old=[0.4, 1.1, 0.0]
        ),
        _input("one response", [6], [-1.3], [0.1, 4.0, 0.3, 0.0, 2.5, 0.8]),
        _input("no advantage in one", [2, 3], [0.0, 1.0], [0.6, 1.4, 0.2, 0.9, 3.3]),
    ]


def random_inputs(count: int, responses: int, longest: int, seed: int = 0) -> Iterator[Input]:
    """``count`` batches of ``responses`` responses of up to ``longest`` tokens, some of one and some of none."""
    stream = np.random.Generator(np.random.Philox(seed))
    for number in range(count):
        lengths = stream.integers(1, longest + 1, responses)
        lengths[stream.random(responses) < 0.1] = 1
        lengths[stream.random(responses) < 0.05] = 0
        advantage = stream.normal(0.5, 1.5, responses)
        level = np.repeat(stream.choice([0.05, 0.7, 3.0], responses), lengths)
        surprisal = stream.exponential(level)
        distances = {policy: float(stream.choice(DISTANCES)) for policy in ("sampler", "old", "ref")}
        others = {policy: _moved(stream, surprisal, distance) for policy, distance in distances.items()}
        name = f"random {number}, " + ", ".join(f"{policy} at {distance:g}" for policy, distance in distances.items())
        yield _input(name, lengths, advantage, surprisal, **others)


def _moved(stream: np.random.Generator, surprisal: NDArray[np.float64], distance: float) -> NDArray[np.float64]:
    return np.asarray(abs(surprisal + stream.normal(0.0, distance, surprisal.shape)))
