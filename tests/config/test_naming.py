"""Sets of runs and of values in few words: what is said must be exactly what is meant."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pth_exp import naming
from pth_exp.naming import Runs

ARMS = ["grpo", "tis", "san"]
ALL = [f"{arm}·seed={seed}" for arm in ARMS for seed in range(100)]


@pytest.mark.parametrize(
    ("these", "text"),
    [
        (range(1, 101), "1..100 (100 values)"),
        ([3, 1, 2], "1..3"),
        ([5, 4], "4, 5"),
        ([*range(42), *range(43, 50), 60], "0..41, 43..49, 60 (50 values)"),
        ([1, 2, 4, 5, 7, 9, 11], "1, 2, 4, 5, ... 11 (7 values)"),
        ([1e-4, 1e-5, 1e-4], "1e-05, 0.0001"),
        (["b", "a"], "b, a"),
        ([True, None, False], "true, null, false"),
        ([f"n{i}" for i in range(30)], "n0, n1, n2, n3, ... n29 (30 values)"),
        ([0.5, 10, 2], "0.5, 2, 10"),
        ([[1, 2], {"a": 1}], "[1, 2], {'a': 1}"),
    ],
)
def test_values(these: Any, text: str) -> None:
    assert naming.values(these) == text


@pytest.mark.parametrize(
    ("some", "text"),
    [
        (ALL, "all 300 runs"),
        (ALL[:2], "grpo·seed=0, grpo·seed=1"),
        (ALL[:100], "grpo (100 runs)"),
        (ALL[100:], "tis, san (200 runs)"),
        (ALL[:50], "grpo·seed=0..49 (50 runs)"),
        ([x for x in ALL if x.endswith("=7") or x.endswith("=8")], "seed=7, 8 (6 runs)"),
        ([*ALL[:99], *ALL[100:]], "all but grpo·seed=99, 299 runs"),
        ([x for x in ALL if not x.endswith("seed=7")], "seed=0..6, 8..99 (297 runs)"),
        ([*ALL[:100], ALL[150], ALL[151]], "grpo (100 runs); tis·seed=50, 51 (2 runs)"),
    ],
)
def test_sets_of_runs(some: list[str], text: str) -> None:
    assert Runs(ALL).named(some) == text


def test_runs_without_a_structure_are_counted() -> None:
    labels = [f"{a}·x={x}·y={y}" for a in "ab" for x in range(12) for y in range(12)]
    some = [label for i, label in enumerate(labels) if i * i % 7 in (1, 2)]
    text = Runs(labels).named(some)
    assert len(text) < 800 and text.endswith(" more runs")
    assert Runs(["a.yaml", "b.yaml", "c.yaml", "d.yaml", "e.yaml"]).named(["a.yaml", "b.yaml", "c.yaml", "d.yaml"]) == (
        "a.yaml, b.yaml, c.yaml, d.yaml (4 runs)"
    )


coordinates = list(itertools.product("ab", "012", "xyz"))


@settings(deadline=None)
@given(st.sets(st.sampled_from(coordinates), min_size=1), st.sets(st.sampled_from(coordinates)))
def test_what_is_named_is_what_was_meant(some: set[tuple[str, str, str]], others: set[tuple[str, str, str]]) -> None:
    """The grids are disjoint and make up the runs; a grid that is named by fewer fields still means the same runs."""

    def label(row: tuple[str, str, str]) -> str:
        return f"{row[0]}·seed={row[1]}·queue={row[2]}"

    runs = Runs([label(row) for row in coordinates if row in some | others])
    meant: list[str] = []
    for grid in naming._grids([naming._coordinates(label(row)) for row in sorted(some)]):
        combinations = [label(row) for row in itertools.product(*grid.fields.values())]  # type: ignore[arg-type]
        assert len(combinations) == grid.runs
        meant += combinations
        fewer = runs.telling(grid)
        assert runs._matching(fewer) == set(combinations)
    assert sorted(meant) == sorted(map(label, some))
