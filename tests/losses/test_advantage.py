"""Group-normalised advantages by hand, and against numpy."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pth_exp.losses import group_advantages


def test_by_hand_with_rows_of_groups_interleaved() -> None:
    """Group 7: rewards 1, 0, 0, 1: mean 1/2, unbiased variance (4 x 1/4)/3 = 1/3. Group 3: 2, 4: mean 3, variance 2."""
    got = group_advantages(torch.tensor([1.0, 2.0, 0.0, 0.0, 4.0, 1.0]), torch.tensor([7, 3, 7, 7, 3, 7]))
    a, b = 0.5 / (3**-0.5 + 1e-6), 1 / (2**0.5 + 1e-6)
    assert got.tolist() == pytest.approx([a, -b, -a, -a, b, a], rel=1e-6)


def test_without_the_standard_deviation_follows_the_group_id() -> None:
    """Dr. GRPO: group 7 has mean 1/2, group 3 mean 3, wherever their rows stand."""
    rewards, group = torch.tensor([1.0, 2.0, 0.0, 0.0, 4.0, 1.0]), torch.tensor([7, 3, 7, 7, 3, 7])
    assert group_advantages(rewards, group, normalise_std=False).tolist() == [0.5, -1.0, -0.5, -0.5, 1.0, 0.5]
    order = torch.tensor([4, 0, 5, 3, 1, 2])
    assert group_advantages(rewards[order], group[order], normalise_std=False).tolist() == [1.0, 0.5, 0.5, -0.5, -1.0, -0.5]


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3, -7.3])
def test_equal_rewards_give_exactly_zero(reward: float) -> None:
    """0.1 summed eight times and divided by eight is not 0.1 in binary; over 1e-6 the difference would train."""
    for dtype in (torch.float32, torch.float64):
        got = group_advantages(torch.tensor([reward] * 8 + [1.0, 0.0], dtype=dtype), torch.tensor([0] * 8 + [1, 1]))
        assert got[:8].tolist() == [0.0] * 8
        assert got[8] == -got[9] != 0
        centred = group_advantages(torch.tensor([reward] * 8, dtype=dtype), torch.zeros(8).long(), normalise_std=False)
        assert centred.tolist() == [0.0] * 8


@given(st.lists(st.tuples(st.integers(0, 4), st.floats(-5, 5, width=32)), min_size=1, max_size=40))
def test_against_numpy_group_by_group(rows: list[tuple[int, float]]) -> None:
    members = {g: np.array([r for h, r in rows if h == g]) for g, _ in rows}
    rows = [(g, r) for g, r in rows if len(members[g]) > 1]
    got = group_advantages(torch.tensor([r for _, r in rows], dtype=torch.float64), torch.tensor([g for g, _ in rows]).long())
    expected = [0.0 if np.ptp(members[g]) == 0 else (r - members[g].mean()) / (members[g].std(ddof=1) + 1e-6) for g, r in rows]
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-9, atol=1e-12)


def test_a_group_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match="group 5 has one response"):
        group_advantages(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([2, 5, 2]))


def test_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match="rewards and group"):
        group_advantages(torch.ones(3), torch.ones(2))
