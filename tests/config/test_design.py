"""The one comparison: a table of faults, each beside the healthy sweep that it was made from."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pth_exp.design import ABSENT, Described, brief, compare, flatten, labels
from pth_exp.schema import DesignConfig, PerArm

Run = dict[str, Any]


def make(arm: str, seed: int | None, **fields: Any) -> Run:
    arms: dict[str, dict[str, Any]] = {
        "grpo": {"name": "grpo", "correction": "none", "old_policy": "recomputed", "clip_low": 0.2},
        "san": {"name": "san", "correction": "behaviour_free", "old_policy": "recomputed"},
        "tis": {"name": "tis", "correction": "weight", "old_policy": "recomputed", "cap": 2.0},
        "geo": {"name": "geo", "correction": "rejection", "old_policy": "recomputed", "upper": 1.001},
        "ppo": {"name": "ppo", "correction": "ratio", "old_policy": "sampler", "clip_low": 0.2},
    }
    streams = {"data": seed, "sampling": seed or 0, "init": seed or 0, "eval": 0}
    return {"arm": arms[arm], "seed": seed, "seeds": streams, "lr": 2e-4, "queue": "unique_prefill", **fields}


def sweep() -> dict[str, Run]:
    return {f"{arm}·{seed}": make(arm, seed) for arm in ("grpo", "tis", "san") for seed in (42, 43)}


def design(**fields: Any) -> DesignConfig:
    return DesignConfig(**{"vary": ["arm", "seed"], **fields})


def found(
    runs: dict[str, Run], declared: DesignConfig, swept: tuple[str, ...] = (), **more: dict[str, Any]
) -> set[tuple[str, str]]:
    described = [Described(label, values, **{k: v.get(label, {}) for k, v in more.items()}) for label, values in runs.items()]
    return {(f.kind, f.field) for f in compare(described, declared, swept).findings}


def put(label: str, path: str, value: Any) -> Callable[[dict[str, Run]], None]:
    def change(runs: dict[str, Run]) -> None:
        *parents, name = path.split(".")
        node = runs[label] = copy.deepcopy(runs[label])
        for key in parents:
            node = node[key]
        node[name] = value

    return change


def each(*changes: Callable[[dict[str, Run]], None]) -> Callable[[dict[str, Run]], None]:
    def change(runs: dict[str, Run]) -> None:
        for one in changes:
            one(runs)

    return change


FAULTS: list[tuple[str, Callable[[dict[str, Run]], None], DesignConfig, set[tuple[str, str]]]] = [
    ("another learning rate", put("san·42", "lr", 1e-4), design(), {("undeclared-difference", "lr")}),
    ("another field of a group", put("san·42", "seeds.eval", 7), design(), {("undeclared-difference", "seeds.eval")}),
    ("an arm's own field, in one of its runs", put("tis·42", "arm.cap", 3.0), design(), {("undeclared-difference", "arm.cap")}),
    ("a data seed that stayed", put("tis·43", "seeds.data", 42), design(), {("swept-but-equal", "seeds.data")}),
    ("a sampling seed that stayed", put("tis·43", "seeds.sampling", 0), design(), {("swept-but-equal", "seeds.sampling")}),
    ("a field that must rest", put("san·42", "queue", "warmup"), design(vary=["arm", "seed", "queue"], fixed=["queue"]),
     {("fixed-field-differs", "queue")}),
    ("one run twice", lambda runs: runs.update({"again": copy.deepcopy(runs["san·42"])}), design(), {("duplicate", "config_id")}),
    ("a declared field that rests", lambda runs: None, design(vary=["arm", "seed", "queue"]), {("swept-but-equal", "queue")}),
    ("a ratio against the learner", put("grpo·42", "arm.correction", "ratio"), design(),
     {("ratio-with-recomputed", "arm.old_policy"), ("undeclared-difference", "arm.correction")}),
    ("a weight that is one", put("tis·42", "arm.old_policy", "sampler"), design(),
     {("weight-with-sampler", "arm.old_policy"), ("undeclared-difference", "arm.old_policy")}),
    ("a rejection of nothing", lambda runs: runs.update({"geo": make("geo", 42) | {
        "arm": {"name": "geo", "correction": "rejection", "old_policy": "sampler"}}}), design(),
     {("rejection-with-sampler", "arm.old_policy")}),
    ("an arm's rate that did not arrive", lambda runs: None, design(per_arm=[PerArm("lr", {"san": 1e-4}, "its own optimum")]),
     {("undeclared-difference", "lr")}),
    ("other arms' rate in its shadow", each(put("san·42", "lr", 1e-4), put("san·43", "lr", 1e-4),
     put("tis·42", "lr", 3e-4)), design(per_arm=[PerArm("lr", {"san": 1e-4}, "its own optimum")]),
     {("undeclared-difference", "lr")}),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "declared", "expected"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS])
def test_fault_is_found_and_nothing_else(
    fault: Callable[[dict[str, Run]], None], declared: DesignConfig, expected: set[tuple[str, str]]
) -> None:
    runs = sweep()
    fault(runs)
    assert found(runs, declared) == expected


def test_healthy_sweep_has_no_finding_and_says_what_varies() -> None:
    runs = sweep()
    comparison = compare([Described(label, values) for label, values in runs.items()], design())
    assert comparison.findings == []
    assert set(comparison.varied) == {"seed", "seeds.data", "seeds.sampling", "seeds.init"}
    assert set(comparison.per_arm) == {"arm.name", "arm.correction", "arm.clip_low", "arm.cap"}
    assert comparison.per_arm["arm.cap"]["san·42"] == ABSENT
    assert comparison.unexpected == {}


def test_the_paper_s_seeds_default_43_44_are_healthy() -> None:
    runs = {f"{arm}·{seed}": make(arm, seed) for arm in ("grpo", "tis") for seed in (None, 43, 44)}
    assert found(runs, design()) == set()


def test_null_and_zero_differ_in_the_data_order_only_and_that_is_what_null_means() -> None:
    assert found({"a": make("grpo", None), "b": make("grpo", 0)}, design(vary=["seed"])) == set()


def test_a_data_seed_that_is_to_rest_is_declared() -> None:
    runs = sweep()
    for label in runs:
        put(label, "seeds.data", 7)(runs)
    assert found(runs, design()) == {("swept-but-equal", "seeds.data")}
    assert found(runs, design(fixed=["seeds.data"])) == set()


def test_one_replicate_of_a_declared_seed_is_no_fault() -> None:
    assert found({arm: make(arm, 42) for arm in ("grpo", "san")}, design()) == set()


def test_per_arm_value_that_arrived_is_declared_and_shown() -> None:
    runs = sweep()
    for seed in (42, 43):
        put(f"san·{seed}", "lr", 1e-4)(runs)
    declared = design(per_arm=[PerArm("lr", {"san": 1e-4}, "its own optimum")])
    comparison = compare([Described(k, v) for k, v in runs.items()], declared)
    assert comparison.findings == []
    assert comparison.per_arm["lr"]["san·42"] == 1e-4


def test_blocks_tell_apart_what_may_differ_between_them() -> None:
    runs = {f"{arm}·96": make(arm, 42, refresh_interval=96, replay_age=0) for arm in ("grpo", "san")}
    runs |= {f"{arm}·32": make(arm, 42, refresh_interval=1, replay_age=32, lr=1e-4) for arm in ("tis", "san")}
    assert found(runs, design(blocks=["refresh_interval", "replay_age", "lr"])) == set()
    assert found(runs, design(blocks=["refresh_interval", "replay_age"])) == {("undeclared-difference", "lr")}
    put("san·32", "arm.correction", "none")(runs)
    assert found(runs, design(blocks=["refresh_interval", "replay_age", "lr"])) == set(), "an arm may differ between blocks"


def test_vary_null_means_what_was_swept() -> None:
    runs = sweep()
    assert found(runs, DesignConfig(), ("arm", "seed")) == set()
    assert ("undeclared-difference", "seed") in found(runs, DesignConfig(), ("arm",))


def test_swept_field_that_is_equal_everywhere() -> None:
    assert ("swept-but-equal", "lr") in found(sweep(), DesignConfig(), ("arm", "seed", "lr"))


def test_override_and_option_that_did_not_arrive() -> None:
    runs = sweep()
    kinds = found(runs, design(), given={"san·42": {"lr": 1e-3}}, choices={"tis·42": {"arm": "tis_ppo"}})
    assert kinds == {("override-did-not-arrive", "lr"), ("override-did-not-arrive", "arm")}
    assert found(runs, design(), given={"san·42": {"lr": 2e-4}}, choices={"tis·42": {"arm": "tis"}}) == set()


def test_execution_fields_are_shown_and_are_no_fault() -> None:
    runs = {label: {**values, "stack": {"threads": 1 + (label == "san·42")}} for label, values in sweep().items()}
    comparison = compare([Described(k, v) for k, v in runs.items()], design())
    assert comparison.findings == [] and set(comparison.execution) == {"stack.threads"}


def test_inputs_contents_are_compared_in_place_of_their_paths() -> None:
    runs = sweep()
    for number, label in enumerate(runs):
        runs[label] |= {"task": {"name": "gsm8k", "path": f"/data/{number}"}, "inputs": {"data": "same"}}
    assert found(runs, design()) == set()
    runs["san·42"] |= {"inputs": {"data": "other"}}
    assert found(runs, design()) == {("undeclared-difference", "inputs.data")}


def test_any_two_mappings_can_be_compared() -> None:
    a = {"x": {"y": 1, "z": [1, 2]}, "when": "2026"}
    b = {"x": {"y": 1, "z": [1, 3]}}
    comparison = compare([Described("a", a), Described("b", b)], DesignConfig())
    assert comparison.unexpected == {"x.z": {"a": [1, 2], "b": [1, 3]}, "when": {"a": "2026", "b": ABSENT}}


leaves = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text("ab1.é", max_size=4))
trees = st.dictionaries(
    st.text("abc", min_size=1), st.recursive(leaves, lambda t: st.dictionaries(st.text("abc", min_size=1), t)), max_size=4
)


@given(trees)
def test_flatten_keeps_every_leaf(tree: dict[str, Any]) -> None:
    def leaf_count(node: Any) -> int:
        return sum(map(leaf_count, node.values())) if isinstance(node, dict) and node else 1

    assert len(flatten(tree)) == (leaf_count(tree) if tree else 0)


@settings(deadline=None)
@given(st.permutations(list(sweep())), st.sampled_from([f[1] for f in FAULTS if f[2].per_arm == []]))
def test_findings_do_not_depend_on_the_order_of_runs(order: list[str], fault: Callable[[dict[str, Run]], None]) -> None:
    runs = sweep()
    fault(runs)
    reordered = {label: runs[label] for label in order} | runs
    assert found(reordered, design()) == found(runs, design())


def names(runs: list[Run], declared: DesignConfig) -> list[str]:
    return labels([run["arm"]["name"] for run in runs], [flatten(run) for run in runs], declared, declared.vary or [])


def test_labels_are_short_and_unique() -> None:
    assert names([make("grpo", 1), make("san", 1)], design()) == ["grpo", "san"]
    assert names(list(sweep().values())[:3], design()) == ["grpo·seed=42", "grpo·seed=43", "tis·seed=42"]
    blocks = [make("san", 1, replay_age=0), make("san", 1, replay_age=32), make("grpo", 1, replay_age=0)]
    assert names(blocks, design(blocks=["replay_age"])) == ["san·replay_age=0", "san·replay_age=32", "grpo"]
    assert names([make("san", 1), make("san", 1)], design()) == ["san·#0", "san·#1"]


def many(count: int) -> dict[str, Run]:
    return {f"{arm}·seed={seed}": make(arm, seed) for arm in ("grpo", "tis", "san") for seed in range(count)}


def messages(runs: dict[str, Run], declared: DesignConfig, **more: dict[str, Any]) -> list[str]:
    described = [Described(label, values, **{k: v.get(label, {}) for k, v in more.items()}) for label, values in runs.items()]
    return [f"{f.kind}: {f.message}" for f in brief(compare(described, declared).findings)]


def test_what_is_wrong_with_hundreds_of_runs_is_said_once() -> None:
    runs = many(100)
    for seed in range(100):
        put(f"san·seed={seed}", "lr", 1e-4)(runs)
        put(f"tis·seed={seed}", "arm.old_policy", "sampler")(runs)
    put("grpo·seed=7", "queue", "warmup")(runs)
    assert messages(runs, design(), given={f"grpo·seed={seed}": {"lr": 1.0 + seed // 99} for seed in range(100)}) == [
        "override-did-not-arrive: asked for lr=1.0, resolved to 0.0002, in grpo·seed=0..98 (99 runs); "
        "asked for lr=2.0, resolved to 0.0002, in grpo·seed=99",
        "weight-with-sampler: arm.correction=weight with arm.old_policy=sampler: old policy / sampler is 1 for every token, "
        "in tis (100 runs)",
        "undeclared-difference: lr differs, which the design does not declare: 0.0002 (grpo, tis (200 runs)), "
        "0.0001 (san (100 runs))",
        "undeclared-difference: queue differs, which the design does not declare: "
        "unique_prefill (all but grpo·seed=7, 299 runs), warmup (grpo·seed=7)",
    ]


def test_a_seed_that_reached_none_of_hundreds_is_said_once() -> None:
    runs = many(100)
    for label in runs:
        put(label, "seeds.data", 42)(runs)
    assert messages(runs, design()) == [
        "swept-but-equal: seed is varied but did not reach seeds.data: "
        "seed=0..41, 43..99 (297 runs): seed=0..41, 43..99 (99 values), seeds.data=42"
    ]


def test_hundreds_of_doubles_are_counted() -> None:
    runs = many(100)
    for label, values in list(runs.items()):
        runs[f"{label}·#2"] = copy.deepcopy(values)
    said = messages(runs, design())
    assert said[0] == "duplicate: grpo·seed=0, grpo·seed=0·#2: the same science fields, so the same run"
    assert said[3:] == ["duplicate: and 297 more like these, in 594 runs"]
    assert len(compare([Described(k, v) for k, v in runs.items()], design()).findings) == 300


def test_runs_of_one_arm_that_differ_are_named_and_no_others() -> None:
    runs = many(100)
    put("tis·seed=5", "arm.cap", 3.0)(runs)
    (finding,) = compare([Described(k, v) for k, v in runs.items()], design()).findings
    assert set(finding.runs) == {f"tis·seed={seed}" for seed in range(100)}
    assert finding.message == ("arm.cap differs between runs of one arm: 2.0 (tis·seed=0..4, 6..99 (99 runs)), 3.0 (tis·seed=5)")


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 2), st.sampled_from([1e-4, 1]), st.sampled_from("xy")), max_size=12)
)
def test_labels_are_unique_whatever_differs(rows: list[tuple[str, int, float, str]]) -> None:
    runs = [make("grpo", seed, lr=lr, queue=queue) | {"arm": {"name": arm}} for arm, seed, lr, queue in rows]
    found = names(runs, design(vary=["arm", "seed", "lr"], blocks=["queue"]))
    assert len(set(found)) == len(found)
    for label, (arm, *_) in zip(found, rows, strict=True):
        assert label.split("·")[0] == arm


def test_values_are_equal_as_their_json_is() -> None:
    def differs(a: Any, b: Any) -> bool:
        return bool(compare([Described("a", {"x": a}), Described("b", {"x": b})], DesignConfig(vary=[])).unexpected)

    nan = float("nan")
    assert not differs(nan, float("nan")) and not differs([nan], [float("nan")]) and not differs(2e-4, 0.0002)
    assert differs(0.0, -0.0) and differs(1, 1.0) and differs(1, True) and differs("1", 1) and differs(None, "null")
