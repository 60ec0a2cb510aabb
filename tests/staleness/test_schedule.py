"""The age schedule against a table written by hand from g = max(0, u - k), version = floor(g/N) N, age = u - version."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pth_exp.staleness.schedule import data_age, refreshes_at, sampler_version

# (interval N, age k): {update: (version, age)}
TABLE = {
    (1, 0): {0: (0, 0), 1: (1, 0), 50: (50, 0), 99: (99, 0)},
    (1, 3): {0: (0, 0), 2: (0, 2), 3: (0, 3), 4: (1, 3), 99: (96, 3)},
    (1, 32): {0: (0, 0), 31: (0, 31), 32: (0, 32), 33: (1, 32), 99: (67, 32)},
    (4, 0): {0: (0, 0), 3: (0, 3), 4: (4, 0), 7: (4, 3), 8: (8, 0), 99: (96, 3)},
    (4, 3): {0: (0, 0), 3: (0, 3), 6: (0, 6), 7: (4, 3), 10: (4, 6), 11: (8, 3), 99: (96, 3)},
    (4, 32): {0: (0, 0), 32: (0, 32), 35: (0, 35), 36: (4, 32), 39: (4, 35), 40: (8, 32), 99: (64, 35)},
    (96, 0): {0: (0, 0), 95: (0, 95), 96: (96, 0), 99: (96, 3), 191: (96, 95), 192: (192, 0)},
    (96, 3): {0: (0, 0), 95: (0, 95), 98: (0, 98), 99: (96, 3), 194: (96, 98), 195: (192, 3)},
    (96, 32): {0: (0, 0), 96: (0, 96), 127: (0, 127), 128: (96, 32), 223: (96, 127), 224: (192, 32)},
}


@pytest.mark.parametrize(("interval", "age"), TABLE)
def test_version_and_age_by_hand(interval: int, age: int) -> None:
    for update, expected in TABLE[interval, age].items():
        assert (sampler_version(update, age, interval), data_age(update, age, interval)) == expected, update


def test_refresh_interval_96_gives_the_papers_sawtooth() -> None:
    """Paper, section 2: "between transfers the sampler is frozen, and the first N updates sample from the initial model"."""
    assert [u for u in range(300) if refreshes_at(u, 96)] == [0, 96, 192, 288]
    assert [data_age(u, 0, 96) for u in range(192)] == [*range(96), *range(96)]


@given(st.integers(0, 500), st.integers(0, 64), st.integers(1, 120))
def test_version_is_a_refresh_no_newer_than_the_batch(update: int, age: int, interval: int) -> None:
    version = sampler_version(update, age, interval)
    assert refreshes_at(version, interval)
    assert 0 <= version <= max(0, update - age) < version + interval


@pytest.mark.parametrize(
    ("arguments", "name"), [((-1, 0, 1), "update"), ((0, -1, 1), "replay_age"), ((0, 0, 0), "refresh_interval")]
)
def test_impossible_values_are_named(arguments: tuple[int, int, int], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        sampler_version(*arguments)
