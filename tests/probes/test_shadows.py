"""Shadow losses: cosine and norm ratio worked out by hand, and nothing of the run's moved."""

from __future__ import annotations

import math
from math import log

import numpy as np
import pytest
import torch
from torch import Tensor

from pth_exp.losses import Loss, TokenBatch, get_loss
from pth_exp.losses.types import LossOutput
from pth_exp.probes import Shadow, shadow_pairs
from pth_exp.probes.likeness import cosine_and_norm_ratio
from pth_exp.schema import OldPolicy

GROUP = torch.tensor([0, 0])
REWARDS = torch.tensor([1.0, 0.0])


def given(advantage: Tensor) -> Shadow:
    return shadow(get_loss("tis_reinforce"), advantage=advantage)


def shadow(loss: Loss, name: str = "other", old: OldPolicy = OldPolicy.recomputed, advantage: Tensor | None = None) -> Shadow:
    return Shadow(name, loss, old, lambda rewards, group: torch.tensor([1.0, -1.0]) if advantage is None else advantage)


def batch() -> TokenBatch:
    """Two responses of 2 and 1 tokens, surprisals 2, padding NaN; pi/q is 1.5, 0.5 and 4."""
    nan = float("nan")
    logp = torch.tensor([[-2.0, -2.0], [-2.0, nan]], dtype=torch.float64)
    shift = torch.tensor([[log(1.5), log(0.5)], [log(4.0), nan]], dtype=torch.float64)
    mask = torch.tensor([[True, True], [True, False]])
    return TokenBatch(logp.requires_grad_(), torch.tensor([1.0, -1.0]), mask, (logp - shift).detach(), logp.detach())


def pair(loss: Loss, other: Shadow) -> tuple[float, float]:
    b = batch()
    (found,) = shadow_pairs("own", b, loss(b).token_coef, [other], REWARDS, GROUP) or []
    assert (found["a"], found["b"]) == ("own", "other")
    assert b.logp.grad is None
    return found["cosine"], found["norm_ratio"]


def test_cosine_and_norm_ratio_by_hand() -> None:
    """tis_reinforce puts A min(pi/q, 2)/2 on a token: .75, .25, -1. grpo A/3: (1, 1, -1)/3."""
    own, other = np.array([0.75, 0.25, -1.0]), np.array([1, 1, -1]) / 3
    cosine, ratio = pair(get_loss("tis_reinforce"), shadow(get_loss("grpo")))
    assert cosine == pytest.approx(own @ other / np.linalg.norm(own) / np.linalg.norm(other))
    assert ratio == pytest.approx(np.linalg.norm(own) / np.linalg.norm(other))


def test_a_shadow_has_its_own_old_policy() -> None:
    """ppo_clip against the sampler: -A r is clipped at r = 1.5 (A = 1) and at the dual clip's 3 (A = -1): 0, .5/3, 0.

    Against the learner itself it is grpo: (1, 1, -1)/3.
    """
    cosine, ratio = pair(get_loss("grpo"), shadow(get_loss("ppo_clip"), old=OldPolicy.sampler))
    assert (cosine, ratio) == (pytest.approx(1 / math.sqrt(3)), pytest.approx(math.sqrt(3) / 0.5))
    assert pair(get_loss("grpo"), shadow(get_loss("ppo_clip"))) == (pytest.approx(1.0), pytest.approx(1.0))


def test_a_shadow_has_its_own_advantages() -> None:
    """(.75, .25, -1) against twice A: twice; with A = (1, 0) the third coefficient is 0."""
    assert pair(get_loss("tis_reinforce"), given(torch.tensor([2.0, -2.0]))) == (pytest.approx(1.0), pytest.approx(0.5))
    cosine, _ = pair(get_loss("tis_reinforce"), given(torch.tensor([1.0, 0.0])))
    assert cosine == pytest.approx(math.hypot(0.75, 0.25) / math.sqrt(0.75**2 + 0.25**2 + 1))


def test_every_two_are_compared_once() -> None:
    b, others = batch(), [shadow(get_loss("san"), "s"), shadow(get_loss("grpo"), "g")]
    found = shadow_pairs("own", b, get_loss("grpo")(b).token_coef, others, REWARDS, GROUP) or []
    assert [(p["a"], p["b"]) for p in found] == [("own", "s"), ("own", "g"), ("s", "g")]
    assert found[1]["cosine"] == pytest.approx(1.0)
    assert shadow_pairs("own", b, get_loss("grpo")(b).token_coef, [], REWARDS, GROUP) is None


def test_no_gradient_no_direction() -> None:
    b = batch()
    (found,) = shadow_pairs("own", b, torch.zeros(2, 2), [shadow(get_loss("grpo"))], REWARDS, GROUP) or []
    assert (found["cosine"], found["norm_ratio"]) == (None, None)
    cosine, ratio = cosine_and_norm_ratio(np.array([np.nan, 1.0]), np.array([1.0, 1.0])) or (0.0, 0.0)
    assert math.isnan(cosine) and math.isnan(ratio)


def test_a_shadow_that_draws_moves_no_stream() -> None:
    def noisy(b: TokenBatch) -> LossOutput:
        return LossOutput(torch.zeros(()), torch.randn(b.logp.shape), {})

    before = torch.get_rng_state()
    pair(get_loss("grpo"), shadow(noisy))
    assert torch.equal(torch.get_rng_state(), before)
