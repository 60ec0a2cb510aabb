"""Aggregation of token terms, by hand and however the batch is split."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pth_exp.losses import Totals, aggregate, aggregation_weights

MODES = ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]


@pytest.mark.parametrize(
    ("mode", "value"),
    [
        ("token_mean", (1 + 2 + 6) / 3),
        ("seq_mean_token_mean", (1.5 + 6) / 2),
        ("seq_mean_token_sum", (3 + 6) / 2),
        ("seq_mean_token_sum_norm", (3 + 6) / 2 / 8),
    ],
)
def test_by_hand_and_empty_responses_do_not_count(mode: str, value: float) -> None:
    terms = torch.tensor([[1.0, 2.0], [6.0, float("nan")], [float("nan"), float("inf")]], requires_grad=True)
    mask = torch.tensor([[True, True], [True, False], [False, False]])
    result = aggregate(terms, mask, mode, norm_tokens=8)
    result.backward()  # type: ignore[no-untyped-call]
    assert result.item() == pytest.approx(value)
    assert terms.grad is not None
    torch.testing.assert_close(terms.grad, aggregation_weights(mask, mode, norm_tokens=8))


@given(st.data())
def test_100_tokens_at_2_and_900_at_a_half_are_065_however_split(data: st.DataObject) -> None:
    """100 x 2.0 + 900 x 0.5 = 650; over 1000 tokens 0.65: into responses of any lengths, and into any micro-batches."""
    tokens = [2.0] * 100 + [0.5] * 900
    cuts = sorted(data.draw(st.sets(st.integers(1, 999), max_size=12)))
    rows = [tokens[a:b] for a, b in zip([0, *cuts], [*cuts, 1000], strict=True)]
    width = max(map(len, rows)) + data.draw(st.integers(0, 5))
    mask = torch.tensor([[t < len(r) for t in range(width)] for r in rows])
    terms = torch.tensor([r + [float("nan")] * (width - len(r)) for r in rows], dtype=torch.float64)
    assert aggregate(terms, mask, "token_mean").item() == pytest.approx(0.65, rel=1e-12)

    ranks = torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=len(rows), max_size=len(rows))))
    parts = [ranks == rank for rank in range(4)]  # any rows, none at all included
    split = sum(aggregate(terms[p], mask[p], "token_mean", totals=Totals(1000, len(rows))).item() for p in parts)
    assert split == pytest.approx(0.65, rel=1e-12)


@pytest.mark.parametrize("mode", MODES)
@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=8), data=st.data())
def test_parts_add_up_to_the_whole(mode: str, lengths: list[int], data: st.DataObject) -> None:
    mask = torch.arange(max(*lengths, 1)) < torch.tensor(lengths)[:, None]
    terms = torch.arange(mask.numel(), dtype=torch.float64).reshape(mask.shape) - 3
    whole = aggregate(terms, mask, mode, norm_tokens=5)
    cut = data.draw(st.integers(0, len(lengths)))
    parts = [aggregate(terms[p], mask[p], mode, 5, Totals.of(mask)) for p in (slice(0, cut), slice(cut, None))]
    assert sum(map(float, parts)) == pytest.approx(float(whole), rel=1e-12, abs=1e-12)


def test_dr_grpos_constant_is_the_same_for_short_and_long_responses() -> None:
    """A token of a response of 1 weighs as one of a response of 3: 1/(2 responses x 10), not 1/T."""
    mask = torch.tensor([[True, False, False], [True, True, True]])
    torch.testing.assert_close(aggregation_weights(mask, "seq_mean_token_sum_norm", 10.0), mask / 20)


@pytest.mark.parametrize("constant", [None, 0.0, -1.0, float("nan")])
def test_a_constant_that_is_none_is_named(constant: float | None) -> None:
    with pytest.raises(ValueError, match="norm_tokens is"):
        aggregation_weights(torch.ones(1, 1, dtype=torch.bool), "seq_mean_token_sum_norm", constant)


@pytest.mark.parametrize("mode", MODES)
def test_nothing_to_aggregate_is_zero(mode: str) -> None:
    assert aggregate(torch.full((2, 3), float("nan")), torch.zeros(2, 3, dtype=torch.bool), mode, 8.0).item() == 0.0
    assert aggregate(torch.zeros(2, 0), torch.zeros(2, 0, dtype=torch.bool), mode, 8.0).item() == 0.0


def test_unknown_aggregation() -> None:
    with pytest.raises(ValueError, match="token_max"):
        aggregation_weights(torch.ones(1, 1, dtype=torch.bool), "token_max")
