"""Value and gradient of equations: against a naive reading of the same text, and by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import made_rows
import naive
import numpy as np
import pytest
from hypothesis import assume, given, settings
from made_rows import AGGREGATIONS, PARAMETERS, flat, random_rows, some_rows

from pth_exp.equations import EquationError, Evaluation, WrittenBatch, evaluate, parse

TEXTS = {"san": made_rows.SAN, "ppo": made_rows.PPO, "masked": made_rows.MASKED, "everything": made_rows.EVERYTHING}


CASES = [(name, how) for name in TEXTS for how in (AGGREGATIONS if "aggregate" in TEXTS[name] else AGGREGATIONS[:1])]


@pytest.mark.parametrize(("name", "how"), CASES)
@settings(max_examples=20, deadline=None)
@given(rows=some_rows())
def test_value_and_gradient_against_a_naive_reading(name: str, how: str, rows: naive.Rows) -> None:
    text, parameters = TEXTS[name], {**PARAMETERS, "aggregation": how}
    coarse, fine = (naive.gradient(text, rows, parameters, step) for step in (3e-5, 3e-6))
    assume(np.allclose(coarse, fine, rtol=1e-3, atol=1e-5))  # no kink within reach of a finite difference
    got = evaluate(parse(text), flat(rows), parameters)
    assert got.value == pytest.approx(naive.value(text, rows, rows, parameters), rel=1e-10, abs=1e-12)
    np.testing.assert_allclose(got.gradient, fine, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("length", [1, 2, 31, 512])
def test_sans_gradient_is_minus_a_w_over_d(length: int) -> None:
    """Paper, appendix A: SAN puts A w_t / D on grad l_t = -grad logp, averaged here over two responses."""
    rows = random_rows(length, [length, 3])
    got = evaluate(parse(made_rows.SAN), flat(rows), {})
    expected = []
    for row, a in zip(rows.logp, rows.advantage, strict=True):
        level = -np.array(row)
        w = np.minimum(1, level.mean() / level)
        expected.append(-a * w / (w * level).sum() / 2)
    np.testing.assert_allclose(got.gradient, np.concatenate(expected), rtol=1e-10)
    assert got.value == pytest.approx(np.mean(rows.advantage))


def at(text: str, logp: list[float], advantage: float = 1.0, **parameters: object) -> Evaluation:
    """One response: the text says what its loss is."""
    text = text.replace("loss =", "own =") + "\nloss = mean(own)"
    return evaluate(parse(text), WrittenBatch([len(logp)], [advantage], logp, old_logp=[0.0] * len(logp)), parameters)


def test_ties_share_the_gradient_equally() -> None:
    assert at("loss = mean(max(logp, 2 * logp))", [0.0]).gradient.tolist() == [1.5]
    assert at("loss = mean(min(logp, 2 * logp, 6 * logp))", [0.0]).gradient.tolist() == [3.0]
    assert at("loss = max(logp)", [1.0, 3.0, 3.0]).gradient.tolist() == [0.0, 0.5, 0.5]
    assert at("loss = min(logp)", [1.0, 1.0, 3.0]).gradient.tolist() == [0.5, 0.5, 0.0]
    got = evaluate(parse("loss = max(sum(logp))"), WrittenBatch([1, 2, 1], [0.0] * 3, [4.0, 1.0, 3.0, 1.0]), {})
    assert (got.value, got.gradient.tolist()) == (4.0, [0.5, 0.5, 0.5, 0.0])


def test_clip_passes_the_gradient_at_its_bounds() -> None:
    got = at("loss = sum(clip(logp, -1, 2))", [-1.5, -1.0, 0.0, 2.0, 2.5])
    assert (got.value, got.gradient.tolist()) == (-1 - 1 + 0 + 2 + 2, [0.0, 1.0, 1.0, 1.0, 0.0])
    # outside, the gradient belongs to the bound
    assert at("loss = sum(clip(logp, mean(logp), 3 * mean(logp)))", [0.0, 2.0, 7.0]).value == 3 + 3 + 7
    assert at("loss = sum(clip(logp, mean(logp), 2 * mean(logp)))", [0.0, 2.0, 7.0]).gradient.tolist() == [4 / 3, 4 / 3, 4 / 3]


def test_a_branch_not_taken_may_be_infinite_or_nan() -> None:
    """S / l with l = 0, log of 0 and of a negative number, exp of 1000: in the branch that is not taken."""
    got = at("loss = sum(where(logp < 0, logp, 1 / logp * log(logp)))", [0.0 - 1e-300, -1.0])
    assert got.gradient.tolist() == [1.0, 1.0]
    got = at("loss = sum(where(logp == 0, 5 * logp, 1 / logp + log(logp) + logp**-2))", [0.0])
    assert (got.value, got.gradient.tolist()) == (0.0, [5.0])
    got = at("loss = sum(min(exp(1000 * logp), 2))", [1.0, -1.0])
    assert (got.value, got.gradient.tolist()) == (2.0, [0.0, 0.0])
    got = at("loss = sum(where(logp < 0, 0, logp**0.5))", [-1.0, 4.0])
    assert got.gradient.tolist() == [0.0, 0.25]
    got = at("loss = A * aggregate(log(logp), logp > 0)", [0.0, -3.0, 2.0], aggregation="token_mean")
    assert (got.value, got.gradient.tolist()) == (pytest.approx(math.log(2)), [0.0, 0.0, 0.5])


def test_a_parameter_that_is_null_is_no_bound() -> None:
    text = "loss = sum(min(logp, cap))"
    assert at(text, [1.0, 9.0], cap=2).value == 3
    assert at(text, [1.0, 9.0], cap=None).value == 10
    got = at("loss = sum(where(A < 0, min(logp, -A * cap), logp))", [1.0, 9.0], advantage=0.0, cap=None)
    assert (got.value, got.gradient.tolist()) == (10.0, [1.0, 1.0])
    got = at("loss = sum(clip(logp, -cap, cap))", [-50.0, 9.0], cap=None)
    assert (got.value, got.gradient.tolist()) == (-41.0, [1.0, 1.0])


@pytest.mark.parametrize(
    ("expression", "slope"),
    [
        ("5 - logp", -1.0),
        ("5 + 3 * logp", 3.0),
        ("1 / logp", -1 / 4),
        ("logp / 4 - logp * logp", 1 / 4 - 4),
        ("-logp", -1.0),
        ("exp(logp)", math.exp(2)),
        ("expm1(3 * logp)", 3 * math.exp(6)),
        ("log(logp)", 1 / 2),
        ("abs(logp) + abs(-3 * logp)", 4.0),
        ("abs(1 - logp)", 1.0),
    ],
)
def test_slopes_at_2(expression: str, slope: float) -> None:
    assert at(f"loss = sum({expression})", [2.0]).gradient[0] == pytest.approx(slope)


def test_constant_powers() -> None:
    assert at("loss = sum(logp**0 + logp**1)", [0.0, 2.0]).gradient.tolist() == [1.0, 1.0]
    assert at("loss = sum(logp**p)", [3.0], p=2).gradient.tolist() == [6.0]
    assert at("loss = sum(logp**-p)", [2.0], p=1).gradient.tolist() == [-0.25]


def test_a_stopped_gradient_is_a_constant_wherever_it_is_used() -> None:
    got = at("s = sg(logp)\nloss = sum(logp * s) + sum(exp(s))", [2.0, 3.0])
    assert got.gradient.tolist() == [2.0, 3.0]
    assert at("loss = sum(sg(logp))", [2.0, 3.0]).gradient.tolist() == [0.0, 0.0]


def test_a_name_used_twice_gathers_both_gradients() -> None:
    assert at("m = mean(logp)\nloss = sum((logp - m)**2)", [1.0, 2.0, 6.0]).gradient == pytest.approx([-4.0, -2.0, 6.0])


@pytest.mark.parametrize(
    ("how", "value", "gradient"),
    [
        ("token_mean", 9 / 3, [1 / 3, 1 / 3, 1 / 3]),
        ("seq_mean_token_mean", (1.5 + 6) / 2, [1 / 4, 1 / 4, 1 / 2]),
        ("seq_mean_token_sum", (3 + 6) / 2, [1 / 2, 1 / 2, 1 / 2]),
        ("seq_mean_token_sum_norm", (3 + 6) / 2 / 10, [1 / 20, 1 / 20, 1 / 20]),
    ],
)
def test_aggregations_by_hand_and_empty_responses_count_in_nothing(how: str, value: float, gradient: list[float]) -> None:
    """Tokens 1, 2 | none | 6."""
    batch = WrittenBatch([2, 0, 1, 0], [1.0, math.nan, 1.0, math.nan], [1.0, 2.0, 6.0])
    got = evaluate(parse("loss = aggregate(A * logp)"), batch, {"aggregation": how, "norm_tokens": 10})
    assert got.value == pytest.approx(value)
    assert got.gradient == pytest.approx(gradient)


@pytest.mark.parametrize(
    ("how", "value", "gradient"),
    [
        ("token_mean", 13 / 3, [0, 1 / 3, 0, 1 / 3, 1 / 3]),
        ("seq_mean_token_mean", (2 + 5.5) / 2, [0, 1 / 2, 0, 1 / 4, 1 / 4]),
        ("seq_mean_token_sum", (2 + 11) / 2, [0, 1 / 2, 0, 1 / 2, 1 / 2]),
        ("seq_mean_token_sum_norm", (2 + 11) / 2 / 10, [0, 1 / 20, 0, 1 / 20, 1 / 20]),
    ],
)
def test_rejected_tokens_leave_the_counts(how: str, value: float, gradient: list[float]) -> None:
    """Tokens 1, 2 | 0 | 6, 5 with 0 and 1 rejected: the second response has no token left and is none."""
    batch = WrittenBatch([2, 1, 2], [1.0] * 3, [1.0, 2.0, 0.0, 6.0, 5.0])
    got = evaluate(parse("loss = aggregate(logp, logp > 1)"), batch, {"aggregation": how, "norm_tokens": 10})
    assert got.value == pytest.approx(value)
    assert got.gradient == pytest.approx(gradient)
    nothing = evaluate(parse("loss = aggregate(logp, logp > 100)"), batch, {"aggregation": how, "norm_tokens": 10})
    assert (nothing.value, nothing.gradient.tolist()) == (0.0, [0.0] * 5)


def test_what_is_per_response_stands_for_each_of_its_tokens() -> None:
    batch = WrittenBatch([2, 1], [1.0, 4.0], [1.0, 2.0, 6.0])
    got = evaluate(parse("loss = aggregate(A * mean(logp), A > 0)"), batch, {"aggregation": "token_mean"})
    assert got.value == pytest.approx((1.5 + 1.5 + 24) / 3)
    assert got.gradient == pytest.approx([1 / 3, 1 / 3, 4 / 3])


def test_a_batch_without_a_token_has_loss_zero() -> None:
    for lengths in ([], [0, 0]):
        got = evaluate(parse("loss = mean(A) + max(sum(logp))"), WrittenBatch(lengths, [1.0] * len(lengths), []), {})
        assert (got.value, got.gradient.shape) == (0.0, (0,))


@settings(max_examples=20, deadline=None)
@given(rows=some_rows())
def test_row_order_and_empty_rows_change_nothing(rows: naive.Rows) -> None:
    def ordered(order: list[int]) -> naive.Rows:
        fields = {name: [getattr(rows, name)[i] for i in order] for name in rows.__dataclass_fields__}
        empty = {name: [*v, 2.0 if name == "advantage" else []] for name, v in fields.items()}
        return replace(rows, **empty)

    straight = list(range(len(rows.logp)))
    for text in TEXTS.values():
        a, b = (evaluate(parse(text), flat(ordered(o)), PARAMETERS) for o in (straight, straight[::-1]))
        assert a.value == pytest.approx(b.value, rel=1e-12, abs=1e-14)
        ends = np.cumsum([len(r) for r in rows.logp[::-1]])[:-1]
        np.testing.assert_allclose(a.gradient, np.concatenate(np.split(b.gradient, ends)[::-1]), rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize(
    ("text", "parameters", "expected"),
    [
        ("loss = mean(mean(logp - ref_logp))", {}, ["line 1, column 25", "ref_logp", "record"]),
        ("loss = mean(mean(logp)) * scael", {"scale": 1.0}, ["scael", "did you mean scale?"]),
        ("loss = mean(mean(logp)) * scale", {"scale": "big"}, ["scale", "'big'", "not a number"]),
        ("loss = aggregate(logp)", {}, ["aggregation", "None"]),
        ("loss = aggregate(logp)", {"aggregation": "token_max"}, ["token_max", "token_mean"]),
        ("loss = aggregate(logp)", {"aggregation": "seq_mean_token_sum_norm"}, ["norm_tokens", "above 0"]),
        ("loss = aggregate(logp)", {"aggregation": "seq_mean_token_sum_norm", "norm_tokens": 0}, ["norm_tokens", "above 0"]),
        ('loss = reference("nothing_of_this_name")', {}, ["nothing_of_this_name", "not registered"]),
    ],
)
def test_what_is_missing_is_named(text: str, parameters: dict[str, object], expected: list[str]) -> None:
    with pytest.raises(EquationError) as error:
        evaluate(parse(text), WrittenBatch([2], [1.0], [-1.0, -2.0]), parameters)
    for part in expected:
        assert part in str(error.value)


def test_a_log_probability_that_is_nan_is_not_taken_for_a_number() -> None:
    batch = WrittenBatch([2], [1.0], [-1.0, -2.0], sampler_logp=[0.0, math.nan])
    with pytest.raises(EquationError, match="sampler_logp is NaN at token 1"):
        evaluate(parse("loss = aggregate(logp, logp - sampler_logp < 1)"), batch, {"aggregation": "token_mean"})
    assert evaluate(parse("loss = mean(mean(logp))"), batch, {}).value == -1.5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lengths": [1.5]}, "lengths"),
        ({"lengths": [-1, 3]}, "lengths"),
        ({"lengths": [3]}, r"logp has shape \(2,\), not \(3,\)"),
        ({"advantage": [1.0, 2.0]}, "advantage"),
        ({"ref_logp": [1.0]}, "ref_logp"),
    ],
)
def test_sizes_are_checked(fields: dict[str, list[float]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WrittenBatch(**{"lengths": [2], "advantage": [1.0], "logp": [0.0, 0.0], **fields})
