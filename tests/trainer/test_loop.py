from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from pth_exp import schema
from pth_exp.trainer.learner import Learner, UpdateReport
from pth_exp.trainer.rollout import Rollout
from pth_exp.trainer.sampler import Sampler

from .conftest import ARMS, Configure, Execute

TRAINING = ("updates", "batches", "first_batches")


def test_same_seed_twice_gives_the_same_records(configure: Configure, execute: Execute) -> None:
    one, two = (execute(configure("tis_ppo", refresh_interval=2, validation__every=2), name).all() for name in ("one", "two"))
    assert one == two
    assert len({row["learner/fingerprint"] for row in one["updates"]}) == 6, "the weights move at every update"


def test_another_sampling_seed_gives_other_responses(configure: Configure, execute: Execute) -> None:
    one, two = (execute(configure(seeds__sampling=seed), str(seed)).rows("batches") for seed in (1, 2))
    assert [row["prompt_ids"] for row in one] == [row["prompt_ids"] for row in two]
    assert all(a["batch_id"] != b["batch_id"] for a, b in zip(one, two, strict=True))


def test_validation_changes_nothing_in_training(configure: Configure, execute: Execute) -> None:
    every = execute(configure(refresh_interval=3, validation__every=1), "every").all()
    never = execute(configure(refresh_interval=3, validation__every=None), "never").all()
    assert {k: every[k] for k in TRAINING} == {k: never[k] for k in TRAINING}
    assert [row["update"] for row in every["evals"]] == [0, 1, 2, 3, 4, 5, 6]
    assert never["evals"] == []
    for row in every["evals"]:
        assert row["sampler/fingerprint_before"] == row["sampler/fingerprint_after"]
        assert row["policy_version"] == row["update"]
    learners = {row["update"]: row["learner/fingerprint"] for row in every["updates"]}
    assert all(row["learner/fingerprint"] == learners[row["update"]] for row in every["evals"][:-1])
    assert every["evals"][2]["learner/fingerprint"] != every["evals"][2]["sampler/fingerprint_after"], "the learner is validated"


def test_arms_of_one_seed_share_their_batches_until_the_first_refresh(configure: Configure, execute: Execute) -> None:
    batches = {arm: execute(configure(arm, refresh_interval=4), arm).rows("batches") for arm in ("grpo", "tis_ppo", "san")}
    for arm in ("tis_ppo", "san"):
        same = [a["batch_id"] == b["batch_id"] for a, b in zip(batches["grpo"], batches[arm], strict=True)]
        assert same == [True] * 4 + [False] * 2
        assert [row["prompt_ids"] for row in batches["grpo"]] == [row["prompt_ids"] for row in batches[arm]]


# By hand: weights of version v generate at updates v..v+N-1; the batch of update u was generated at max(0, u - k).
AGES = {
    (1, 0): [0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    (1, 3): [0, 1, 2, 3, 3, 3, 3, 3, 3, 3],
    (1, 32): [*list(range(33)), 32, 32, 32],
    (4, 0): [0, 1, 2, 3, 0, 1, 2, 3, 0, 1],
    (4, 3): [0, 1, 2, 3, 4, 5, 6, 3, 4, 5],
    (4, 32): [*list(range(36)), 32, 33, 34],
    (96, 0): [*range(96), 0, 1, 2],
    (96, 3): [*range(99), 3, 4],
    (96, 32): [*range(128), 32, 33],
}


@pytest.mark.parametrize("queue", list(schema.Queue))
@pytest.mark.parametrize(("interval", "age"), [pytest.param(n, k, marks=[pytest.mark.slow] if n == 96 else []) for n, k in AGES])
def test_ages_in_the_records(configure: Configure, execute: Execute, interval: int, age: int, queue: schema.Queue) -> None:
    expected = AGES[interval, age]
    config = configure(
        "tis_ppo",
        refresh_interval=interval,
        replay_age=age,
        queue=queue,
        updates=len(expected),
        prompts_per_update=1,
        responses_per_prompt=2,
        max_response_tokens=2,
        kl__coef=0.0,
    )
    rows = execute(config).rows("updates")
    assert [row["data/age"] for row in rows] == expected
    assert [row["sampler/version"] for row in rows] == [u - a for u, a in enumerate(expected)]
    draws = [row["data/batch_index"] for row in rows]
    assert draws == (list(range(len(rows))) if queue == "unique_prefill" else [max(0, u - age) for u in range(len(rows))])
    # The stamp is the truth: the fingerprint that generated a batch is the learner's fingerprint at that version.
    learners = [row["learner/fingerprint"] for row in rows]
    assert all(row["sampler/fingerprint"] == learners[row["sampler/version"]] for row in rows)


def test_age_zero_is_on_policy_to_rounding(configure: Configure, execute: Execute) -> None:
    for row in execute(configure("tis_ppo")).rows("updates"):
        assert row["ratio/exactly_one_share"] == 1
        assert row["ratio/old_sampler_max_abs"] < 1e-5
        assert row["rollout_corr/mean_abs_shift"] < 1e-6


def test_one_step_with_a_recomputed_old_policy_never_clips_however_stale(configure: Configure, execute: Execute) -> None:
    rows = execute(configure(refresh_interval=6)).rows("updates")
    assert all(row["actor/pg_clipfrac"] == 0 and row["ratio/exactly_one_share"] == 1 for row in rows)
    assert rows[5]["rollout_corr/k3_kl"] > 1e3 * rows[0]["rollout_corr/k3_kl"]


def test_two_steps_with_a_recomputed_old_policy_clip(configure: Configure, execute: Execute) -> None:
    rows = execute(configure(optimizer__steps_per_batch=2)).rows("updates")
    by_step = [row["ratio/clipfrac_by_step"] for row in rows]
    assert all(first == 0 for first, _ in by_step)
    assert max(second for _, second in by_step) > 0
    assert max(row["actor/pg_clipfrac"] for row in rows) > 0
    assert all(row["ratio/old_policy_max_abs"] == 0 for row in rows)


def test_a_snapshot_that_aliases_the_learner_shows_in_the_fingerprints(
    configure: Configure, execute: Execute, monkeypatch: pytest.MonkeyPatch
) -> None:
    def alias(self: Sampler, weights: torch.nn.Module, version: int) -> None:
        self.policy.model = weights  # what a refresh without a copy does
        self.version = version

    def fingerprints(name: str) -> list[set[str]]:
        seen: dict[int, set[str]] = {}
        for row in execute(configure(refresh_interval=3), name).rows("updates"):
            seen.setdefault(row["sampler/version"], set()).add(row["sampler/fingerprint"])
        return list(seen.values())

    assert [len(f) for f in fingerprints("copied")] == [1, 1]
    monkeypatch.setattr(Sampler, "refresh", alias)
    assert [len(f) for f in fingerprints("aliased")] == [3, 3]


def test_received_is_read_from_the_objects(configure: Configure, execute: Execute) -> None:
    folder = execute(configure("tis_ppo", lr=3e-4, optimizer__weight_decay=0.05, arm__cap=1.5)).folder
    received: dict[str, Any] = yaml.safe_load((folder / "received.yaml").read_text())
    assert received["lr"] == 3e-4
    assert received["optimizer.weight_decay"] == 0.05
    assert received["arm.loss"] == "tis_ppo"
    assert received["arm.cap"] == 1.5
    assert received["arm.aggregation"] == "token_mean"
    assert received["arm.advantage"] == "group_std"
    assert (received["optimizer.grad_norm"], received["optimizer.skip_below"]) == ("clip", 1e-6)
    assert received["seeds.data"] == 7
    assert received["objects"]["device"] == "cpu"


@pytest.mark.parametrize("kind", list(schema.Advantage))
def test_the_arm_s_advantage_reaches_the_learner_and_is_read_back(
    kind: schema.Advantage, configure: Configure, execute: Execute, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[float]] = []
    update = Learner.update

    def spy(self: Learner, rollout: Rollout, advantage: Tensor) -> UpdateReport:
        seen.append(advantage.tolist())
        return update(self, rollout, advantage)

    monkeypatch.setattr(Learner, "update", spy)
    ran = execute(configure(arm__advantage=kind))
    assert yaml.safe_load((ran.folder / "received.yaml").read_text())["arm.advantage"] == kind
    for row, advantages in zip(ran.rows("batches"), seen, strict=True):
        groups = torch.tensor(row["rewards"], dtype=torch.float64).reshape(4, 8)
        expected = groups - groups.mean(1, keepdim=True)
        if kind is schema.Advantage.group_std:
            expected = expected / (groups.std(1, keepdim=True) + 1e-6)
        assert advantages == pytest.approx(expected.flatten().tolist(), rel=1e-6, abs=1e-7)
    assert any(a != 0 for advantages in seen for a in advantages)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model__reference": schema.Reference.none}, "model.reference"),
        ({"stack__record_sampler_logp": False, "arm": "tis_ppo"}, "stack.record_sampler_logp"),
        ({"stack__device": "cuda:99"}, "stack.device"),
        ({"optimizer__name": schema.OptimizerName.adamw_8bit}, "optimizer.name=adamw_8bit"),
    ],
)
def test_a_config_that_cannot_run_is_refused_by_field(
    configure: Configure, execute: Execute, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        execute(configure(**fields))


def test_no_reference_is_kept_when_nothing_reads_it(configure: Configure, execute: Execute) -> None:
    rows = execute(configure(kl__coef=0.0, model__reference=schema.Reference.none)).rows("updates")
    assert all(row["actor/kl_loss"] is None for row in rows)


def test_an_arm_without_sampler_log_probs_runs_and_says_not_measured(configure: Configure, execute: Execute) -> None:
    rows = execute(configure("san", stack__record_sampler_logp=False)).rows("updates")
    assert all(row["rollout_corr/kl"] is None and row["coef/sampler_response"] is None for row in rows)


def test_shadow_arms_change_nothing_in_training(configure: Configure, execute: Execute) -> None:
    """To the last bit; a shadow that needs a reference makes the run keep one, which nothing else reads."""
    fields: dict[str, Any] = {"refresh_interval": 3, "kl__coef": 0.0, "validation__every": 3}
    shadows = {arm: dataclasses.replace(ARMS[arm]) for arm in ("tis_reinforce", "ppo_clip", "san")}
    shadows["san"].needs_reference = True
    plain = execute(configure("tis_ppo", **fields), "plain").all()
    beside = execute(configure("tis_ppo", probe__shadows=shadows, **fields), "beside").all()
    pairs = [row.pop("shadow/pairs") for row in beside["updates"]]
    assert all(row.pop("shadow/pairs") is None for row in plain["updates"])
    assert plain == beside
    assert all(len(found) == 6 and found[0]["a"] == "tis_ppo" for found in pairs)
    assert any(pair["cosine"] not in (None, 1.0) for found in pairs for pair in found)


def test_a_shadow_s_advantages_are_normalised_as_its_arm_says(configure: Configure, execute: Execute) -> None:
    """One loss with and without the standard deviation, which is not 1 in groups of eight rewards of 0 or 1."""
    shadow = dataclasses.replace(ARMS["san"], advantage=schema.Advantage.group_mean)
    rows = execute(configure("san", probe__shadows={"centred": shadow}, updates=3)).rows("updates")
    ratios = [ratio for row in rows if (ratio := row["shadow/pairs"][0]["norm_ratio"]) is not None]
    assert ratios and all(ratio > 1.5 for ratio in ratios)  # the standard deviation is at most .535


WRITTEN = "w = sg(min(exp(clip(logp - sampler_logp, -20, 20)), cap))\nloss = aggregate(-A * w * logp)"


@pytest.mark.parametrize("activations", list(schema.Activations))
def test_the_loss_is_held_against_its_equation(configure: Configure, execute: Execute, activations: schema.Activations) -> None:
    """Before training, and in the backward pass of updates 0, 1, 2 and 4, penalty and micro-batches included."""
    config = configure(
        "tis_reinforce",
        arm__equation=WRITTEN,
        stack__activations=activations,
        stack__micro_batch_tokens=20,
        refresh_interval=3,
        kl__coef=0.1,
    )
    ran = execute(config)
    (start,) = ran.rows("equations")
    assert start["update"] == 0 and start["not_measured"] is None
    assert start["float64/gradient_error"] < 1e-12 and start["float32/gradient_error"] < 2e-6
    errors = {row["update"]: row["backward/gradient_error"] for row in ran.rows("updates")}
    assert [update for update, error in errors.items() if error is not None] == [0, 1, 2, 4]
    assert all(error < 1e-5 for error in errors.values() if error is not None)
    assert max(row["backward/value_error"] or 0 for row in ran.rows("updates")) < 1e-5


def test_a_resumed_run_keeps_the_first_backward_pass_and_measures_the_loss_again(configure: Configure, execute: Execute) -> None:
    config = configure("tis_reinforce", arm__equation=WRITTEN, stack__checkpoint_every=1)
    plain, resumed = execute(config, "plain"), execute(config, "resumed", stops=(3,))
    assert plain.rows("updates") == resumed.rows("updates")
    assert [row["update"] for row in resumed.rows("equations")] == [0, 3]
    assert all(row["float64/gradient_error"] < 1e-12 for row in resumed.rows("equations"))


def test_an_equation_of_something_else_is_recorded_as_such(configure: Configure, execute: Execute) -> None:
    ran = execute(configure("tis_reinforce", arm__equation="loss = aggregate(-2 * A * logp)", updates=1, kl__coef=0.0))
    (start,), (update,) = ran.rows("equations"), ran.rows("updates")
    assert start["float64/gradient_error"] > 0.4
    assert update["backward/gradient_error"] == pytest.approx(0.5, abs=1e-3)
    assert update["backward/norm_ratio"] == pytest.approx([0.5, 0.5], abs=1e-3)  # w = 1 at age 0


def test_an_equation_that_cannot_be_read_stops_no_training(configure: Configure, execute: Execute) -> None:
    ran = execute(configure("san", arm__equation="loss = mean(", updates=2))
    assert "line 1" in ran.rows("equations")[0]["not_measured"]
    assert all("line 1" in row["backward/not_measured"] for row in ran.rows("updates"))
