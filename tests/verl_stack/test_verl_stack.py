"""Real verl, Ray and vLLM on this machine's CPU, through ``pth run``; and what runs inside their environment."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from running import ARMS, INTERVAL, UPDATES, pth

from pth_exp.checks.result import Verdict
from pth_exp.checks.run import check_sweep
from pth_exp.design import flatten
from pth_exp.models.load import load_policy
from pth_exp.probes.weights import fingerprint
from pth_exp.records.reader import RunRecords, Sweep
from pth_exp.schema import ModelConfig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

VERSIONS = [0] * 4 + [4] * 4 + [8] * 4
LAGGED = [update for update in range(UPDATES) if update % INTERVAL]


def test_inside_verls_environment(verl_python: Path) -> None:
    inside = str(Path(__file__).with_name("inside"))
    command = [str(verl_python), "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider", inside]
    done = subprocess.run(command, text=True, capture_output=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_checks_judge_real_verl_records(sweep: Sweep, runs: dict[str, RunRecords], verl_python: Path) -> None:
    """The lag is as scheduled, each ratio is what its arm claims, and verl's backward pass follows the written equation."""
    done = pth(sweep.path, verl_python, "check", str(sweep.path))
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = {(arm, verdict.check): str(verdict.outcome) for arm, run in runs.items() for verdict in judged(sweep, run)}
    expected = {(arm, check): "pass" for arm in ARMS for check in ("ratio", "config", "batches", "losses")}
    assert verdicts == {**expected, ("grpo", "ratio"): "warn"}


def judged(sweep: Sweep, run: RunRecords) -> list[Verdict]:
    return [verdict for verdict in check_sweep(sweep).verdicts if verdict.run == run.label]


def test_the_ratio_is_against_whom_the_arm_says(runs: dict[str, RunRecords]) -> None:
    """Against the learner itself it is 1 for every token of every update, and the clip never acts, however old the data."""
    for arm in ("grpo", "tis_ppo"):
        assert runs[arm].column("ratio/exactly_one_share") == [1.0] * UPDATES
        assert runs[arm].column("actor/pg_clipfrac") == [0.0] * UPDATES
    clip = runs["ppo_clip"].column("ratio/exactly_one_share")
    assert max(clip[update] for update in LAGGED) < 0.1, clip
    assert runs["ppo_clip"].column("ratio/old_sampler_max_abs") == [0.0] * UPDATES
    for arm in ("grpo", "tis_ppo", "san"):
        assert runs[arm].column("ratio/old_policy_max_abs") == [0.0] * UPDATES, "the learner's, recomputed, to the last bit"
        assert min(runs[arm].column("ratio/old_sampler_max_abs")[update] for update in LAGGED) > 1e-3


def test_the_sampler_takes_weights_on_every_fourth_update_only(runs: dict[str, RunRecords]) -> None:
    initial = fingerprint(load_policy(ModelConfig(name="embedded", path="embedded"), "cpu")[0])
    for run in runs.values():
        assert run.column("sampler/version") == VERSIONS
        assert run.column("data/age") == [0, 1, 2, 3] * 3
        sampler, learner = run.column("sampler/fingerprint"), run.column("learner/fingerprint")
        assert sampler == [learner[version] for version in VERSIONS]
        assert learner[0] == initial and len(set(learner)) == UPDATES


def test_validation_evaluates_the_learner_and_leaves_the_sampler_alone(runs: dict[str, RunRecords]) -> None:
    """Between two refreshes, and on a refresh, where the sampler has just taken the weights that are evaluated."""
    for run in runs.values():
        learner, sampler = run.column("learner/fingerprint"), run.column("sampler/fingerprint")
        assert [row["update"] for row in run.evaluations] == list(range(0, UPDATES + 1, 2))
        for row in run.evaluations:
            update = row["update"]
            assert row["sampler/fingerprint_before"] == row["sampler/fingerprint_after"]
            if update < UPDATES:
                assert row["learner/fingerprint"] == learner[update]
                assert row["sampler/fingerprint_after"] == sampler[update]
            assert len(row["correct"]) == 16 and len(set(row["problems"])) == 16


def test_the_recorded_q_is_the_samplers_own_probability(runs: dict[str, RunRecords]) -> None:
    """With equal weights q and pi agree to rounding; a lag of a step is far above it."""
    for run in runs.values():
        mean, largest = run.column("rollout_corr/mean_abs_shift"), run.column("ratio/old_sampler_max_abs")
        quiet = [update for update in range(UPDATES) if update not in LAGGED]
        assert max(mean[update] for update in quiet) < 2e-6 and min(mean[update] for update in LAGGED) > 1e-4, mean
        assert max(largest[update] for update in quiet) < 5e-5, largest


def test_the_penalty_is_to_the_initial_policy(runs: dict[str, RunRecords]) -> None:
    for run in runs.values():
        assert run.column("actor/kl_loss")[0] < 1e-10 < run.column("actor/kl_loss")[-1]


def test_equal_seeds_draw_equal_batches_until_weights_differ(runs: dict[str, RunRecords]) -> None:
    first = runs["grpo"]
    for arm in ARMS[1:]:
        run = runs[arm]
        assert run.first_batches == first.first_batches, "verl's order over epochs; the worker has held it against the trainer's"
        assert [r["batch_id"] for r in run.batches[:INTERVAL]] == [r["batch_id"] for r in first.batches[:INTERVAL]]
        assert run.batches[-1]["batch_id"] != first.batches[-1]["batch_id"]


def test_rows_are_ordered_by_drawn_prompt_and_response(runs: dict[str, RunRecords]) -> None:
    for run in runs.values():
        for row in run.batches:
            assert [tuple(pair) for pair in row["rows"]] == [(name, n) for name in row["prompt_ids"] for n in range(4)]


def test_what_arrived_is_read_back_and_verls_whole_config_kept(runs: dict[str, RunRecords]) -> None:
    for run in runs.values():
        assert run.received is not None and run.received["seeds.data"] == 7
        objects = run.received["objects"]
        assert objects["parameters"] == 153_792 and objects["reference"] and objects["forbidden_tokens"] == [11]
        assert (objects["ranks"], objects["micro_batch_rows"]) == (1, 16)
        assert run.column("actor/lr") == [2e-4] * UPDATES
        asked, held = (yaml.safe_load((run.path / name).read_text()) for name in ("verl.yaml", "received_verl.yaml"))
        places = objects["places"]
        assert differences(asked, held) == set(places)
        assert held["actor_rollout_ref"]["model"]["path"] == places["actor_rollout_ref.model.path"]


def differences(asked: dict[str, Any], held: dict[str, Any]) -> set[str]:
    left, right = flatten(asked), flatten(held)
    return {name for name in left.keys() | right.keys() if repr(left.get(name)) != repr(right.get(name))}


def test_nothing_is_left_behind(sweep: Sweep) -> None:
    for run in sweep.runs:
        marker = str((run.path / "frozen.yaml").resolve()).encode()
        for process in Path("/proc").iterdir():
            if process.name.isdigit():
                try:
                    assert marker not in (process / "environ").read_bytes(), process
                except OSError:
                    continue


def test_records_are_whole(sweep: Sweep) -> None:
    for run in sweep.runs:
        assert RunRecords.load(run.path).problems == []
