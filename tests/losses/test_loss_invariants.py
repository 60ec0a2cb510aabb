"""What holds for every loss on any batch: the written equation, an exact derivative, and inert padding."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_batches import padded, random_rows, unpadded, written_batches
from written_losses import LOSSES, SEQUENCE, Written, surprisal_derivative

from pth_exp.armfiles import read_arm
from pth_exp.equations import parse
from pth_exp.losses import BoundLoss, TokenBatch, Totals, get_loss, loss_names

ALL = loss_names()


def of(name: str) -> BoundLoss:
    """The loss with its defaults; Dr. GRPO's constant has none."""
    return get_loss(name, **({"norm_tokens": 7.0} if name == "dr_grpo" else {}))


WRITTEN = sorted(LOSSES)
TOKEN_LOSSES = [n for n in WRITTEN if "aggregation" in get_loss(n).parameters]
AGGREGATED = [(n, how) for n in TOKEN_LOSSES for how in ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum")]
FIELDS = ("sampler_logp", "old_logp", "ref_logp")


def reads(name: str) -> list[str]:
    """The log-probabilities that the arm's equation reads beside the learner's; M2PO's reference in numpy names none."""
    text = read_arm(name, Path.cwd()).arm.equation
    assert text is not None
    inputs = {"old_logp"} if name == "m2po" else parse(text, dict(of(name).parameters)).inputs
    return [field for field in FIELDS if field in inputs]


READ = [(name, field) for name in ALL for field in reads(name)]


def rows_of(batch: TokenBatch, rows: object, totals: Totals | None = None) -> TokenBatch:
    fields = ("logp", "advantage", "mask", "sampler_logp", "old_logp", "ref_logp")
    return TokenBatch(**{f: getattr(batch, f).detach()[rows] for f in fields}, totals=totals)


def away_from_kinks(b: Written) -> bool:
    """No ratio within reach of a finite difference of a clip's corner, where the derivative jumps."""
    corners = np.log([0.8, 1.2, 3.0])
    ratios = [np.concatenate([x - y for x, y in zip(b.logp, other, strict=True)]) for other in (b.old, b.sampler)]
    return all(np.abs(r[:, None] - corners).min(initial=1.0) > 1e-4 for r in ratios)


@pytest.mark.parametrize(("name", "how"), [*((n, "") for n in WRITTEN), *AGGREGATED])
@settings(max_examples=40, deadline=None)
@given(b=written_batches().filter(away_from_kinks))
def test_value_and_derivative_are_the_written_equations(name: str, how: str, b: Written) -> None:
    out = get_loss(name, **({"aggregation": how} if how else {}))(padded(b))
    assert out.loss.item() == pytest.approx(LOSSES[name](b, b.logp, *([how] if how else [])), rel=1e-10, abs=1e-12)
    expected = surprisal_derivative(LOSSES[name], b, *([how] if how else []))
    for got, want in zip(unpadded(out.token_coef, b), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-8)


def table_4(name: str, s: np.ndarray, ref: np.ndarray) -> np.ndarray:
    """The coefficient on every grad l_t over the advantage: equations (1) to (3) differentiated by hand, and Table 4."""
    own = np.minimum(1, s.mean() / s)  # no surprisal of these batches is 0
    plus = np.minimum(1, np.maximum(ref, s.mean()) / s)
    to_ref = np.minimum(1, ref / s)
    if name in ("san_ref", "san_ref_written") and not to_ref.any():
        return np.zeros(len(s))
    match name:
        case "seq_norm" | "asympo_reading":
            return np.full(len(s), 1 / s.sum())
        case "seq_gain":
            return np.full(len(s), 1 / (own @ s))
        case "token_weights":
            return own / s.sum()
        case "san":
            np.testing.assert_allclose(own * s, np.minimum(s, s.mean()), rtol=1e-12)  # "capped at the sequence mean"
            return own / (own @ s)
        case "san_plus":
            return plus / np.maximum(ref, s.mean()).sum()
        case "san_plus_written":
            return plus / (plus @ s)
        case "san_ref":
            return to_ref / to_ref.sum() / max(ref.mean(), 1e-6)
        case "san_ref_written":
            return to_ref / (to_ref @ s)
    raise AssertionError(name)


@pytest.mark.parametrize("name", ["san", *SEQUENCE])
@settings(max_examples=60, deadline=None)
@given(b=written_batches())
def test_coefficients_are_the_tables_closed_forms(name: str, b: Written) -> None:
    """Averaged over the responses that have a token."""
    coef = unpadded(of(name)(padded(b)).token_coef, b)
    responses = sum(len(r) > 0 for r in b.logp)
    for row, ref, a, got in zip(b.logp, b.ref, b.advantage, coef, strict=True):
        if len(row) and -row.mean() > 1e-6 and (-row).min() > 0:
            np.testing.assert_allclose(got, a * table_4(name, -row, -ref) / responses, rtol=1e-9)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(max_examples=25, deadline=None)
@given(b=written_batches(), extra=st.integers(0, 3))
def test_token_coef_is_exactly_autograds_derivative(name: str, dtype: torch.dtype, b: Written, extra: int) -> None:
    batch = padded(b, extra, dtype=dtype)
    weights = torch.ones_like(batch.logp, requires_grad=True)
    through = dataclasses.replace(batch, logp=batch.logp.detach() * weights)  # as from a model: not a leaf
    through.logp.retain_grad()
    out = of(name)(through)
    out.loss.backward()
    assert through.logp.grad is not None
    assert out.loss.dtype == out.token_coef.dtype == dtype
    assert torch.equal(out.token_coef, -through.logp.grad)
    assert not out.token_coef.requires_grad
    assert torch.equal(out.token_coef[~batch.mask], torch.zeros(int((~batch.mask).sum()), dtype=dtype))
    with torch.no_grad():
        assert torch.equal(of(name)(batch).token_coef, out.token_coef)


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=40, deadline=None)
@given(b=written_batches(), extra=st.integers(0, 4), empty=st.integers(0, 2), filler=st.sampled_from([0.0, np.nan, -1e30, 7.0]))
def test_padding_changes_nothing(name: str, b: Written, extra: int, empty: int, filler: float) -> None:
    """Neither the width, nor what stands in the slots, nor rows without a token."""
    plain = of(name)(padded(b, filler=-1.0))
    none = [np.zeros(0)] * empty
    wider = Written([*b.logp, *none], [*b.advantage, *[np.nan] * empty], [*b.sampler, *none], [*b.old, *none], [*b.ref, *none])
    batch = padded(wider, extra, filler)
    out = of(name)(batch)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(plain.loss.item(), rel=1e-12, abs=1e-15)
    assert dict(out.metrics) == pytest.approx(dict(plain.metrics), rel=1e-12, abs=1e-15)
    for got, want in zip(unpadded(out.token_coef, b), unpadded(plain.token_coef, b), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-12)
    assert batch.logp.grad is not None
    assert torch.equal(batch.logp.grad[~batch.mask], torch.zeros(int((~batch.mask).sum()), dtype=torch.float64))


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=25, deadline=None)
@given(b=written_batches(), random=st.randoms(use_true_random=False))
def test_row_order_changes_nothing(name: str, b: Written, random: object) -> None:
    order = list(range(len(b.logp)))
    random.shuffle(order)  # type: ignore[attr-defined]
    batch = padded(b)
    out = of(name)(batch)
    shuffled = of(name)(rows_of(batch, order))
    assert shuffled.loss.item() == pytest.approx(out.loss.item(), rel=1e-12, abs=1e-15)
    torch.testing.assert_close(shuffled.token_coef, out.token_coef[order], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", [n for n in ALL if of(n).splittable])
@settings(max_examples=40, deadline=None)
@given(b=written_batches(), ranks=st.lists(st.integers(0, 2), min_size=5, max_size=5))
def test_parts_add_up_to_the_whole_batch(name: str, b: Written, ranks: list[int]) -> None:
    """Micro-batches, or the shares of data-parallel ranks: any rows, none at all included."""
    batch = padded(b)
    whole, loss, metrics = of(name)(batch), 0.0, dict.fromkeys(of(name)(batch).metrics, 0.0)
    for rank in range(3):
        rows = torch.tensor(ranks[: len(b.logp)]) == rank
        out = of(name)(rows_of(batch, rows, Totals.of(batch.mask)))
        torch.testing.assert_close(out.token_coef, whole.token_coef[rows], rtol=1e-12, atol=1e-15)
        loss += out.loss.item()
        metrics = {key: value + out.metrics[key] for key, value in metrics.items()}
    assert loss == pytest.approx(whole.loss.item(), rel=1e-10, abs=1e-13)
    assert metrics == pytest.approx(dict(whole.metrics), rel=1e-10, abs=1e-13)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_ratios_of_50_stay_finite(name: str, dtype: torch.dtype) -> None:
    logp = torch.tensor([[-60.0, -1.0], [-60.0, -1.0]], dtype=dtype, requires_grad=True)
    other = torch.tensor([[-10.0, -51.0], [-10.0, -51.0]], dtype=dtype)  # log-ratios -50 and 50
    mask = torch.ones(2, 2, dtype=torch.bool)
    for advantages in ([1.0, -1.0], [-1.0, -1.0]):
        out = of(name)(TokenBatch(logp, torch.tensor(advantages, dtype=dtype), mask, other, other, other))
        assert torch.isfinite(out.loss) and torch.isfinite(out.token_coef).all()


@pytest.mark.parametrize("name", ALL)
def test_equal_rewards_give_no_gradient(name: str) -> None:
    b = random_rows(1, [3, 5, 2], 0.5)
    out = of(name)(padded(dataclasses.replace(b, advantage=[0.0, 0.0, 0.0])))
    assert out.loss.item() == 0.0
    assert torch.equal(out.token_coef, torch.zeros_like(out.token_coef))


@pytest.mark.parametrize("name", ALL)
def test_a_batch_without_any_token_has_loss_zero(name: str) -> None:
    batch = padded(Written([np.zeros(0)] * 2, [1.0, -1.0], *[[np.zeros(0)] * 2] * 3), extra=3)
    out = of(name)(batch)
    assert out.loss.item() == 0.0
    assert torch.equal(out.token_coef, torch.zeros(2, 3, dtype=torch.float64))


@pytest.mark.parametrize("name", ALL)
def test_tokens_the_learner_is_certain_of_give_finite_coefficients(name: str) -> None:
    """Zero surprisal, and a log-probability that rounding has left above 0."""
    for level in (0.0, 2e-9):
        certain = [np.full(3, level), np.array([level, -1.0]), np.array([level, 0.0, 0.0])]
        for reference in (certain, [np.full(len(r), -1.0) for r in certain]):
            out = of(name)(padded(Written(certain, [1.0, -2.0, 0.5], certain, certain, reference)))
            assert torch.isfinite(out.loss) and torch.isfinite(out.token_coef).all()


def test_san_below_the_floor_is_as_declared() -> None:
    """The coefficient is A w_t / (sum w x 1e-6): all surprisals 0, so w = 1; and 1, 2, 6 times 1e-7, so w = 1, 1, 1/2."""
    rows = [np.zeros(3), -1e-7 * np.array([1.0, 2.0, 6.0])]
    out = get_loss("san")(padded(Written(rows, [3.0, 5.0], rows, rows, rows)))
    expected = torch.tensor([[1 / 3, 1 / 3, 1 / 3], [1 / 2.5, 1 / 2.5, 0.5 / 2.5]], dtype=torch.float64) / 1e-6
    torch.testing.assert_close(out.token_coef, expected * torch.tensor([[3.0], [5.0]]) / 2)
    assert out.loss.item() == pytest.approx(5 * (6e-7 / 2.5) / 1e-6 / 2)  # sum w l = 1e-7 (1 + 2 + 3)


@pytest.mark.parametrize(("name", "field"), READ)
def test_a_missing_log_probability_is_an_error_that_names_it(name: str, field: str) -> None:
    batch = dataclasses.replace(padded(random_rows(0, [2, 3], 0.3)), **{field: None})
    with pytest.raises(ValueError, match=f"no {field}"):
        of(name)(batch)


@pytest.mark.parametrize(("name", "field"), READ)
def test_a_log_probability_missing_at_one_token_is_not_taken_for_a_number(name: str, field: str) -> None:
    batch = padded(random_rows(0, [2, 3], 0.3))
    getattr(batch, field)[1, 1] = float("nan")
    assert torch.isnan(of(name)(batch).loss)


@pytest.mark.parametrize("name", ALL)
def test_what_the_equation_does_not_read_the_loss_does_not_need(name: str) -> None:
    batch = padded(random_rows(3, [4, 2], 1.0))
    alone = dataclasses.replace(batch, **{field: None for field in FIELDS if field not in reads(name)})
    assert torch.equal(of(name)(alone).token_coef, of(name)(batch).token_coef)


@settings(max_examples=40, deadline=None)
@given(b=written_batches())
def test_san_refs_two_forms_agree_exactly_with_the_learner_at_its_reference_and_only_there(b: Written) -> None:
    """With l = l_ref all weights are 1 and S_rob is the reference's mean: the same numbers, to the bit."""
    at = padded(dataclasses.replace(b, ref=b.logp))
    implemented, written = get_loss("san_ref")(at), get_loss("san_ref_written")(at)
    assert torch.equal(implemented.loss, written.loss)
    assert torch.equal(implemented.token_coef, written.token_coef)
    away = padded(dataclasses.replace(b, ref=[r - 0.5 for r in b.logp]))  # w = 1 still, and the reference's mean is not S
    if away.mask.any():
        coefs = [get_loss(n)(away).token_coef.norm() for n in ("san_ref", "san_ref_written")]
        assert coefs[0] < 0.999 * coefs[1]


def test_asympo_readings_gradient_is_seq_norms() -> None:
    batch = padded(random_rows(4, [5, 1, 9], 0.5))
    torch.testing.assert_close(get_loss("asympo_reading")(batch).token_coef, get_loss("seq_norm")(batch).token_coef)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask": torch.ones(2, 3)}, "mask is torch.float32"),
        ({"mask": torch.ones(2, 4, dtype=torch.bool)}, r"mask .* \(2, 4\)"),
        ({"advantage": torch.ones(2, 3)}, "advantage"),
        ({"sampler_logp": torch.zeros(2, 2)}, "sampler_logp"),
        ({"logp": torch.zeros(3)}, "logp"),
    ],
)
def test_shapes_are_checked(change: dict[str, torch.Tensor], message: str) -> None:
    batch = dataclasses.replace(padded(random_rows(0, [2, 3], 0.3)), **change)
    with pytest.raises(ValueError, match=message):
        get_loss("tis_ppo")(batch)
