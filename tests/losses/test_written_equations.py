"""Each arm's equation, as its YAML carries it, against the losses as written in numpy and against the loss that trains."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from made_batches import padded, random_rows, unpadded, written_batches
from written_losses import LOSSES, Written

import pth_exp.conf
from pth_exp import schema
from pth_exp.equations import Evaluation, WrittenBatch, evaluate, parse, penalty_equation
from pth_exp.losses import get_loss, kl_penalty

AGGREGATIONS = list(schema.Aggregation)


def arm_of(name: str) -> tuple[str, dict[str, Any]]:
    """Equation and default parameters."""
    values = yaml.safe_load((Path(str(pth_exp.conf.__file__)).parent / "arm" / f"{name}.yaml").read_text())
    arm = schema.BUILTIN_ARMS[values["loss"]](name=name, loss=values["loss"])
    return values["equation"], {**arm.parameters(), "norm_tokens": 5.0} if "norm_tokens" in arm.parameters() else arm.parameters()


def evaluated(text: str, b: Written, parameters: dict[str, Any]) -> Evaluation:
    rows = (b.logp, b.sampler, b.old, b.ref)
    batch = WrittenBatch([len(r) for r in b.logp], b.advantage, *(np.concatenate(r) for r in rows))
    return evaluate(parse(text, parameters), batch, parameters)


CASES = [(name, how) for name in sorted(LOSSES) for how in (AGGREGATIONS if "aggregation" in arm_of(name)[1] else [None])]


@pytest.mark.parametrize(("name", "how"), CASES)
@settings(max_examples=25, deadline=None)
@given(b=written_batches())
def test_the_equation_is_the_loss(name: str, how: schema.Aggregation | None, b: Written) -> None:
    text, parameters = arm_of(name)
    is_default = parameters.get("aggregation") == how
    parameters |= {} if how is None else {"aggregation": how}
    got = evaluated(text, b, parameters)
    out = get_loss(name, **parameters)(padded(b))
    assert got.value == pytest.approx(out.loss.item(), rel=1e-10, abs=1e-12)
    np.testing.assert_allclose(got.gradient, -np.concatenate(unpadded(out.token_coef, b)), rtol=1e-10, atol=1e-13)
    if is_default:
        assert got.value == pytest.approx(LOSSES[name](b, b.logp), rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("name", [n for n in sorted(LOSSES) if "dual_clip" in arm_of(n)[1]])
@settings(max_examples=20, deadline=None)
@given(b=written_batches())
def test_without_the_dual_clip(name: str, b: Written) -> None:
    text, parameters = arm_of(name)
    parameters |= {"dual_clip": None}
    out = get_loss(name, **parameters)(padded(b))
    got = evaluated(text, b, parameters)
    assert got.value == pytest.approx(out.loss.item(), rel=1e-10, abs=1e-12)
    np.testing.assert_allclose(got.gradient, -np.concatenate(unpadded(out.token_coef, b)), rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("estimator", list(schema.KlEstimator))
@pytest.mark.parametrize("clamp", [None, 0.5, 10.0])
@settings(max_examples=20, deadline=None)
@given(b=written_batches(), how=st.sampled_from(AGGREGATIONS[:3]), shift=st.sampled_from([0.0, 11.0, -25.0]))
def test_the_penalty_s_equation_is_the_penalty(
    estimator: str, clamp: float | None, b: Written, how: schema.Aggregation, shift: float
) -> None:
    moved = dataclasses.replace(b, ref=[row + shift for row in b.ref])
    batch = padded(moved)
    assert batch.ref_logp is not None
    value = kl_penalty(batch.logp, batch.ref_logp, batch.mask, estimator, clamp, how)
    (gradient,) = torch.autograd.grad(value, batch.logp)
    got = evaluated(penalty_equation(estimator).text, moved, {"clamp": clamp, "aggregation": how})
    assert got.value == pytest.approx(value.item(), rel=1e-10, abs=1e-12)
    np.testing.assert_allclose(got.gradient, np.concatenate(unpadded(gradient, b)), rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_long_responses_far_from_sampler_and_reference(name: str) -> None:
    text, parameters = arm_of(name)
    for seed, spread in enumerate((1e-3, 1.0, 8.0)):
        b = random_rows(seed, [512, 1, 130], spread)
        out = get_loss(name, **parameters)(padded(b))
        got = evaluated(text, b, parameters)
        assert got.value == pytest.approx(out.loss.item(), rel=1e-11)
        np.testing.assert_allclose(got.gradient, -np.concatenate(unpadded(out.token_coef, b)), rtol=1e-10, atol=1e-15)


@pytest.mark.parametrize("z", [0.1, 4.0, -11.0, -60.0])
@pytest.mark.parametrize("clamp", [None, 10.0])
@pytest.mark.parametrize("estimator", list(schema.KlEstimator))
def test_the_penalty_s_equation_on_two_tokens(estimator: str, clamp: float | None, z: float) -> None:
    """Policy sigmoid(z) against 1/2: near, surer of the token, collapsed away from it, beyond the log-ratio's clamp."""

    def at(z: float) -> Evaluation:
        batch = WrittenBatch([1], [0.0], [-math.log1p(math.exp(-z))], ref_logp=[math.log(0.5)])
        return evaluate(penalty_equation(estimator), batch, {"clamp": clamp, "aggregation": "token_mean"})

    x = min(max(math.log(0.5) + math.log1p(math.exp(-z)), -20.0), 20.0)
    estimate = {"k1": -x, "k2": x * x / 2, "k3": math.exp(x) - x - 1}[estimator]
    expected = estimate if clamp is None else min(max(estimate, -clamp), clamp)
    assert at(z).value == pytest.approx(expected, rel=1e-9, abs=1e-12)
    difference = (at(z + 1e-5).value - at(z - 1e-5).value) / 2e-5
    slope = 1 / (1 + math.exp(z))  # d logp / d z
    assert at(z).gradient[0] * slope == pytest.approx(difference, rel=1e-6, abs=1e-9)
