"""The rivals against the equations that their arms carry, through an evaluator that shares nothing with the losses."""

from __future__ import annotations

import dataclasses
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from made_batches import padded, random_rows, unpadded, written_batches
from written_losses import Written

from pth_exp.equations import Evaluation, WrittenBatch, evaluate, parse
from pth_exp.losses import get_loss
from pth_exp.schema import BUILTIN_ARMS

ARMS = Path(__file__).parents[2] / "conf" / "arm"
RIVALS = ["cispo", "decoupled_ppo", "dr_grpo", "gspo", "icepop", "m2po", "mis", "mis_geo", "mis_seq", "tis_seq"]
AGGREGATIONS = ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]

MASKED: list[dict[str, Any]] = [
    {"upper": upper, "lower": lower, "weighted": weighted, "count_rejected": counted}
    for (upper, lower), weighted, counted in product([(1.5, 0.7), (2.0, 0.0), (None, 0.5)], [True, False], [True, False])
]
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "cispo": [{}, {"clip_low": 0.3, "clip_high": 0.5}],
    "decoupled_ppo": [{}, {"cap": 1.5}, {"dual_clip": 2.0}],
    "dr_grpo": [{"norm_tokens": 7.0}, {"norm_tokens": 7.0, "dual_clip": None}],
    "gspo": [{}, {"clip_low": 0.1, "clip_high": 0.2}],
    "icepop": [{}, *MASKED],
    "m2po": [{}, {"harmful_only": True}, {"threshold": 0.5}, {"threshold": 1e-4, "harmful_only": True}],
    "mis": [{}, *MASKED],
    "mis_geo": [{}, *MASKED],
    "mis_seq": [{}, *MASKED],
    "tis_seq": [{}, {"cap": 5.0, "clip_low": 0.0, "clip_high": 1.0}],
}
"""Parameters that an arm may be given; its equation must hold for all of them."""
EVERY = [(name, parameters) for name in RIVALS for parameters in SETTINGS[name]]


def option(name: str) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((ARMS / f"{name}.yaml").read_text())
    return values


def flat(b: Written) -> WrittenBatch:
    joined = [np.concatenate([*rows, np.zeros(0)]) for rows in (b.logp, b.sampler, b.old)]
    lengths = [len(r) for r in b.logp]
    return WrittenBatch(lengths, b.advantage, joined[0], sampler_logp=joined[1], old_logp=joined[2])


def held(name: str, parameters: dict[str, Any], how: str | None, b: Written) -> tuple[float, np.ndarray, Evaluation]:
    """The loss's value and gradient in logp, and the equation's, with the arm's parameters."""
    arm = option(name)
    loss = arm["loss"]
    if how is not None and "aggregation" in {f.name for f in dataclasses.fields(BUILTIN_ARMS[loss])}:
        parameters = parameters | {"aggregation": how, "norm_tokens": 7.0}
    bound = get_loss(loss, **parameters)
    out = bound(padded(b, extra=1))
    equation = parse(arm["equation"], bound.parameters if "reference" not in arm["equation"] else None)
    rows = unpadded(out.token_coef, b)
    return out.loss.item(), -np.concatenate([*rows, np.zeros(0)]), evaluate(equation, flat(b), bound.parameters)


def agree(name: str, parameters: dict[str, Any], how: str | None, b: Written) -> None:
    value, gradient, written = held(name, parameters, how, b)
    assert value == pytest.approx(written.value, rel=1e-10, abs=1e-13)
    np.testing.assert_allclose(gradient, written.gradient, rtol=1e-10, atol=1e-13)


def test_every_rival_is_held() -> None:
    assert set(RIVALS) == set(SETTINGS) <= {path.stem for path in ARMS.glob("*.yaml")}


@pytest.mark.parametrize(("name", "parameters"), EVERY, ids=[f"{n}-{i}" for i, (n, _) in enumerate(EVERY)])
@settings(max_examples=20, deadline=None)
@given(b=written_batches(), how=st.sampled_from([None, *AGGREGATIONS]))
def test_value_and_gradient_are_the_written_equation(name: str, parameters: dict[str, Any], b: Written, how: str | None) -> None:
    agree(name, parameters, how, b)


@pytest.mark.parametrize("name", RIVALS)
@pytest.mark.parametrize("length", [1, 512])
@pytest.mark.parametrize("spread", [1e-4, 0.05, 5.0])
def test_short_and_long_near_and_far(name: str, length: int, spread: float) -> None:
    for parameters in SETTINGS[name][:3]:
        agree(name, parameters, None, random_rows(7, [length, length, 3], spread))


@pytest.mark.parametrize("name", RIVALS)
def test_beyond_the_clamp_of_the_log_ratio(name: str) -> None:
    """Log-ratios of 50 nats to old policy and sampler, either way, a whole response of them included."""
    b = random_rows(3, [4, 2, 3], 0.3)
    far = [np.array([50.0, 0.0, -50.0, 0.1]), np.full(2, 50.0), np.full(3, -50.0)]
    for parameters in SETTINGS[name]:
        agree(name, parameters, None, dataclasses.replace(b, old=[o + f for o, f in zip(b.old, far, strict=True)]))
        agree(name, parameters, None, dataclasses.replace(b, sampler=[o + f for o, f in zip(b.sampler, far, strict=True)]))
