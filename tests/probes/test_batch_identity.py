"""Identity of a batch, and the histogram of its ratios."""

import hashlib
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pth_exp.losses import TokenBatch
from pth_exp.probes import batch_id, generation_id, ratio_histogram

ROWS = st.lists(
    st.tuples(st.sampled_from(["train:0:ab", "train:1:cd", "é"]), st.lists(st.integers(0, 2**40), max_size=4)), max_size=6
)


def test_encoding_by_hand() -> None:
    # '<' packs without gaps: length of the ID, the ID, number of tokens, the tokens; rows sorted by their bytes
    a, b = struct.pack("<q1sqqq", 1, b"a", 2, 1, 2), struct.pack("<q1sqq", 1, b"b", 1, 7)
    assert batch_id([("b", [7]), ("a", [1, 2])]) == hashlib.sha256(a + b).hexdigest()


@given(ROWS, st.randoms(use_true_random=False))
def test_row_order_does_not_matter(rows: list[tuple[str, list[int]]], random: object) -> None:
    moved = list(rows)
    random.shuffle(moved)  # type: ignore[attr-defined]
    assert batch_id(moved) == batch_id(rows)


@given(ROWS, ROWS)
def test_different_rows_have_different_ids(a: list[tuple[str, list[int]]], b: list[tuple[str, list[int]]]) -> None:
    assert (batch_id(a) == batch_id(b)) == (sorted(a) == sorted(b))


def test_moving_a_token_between_rows_is_another_batch() -> None:
    assert batch_id([("a", [1, 2]), ("a", [3])]) != batch_id([("a", [1]), ("a", [2, 3])])
    assert batch_id([("a", [1])] * 2) != batch_id([("a", [1])])


def test_generation_id() -> None:
    assert generation_id(32, 0) == "32:0"


def test_histogram_counts_each_token_once() -> None:
    shift = [[0.0, 0.5, -0.5, 0.0005], [30.0, -30.0, 1.5, float("nan")]]
    mask = torch.tensor([[True] * 4, [True, True, True, False]])
    logp = torch.tensor(shift, dtype=torch.float64)
    histogram = ratio_histogram(TokenBatch(logp, torch.zeros(2), mask, torch.zeros(2, 4)))
    assert histogram is not None
    bins = dict(zip(zip(histogram["edges"], histogram["edges"][1:], strict=False), histogram["counts"], strict=True))
    assert {b for b, n in bins.items() if n} == {
        (-0.001, 0.001),
        (0.5, 1.0),
        (-0.5, -0.2),
        (10.0, 20.0),
        (-20.0, -10.0),
        (1.0, 2.0),
    }
    assert bins[-0.001, 0.001] == 2
    assert sum(bins.values()) == 7


@pytest.mark.parametrize("missing", ["q", "tokens"])
def test_histogram_is_none_where_nothing_was_measured(missing: str) -> None:
    zero, mask = torch.zeros(1, 2), torch.tensor([[missing != "tokens"] * 2])
    assert ratio_histogram(TokenBatch(zero, torch.zeros(1), mask, None if missing == "q" else zero)) is None
