"""Configs that share most of their values resolve as each would alone."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pth_exp.launchers.resolving import Resolver

leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2),
    st.sampled_from([0.5, 2e-4, "text", "???", "${seed}", "x${seed}", "\\${seed}", "${a.lr}", "${a}", "${missing}", "${.lr}"]),
    st.lists(st.sampled_from([1, True, 1.0, "${seed}", "b", {"c": "${a.lr}"}]), max_size=3),
    st.dictionaries(st.sampled_from("xy"), st.sampled_from([1, "${seed}"]), max_size=2),
)
nodes = st.fixed_dictionaries({"lr": leaves, "name": leaves, "inner": st.fixed_dictionaries({"lr": leaves, "deep": leaves})})
configs = st.fixed_dictionaries({"seed": st.integers(0, 3), "a": nodes, "b": nodes})


def alone(raw: dict[str, Any]) -> Any:
    try:
        return OmegaConf.to_container(OmegaConf.create(raw), resolve=True, throw_on_missing=True, enum_to_str=True)
    except (OmegaConfBaseException, RecursionError):
        return "refused"


def shared(resolver: Resolver, raw: dict[str, Any]) -> Any:
    try:
        return resolver.resolve(raw, DictConfig({}))
    except (OmegaConfBaseException, RecursionError):
        return "refused"


ONE: dict[str, Any] = {"lr": 1, "name": None, "inner": {"lr": None, "deep": None}}


@settings(max_examples=50, deadline=None)
@example(
    {"seed": 0, "a": ONE, "b": ONE | {"name": "${a.lr}"}}, [{"seed": 0, "a": ONE | {"lr": True}, "b": ONE | {"name": "${a.lr}"}}]
)
@given(configs, st.lists(configs, min_size=1, max_size=3))
def test_each_resolves_as_it_would_alone(base: dict[str, Any], jobs: list[dict[str, Any]]) -> None:
    resolver = Resolver(copy.deepcopy(base))
    for raw in [*jobs, base, *reversed(jobs)]:  # nothing of one job is left for the next
        before = text(raw)
        assert text(shared(resolver, raw)) == text(alone(raw))
        assert text(raw) == before


def text(value: Any) -> str:
    """Tells 1, 1.0 and true apart, and not the order of keys."""
    return json.dumps(value, sort_keys=True)


def test_a_resolver_is_asked_for_each_job_and_what_is_cached_is_asked_once(request: pytest.FixtureRequest) -> None:
    asked = iter(range(100))
    OmegaConf.register_new_resolver("count_each", lambda: next(asked))
    OmegaConf.register_new_resolver("count_once", lambda: next(asked), use_cache=True)
    for name in ("count_each", "count_once"):
        request.addfinalizer(lambda name=name: OmegaConf.clear_resolver(name))
    raw = {"each": "${count_each:}", "once": "${count_once:}"}
    master = OmegaConf.create({"once": "${count_once:}"})
    assert master.once == 0
    resolver = Resolver(raw)
    assert [resolver.resolve(raw, master) for _ in range(2)] == [{"each": 1, "once": 0}, {"each": 2, "once": 0}]
