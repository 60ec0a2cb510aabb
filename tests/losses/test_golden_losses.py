"""Each loss on an example small enough to work out by hand; the arithmetic stands in the comments."""

from math import log

import pytest
import torch

from pth_exp.losses import TokenBatch, get_loss

NAN = float("nan")
F64 = torch.float64


def tensor(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=F64)


def ppo_batch() -> TokenBatch:
    """A = 2 with ratios 1.1, 1.5; A = -1 with 0.5; A = -1 with 4. pi_old/q is 0.5, 3; 1; 0.25."""
    old = tensor([[-1.0, -2.0], [-3.0, NAN], [-4.0, NAN]])
    logp = old + tensor([[log(1.1), log(1.5)], [log(0.5), NAN], [log(4.0), NAN]])
    sampler = old - tensor([[log(0.5), log(3.0)], [0.0, NAN], [log(0.25), NAN]])
    mask = torch.tensor([[True, True], [True, False], [True, False]])
    return TokenBatch(logp.requires_grad_(), torch.tensor([2.0, -1.0, -1.0], dtype=F64), mask, sampler, old)


@pytest.mark.parametrize("name", ["grpo", "ppo_clip"])
@pytest.mark.parametrize(
    ("aggregation", "value", "first_coef"),
    [
        # terms: -2.2; max(-3, -2.4) = -2.4; max(0.5, 0.8) = 0.8; max(4, 1.2) = 4, and at most 3
        ("token_mean", (-2.2 - 2.4 + 0.8 + 3) / 4, 2.2 / 4),
        ("seq_mean_token_mean", ((-2.2 - 2.4) / 2 + 0.8 + 3) / 3, 2.2 / 6),
        ("seq_mean_token_sum", (-2.2 - 2.4 + 0.8 + 3) / 3, 2.2 / 3),
        ("seq_mean_token_sum_norm", (-2.2 - 2.4 + 0.8 + 3) / 3 / 16, 2.2 / 3 / 16),
    ],
)
def test_ppo_clip(name: str, aggregation: str, value: float, first_coef: float) -> None:
    out = get_loss(name, aggregation=aggregation, norm_tokens=16)(ppo_batch())
    assert out.loss.item() == pytest.approx(value)
    # only the first token is neither clipped nor bounded; a higher surprisal of a good token raises the loss
    torch.testing.assert_close(out.token_coef, tensor([[first_coef, 0.0], [0.0, 0.0], [0.0, 0.0]]))
    assert out.metrics["actor/pg_clipfrac"] == pytest.approx(2 / 4)  # 1.5 and 0.5
    assert out.metrics["actor/pg_clipfrac_lower"] == pytest.approx(1 / 4)  # 4, by the dual clip
    assert out.metrics["actor/ppo_kl"] == pytest.approx(-log(1.1 * 1.5 * 0.5 * 4) / 4)


def test_ppo_clip_without_the_dual_clip_lets_a_large_ratio_of_a_bad_token_through() -> None:
    out = get_loss("ppo_clip", dual_clip=None)(ppo_batch())
    assert out.loss.item() == pytest.approx((-2.2 - 2.4 + 0.8 + 4) / 4)
    torch.testing.assert_close(out.token_coef, tensor([[2.2 / 4, 0.0], [0.0, 0.0], [-1.0, 0.0]]))
    assert out.metrics["actor/pg_clipfrac_lower"] == 0.0


def test_tis_ppo_multiplies_each_term_by_the_truncated_weight() -> None:
    out = get_loss("tis_ppo")(ppo_batch())
    # weights 0.5, min(3, 2) = 2, 1, 0.25
    assert out.loss.item() == pytest.approx((-2.2 * 0.5 - 2.4 * 2 + 0.8 + 3 * 0.25) / 4)
    torch.testing.assert_close(out.token_coef, tensor([[2.2 * 0.5 / 4, 0.0], [0.0, 0.0], [0.0, 0.0]]))


def test_grpo_with_its_own_log_probabilities_is_uncorrected() -> None:
    """Paper, section 4.1: r = 1 for every token, the clip never acts, and the sampler has no part in the gradient."""
    batch = ppo_batch()
    own = TokenBatch(batch.logp, batch.advantage, batch.mask, batch.sampler_logp, batch.logp.detach())
    out = get_loss("grpo")(own)
    torch.testing.assert_close(out.token_coef, tensor([[2 / 4, 2 / 4], [-1 / 4, 0.0], [-1 / 4, 0.0]]))
    assert out.metrics == {"actor/pg_clipfrac": 0.0, "actor/pg_clipfrac_lower": 0.0, "actor/ppo_kl": 0.0}


def reinforce_batch() -> TokenBatch:
    """A = 2: surprisals 1, 2 with pi/q 0.5, 3; A = -1: surprisal 0.5 with pi/q 1."""
    logp = tensor([[-1.0, -2.0], [-0.5, NAN]])
    sampler = logp - tensor([[log(0.5), log(3.0)], [0.0, NAN]])
    mask = torch.tensor([[True, True], [True, False]])
    return TokenBatch(logp.requires_grad_(), torch.tensor([2.0, -1.0], dtype=F64), mask, sampler)


def test_tis_reinforce_sums_tokens_and_averages_responses() -> None:
    out = get_loss("tis_reinforce")(reinforce_batch())
    assert out.loss.item() == pytest.approx((2 * 0.5 * 1 + 2 * 2 * 2 - 1 * 1 * 0.5) / 2)
    torch.testing.assert_close(out.token_coef, tensor([[2 * 0.5 / 2, 2 * 2 / 2], [-1 / 2, 0.0]]))  # A min(pi/q, 2) / B


def test_tis_reinforce_with_another_cap_and_aggregation() -> None:
    out = get_loss("tis_reinforce", cap=2.5, aggregation="token_mean")(reinforce_batch())
    torch.testing.assert_close(out.token_coef, tensor([[2 * 0.5 / 3, 2 * 2.5 / 3], [-1 / 3, 0.0]]))


def test_san() -> None:
    """Surprisals 1, 2, 6: mean 3, weights 1, 1, 1/2, D = 1 + 2 + 3 = 6. The second response has equal surprisals: D = 2."""
    logp = tensor([[-1.0, -2.0, -6.0], [-1.0, -1.0, NAN]]).requires_grad_()
    mask = torch.tensor([[True, True, True], [True, True, False]])
    out = get_loss("san")(TokenBatch(logp, torch.tensor([2.0, -1.0], dtype=F64), mask))
    assert out.loss.item() == pytest.approx((2 - 1) / 2)  # the value is always the advantage
    torch.testing.assert_close(out.token_coef, tensor([[2 / 6, 2 / 6, 1 / 6], [-1 / 2, -1 / 2, 0.0]]) / 2)


def sequence_batch(advantage: float = 2.0, certain: float = -1.0) -> TokenBatch:
    """A = 2: surprisals 1, 2, 6 and the reference's 4, 1, 4: S = 9, mean 3, SAN's weights 1, 1, 1/2 and D = 6.

    And a second response with A = -1, surprisals 1, 1 and the reference's 1, 1.
    """
    logp = tensor([[-1.0, -2.0, -6.0], [-1.0, -1.0, NAN]]).requires_grad_()
    ref = tensor([[-4.0, -1.0, -4.0], [certain, certain, NAN]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    return TokenBatch(logp, torch.tensor([advantage, -1.0], dtype=F64), mask, ref_logp=ref)


GOLDEN = {  # value over A and coefficients over A of the first response; the second one's are 1, and 1/2 for each token
    "san": (1, [1 / 6, 1 / 6, 0.5 / 6]),
    "seq_norm": (1, [1 / 9, 1 / 9, 1 / 9]),
    "asympo_reading": (1, [1 / 9, 1 / 9, 1 / 9]),
    "seq_gain": (9 / 6, [1 / 6, 1 / 6, 1 / 6]),
    "token_weights": (6 / 9, [1 / 9, 1 / 9, 0.5 / 9]),
    # a = max(4, 3), max(1, 3), max(4, 3) = 4, 3, 4, in all 11; w = 1, 1, 4/6; sum w l = 1 + 2 + 4 = 7
    "san_plus": (7 / 11, [1 / 11, 1 / 11, (4 / 6) / 11]),
    "san_plus_written": (1, [1 / 7, 1 / 7, (4 / 6) / 7]),
    # w = 1, 1/2, 4/6, in all 13/6; sum w l = 1 + 1 + 4 = 6, S_rob = 36/13; the reference's mean is 3
    "san_ref": (36 / 13 / 3, [2 / 13, 1 / 13, (4 / 6) * 2 / 13]),
    "san_ref_written": (1, [1 / 6, 0.5 / 6, (4 / 6) / 6]),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_sequence_losses(name: str) -> None:
    out = get_loss(name)(sequence_batch())
    value, coef = GOLDEN[name]
    assert out.loss.item() == pytest.approx((2 * value - 1) / 2)
    torch.testing.assert_close(out.token_coef, tensor([[2 * c / 2 for c in coef], [-1 / 2 / 2, -1 / 2 / 2, 0.0]]))
    assert out.metrics == {}


@pytest.mark.parametrize("name", GOLDEN)
def test_sequence_losses_do_not_train_on_equal_rewards(name: str) -> None:
    out = get_loss(name)(sequence_batch(advantage=0.0))
    assert torch.equal(out.token_coef[0], torch.zeros(3, dtype=F64))


def test_a_reference_that_is_certain_of_every_token() -> None:
    """l = 1, 1 and l_ref = 0, 0.

    SAN-ref: no token has a weight, value and coefficients are 0, and the response still counts in the mean. SAN+: its anchor is
    the learner's mean then, a = 1, 1, so that it is SAN: coefficient A/2.
    """
    batch = sequence_batch(certain=0.0)
    for name in ("san_ref", "san_ref_written"):
        out = get_loss(name)(batch)
        assert out.loss.item() == pytest.approx(2 * GOLDEN[name][0] / 2)
        assert out.token_coef[1].tolist() == [0.0, 0.0, 0.0]
    for name in ("san_plus", "san_plus_written"):
        torch.testing.assert_close(get_loss(name)(batch).token_coef[1], tensor([[-1 / 2, -1 / 2, 0.0]])[0] / 2)


FLOORED = {  # coefficients over A of surprisals 0, 0 and of 1e-7, 2e-7, 6e-7 with SAN's weights 1, 1, 1/2, in units of 1e6
    "seq_norm": ([1 / 2, 1 / 2], [1 / 3, 1 / 3, 1 / 3]),  # 1 / (1e-6 T)
    "asympo_reading": ([1 / 2, 1 / 2], [1 / 3, 1 / 3, 1 / 3]),
    "token_weights": ([1 / 2, 1 / 2], [1 / 3, 1 / 3, 0.5 / 3]),
    "san": ([1 / 2, 1 / 2], [1 / 2.5, 1 / 2.5, 0.5 / 2.5]),  # 1 / (1e-6 sum w)
    "seq_gain": ([1 / 2, 1 / 2], [1 / 2.5, 1 / 2.5, 1 / 2.5]),
    # the reference's surprisals are the learner's: a = max(l, mean) = 3e-7, 3e-7, 6e-7 and w = 1
    "san_plus": ([1 / 2, 1 / 2], [1 / 3, 1 / 3, 1 / 3]),
    "san_plus_written": ([1 / 2, 1 / 2], [1 / 3, 1 / 3, 1 / 3]),
    "san_ref": ([1 / 2, 1 / 2], [1 / 3, 1 / 3, 1 / 3]),
    "san_ref_written": ([1 / 2, 1 / 2], [1 / 3, 1 / 3, 1 / 3]),
}


@pytest.mark.parametrize("name", FLOORED)
def test_below_the_floor_as_declared(name: str) -> None:
    """A mean surprisal below 1e-6 nats divides as 1e-6; a learner certain of every token has a defined, finite gradient."""
    logp = tensor([[0.0, 0.0, NAN], [-1e-7, -2e-7, -6e-7]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    batch = TokenBatch(logp.requires_grad_(), torch.tensor([3.0, 5.0], dtype=F64), mask, ref_logp=logp.detach())
    certain, nearly = FLOORED[name]
    expected = tensor([[3 * c for c in certain] + [0.0], [5 * c for c in nearly]]) * 1e6 / 2
    torch.testing.assert_close(get_loss(name)(batch).token_coef, expected, rtol=1e-12, atol=0)  # in the batch's own precision


def test_asympo_readings_floor_is_a_parameter() -> None:
    """Mean surprisals 3 and 1 over a floor of 2: coefficients 2 / (3 x 3) and -1 / (2 x 2), over two responses."""
    out = get_loss("asympo_reading", floor=2.0)(sequence_batch())
    torch.testing.assert_close(out.token_coef, tensor([[2 / 9] * 3, [-1 / 4, -1 / 4, 0.0]]) / 2)
    assert out.loss.item() == pytest.approx((2 * 1 - 1 / 2) / 2)
