"""The KL penalty on a policy with two tokens, p = sigmoid(z) for the sampled one, against differences of the written formula."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from pth_exp.losses import get_loss, kl_penalty
from pth_exp.losses.types import TokenBatch

REFERENCE = math.log(0.5)
CASES = {  # logit of the sampled token: policy near the reference, surer of the token, and collapsed away from it
    "near": 0.1,
    "surer": 4.0,
    "collapsed": -11.0,  # x = ref - logp is about 10.3 nats: k3 about 30,000
    "gone": -60.0,  # x is about 59: beyond the clamp of the log-ratio
}
ESTIMATES: dict[str, Callable[[float], float]] = {
    "k1": lambda x: -x,
    "k2": lambda x: x * x / 2,
    "k3": lambda x: math.exp(x) - x - 1,
}


def written(z: float, estimator: str, clamp: float | None) -> float:
    x = REFERENCE + math.log1p(math.exp(-z))
    estimate = ESTIMATES[estimator](min(max(x, -20.0), 20.0))
    return estimate if clamp is None else min(max(estimate, -clamp), clamp)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("clamp", [None, 10.0])
@pytest.mark.parametrize("estimator", ESTIMATES)
def test_value_and_gradient_in_the_logit(estimator: str, clamp: float | None, case: str) -> None:
    z = torch.tensor(CASES[case], dtype=torch.float64, requires_grad=True)
    logp = torch.log_softmax(torch.stack([z, torch.zeros_like(z)]), dim=0)[:1].reshape(1, 1)
    ref = torch.full((1, 1), REFERENCE, dtype=torch.float64)
    value = kl_penalty(logp, ref, torch.ones(1, 1, dtype=torch.bool), estimator, clamp, "token_mean")
    value.backward()  # type: ignore[no-untyped-call]
    assert z.grad is not None
    assert value.item() == pytest.approx(written(CASES[case], estimator, clamp), rel=1e-9, abs=1e-12)
    step = 1e-5
    difference = written(CASES[case] + step, estimator, clamp) - written(CASES[case] - step, estimator, clamp)
    assert z.grad.item() == pytest.approx(difference / (2 * step), rel=1e-6, abs=1e-9)


def test_verls_clamp_takes_the_gradient_from_a_collapsed_token() -> None:
    """k3 with clamp 10 does not pull a collapsed token back; without the clamp it does, with 1 - exp(x)."""
    logp = torch.tensor([[REFERENCE - 11.0]], dtype=torch.float64, requires_grad=True)
    ref, mask = torch.full((1, 1), REFERENCE, dtype=torch.float64), torch.ones(1, 1, dtype=torch.bool)
    (clamped,) = torch.autograd.grad(kl_penalty(logp, ref, mask, "k3", 10.0, "token_mean"), logp)
    (free,) = torch.autograd.grad(kl_penalty(logp, ref, mask, "k3", None, "token_mean"), logp)
    assert clamped.item() == 0.0
    assert free.item() == pytest.approx(1 - math.exp(11.0))


def test_k3_keeps_its_digits_for_a_small_shift() -> None:
    """x = 1e-3 in float32: exp(x) - x - 1 in that order would be noise; the truth is x^2/2 + x^3/6."""
    logp, ref = torch.tensor([[-1.0]]), torch.tensor([[-0.999]])
    x = (ref - logp).double().item()
    value = kl_penalty(logp, ref, torch.ones(1, 1, dtype=torch.bool), "k3", None, "token_mean").item()
    assert value == pytest.approx(x * x / 2 + x**3 / 6, rel=1e-3)


@pytest.mark.parametrize("estimator", ESTIMATES)
@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"])
def test_masked_slots_change_neither_value_nor_gradient(estimator: str, aggregation: str) -> None:
    rng = np.random.default_rng(0)
    values, mask = torch.tensor(rng.normal(-2, 1, (3, 4))), torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]).bool()
    ref = values + torch.tensor(rng.normal(0, 1, (3, 4)))
    results = []
    for filler in (0.0, float("nan"), float("-inf")):
        logp = values.masked_fill(~mask, filler).requires_grad_()
        value = kl_penalty(logp, ref.masked_fill(~mask, filler), mask, estimator, 10.0, aggregation)
        (gradient,) = torch.autograd.grad(value, logp)
        results.append((value.item(), gradient))
    for value, gradient in results[1:]:
        assert value == results[0][0]
        assert torch.equal(gradient, results[0][1])


@pytest.mark.parametrize("estimator", ESTIMATES)
def test_log_ratios_of_50_stay_finite(estimator: str) -> None:
    logp = torch.tensor([[-60.0, -1.0]], requires_grad=True)
    value = kl_penalty(logp, torch.tensor([[-10.0, -51.0]]), torch.ones(1, 2, dtype=torch.bool), estimator, None, "token_mean")
    (gradient,) = torch.autograd.grad(value, logp)
    assert torch.isfinite(value) and torch.isfinite(gradient).all()


def test_the_arms_aggregation_does_not_rescale_the_kl() -> None:
    """Responses of 1 and 3 tokens: what the KL adds to the gradient is 1/4 a token under each of the arm's aggregations."""
    logp = torch.full((2, 3), -1.0, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True, False, False], [True, True, True]])
    batch = TokenBatch(logp, torch.tensor([1.0, -1.0]), mask, old_logp=logp.detach())
    for aggregation in ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum"):
        out = get_loss("grpo", aggregation=aggregation)(batch)
        total = out.loss + kl_penalty(logp, logp.detach() - 1, mask, "k1", None, "token_mean")
        (gradient,) = torch.autograd.grad(total, logp)
        torch.testing.assert_close(gradient + out.token_coef, mask.double() / 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("k4", None, "token_mean"), "k4"), (("k3", 0.0, "token_mean"), "clamp is 0.0"), (("k3", None, "mean"), "mean")],
)
def test_impossible_settings_are_named(arguments: tuple[str, float | None, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kl_penalty(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool), *arguments)
