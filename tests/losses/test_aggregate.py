"""Aggregation of token terms, by hand and however the batch is split."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pth_exp.losses import aggregate, aggregation_weights

MODES = ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"]


@pytest.mark.parametrize(
    ("mode", "value"),
    [("token_mean", (1 + 2 + 6) / 3), ("seq_mean_token_mean", (1.5 + 6) / 2), ("seq_mean_token_sum", (3 + 6) / 2)],
)
def test_by_hand_and_empty_responses_do_not_count(mode: str, value: float) -> None:
    terms = torch.tensor([[1.0, 2.0], [6.0, float("nan")], [float("nan"), float("inf")]], requires_grad=True)
    mask = torch.tensor([[True, True], [True, False], [False, False]])
    result = aggregate(terms, mask, mode)
    result.backward()  # type: ignore[no-untyped-call]
    assert result.item() == pytest.approx(value)
    assert terms.grad is not None
    torch.testing.assert_close(terms.grad, aggregation_weights(mask, mode))


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

    whole = aggregation_weights(mask, "token_mean", dtype=torch.float64)
    step = data.draw(st.integers(1, len(rows)))
    parts = [slice(i, i + step) for i in range(0, len(rows), step)]
    split = sum(float((whole[p] * terms[p].masked_fill(~mask[p], 0.0)).sum()) for p in parts)
    assert split == pytest.approx(0.65, rel=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_nothing_to_aggregate_is_zero(mode: str) -> None:
    assert aggregate(torch.full((2, 3), float("nan")), torch.zeros(2, 3, dtype=torch.bool), mode).item() == 0.0
    assert aggregate(torch.zeros(2, 0), torch.zeros(2, 0, dtype=torch.bool), mode).item() == 0.0


def test_unknown_aggregation() -> None:
    with pytest.raises(ValueError, match="token_max"):
        aggregation_weights(torch.ones(1, 1, dtype=torch.bool), "token_max")
