"""Real verl, Ray and vLLM on this machine's CPU, through ``pth run``; and what runs inside their environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from pth_exp.design import flatten
from pth_exp.models.load import load_policy
from pth_exp.probes.weights import fingerprint
from pth_exp.records.reader import RunRecords, Sweep
from pth_exp.schema import ModelConfig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

INTERVAL, UPDATES = 3, 5
SMALL = [
    *("stack=verl", f"refresh_interval={INTERVAL}", f"updates={UPDATES}", "prompts_per_update=4", "responses_per_prompt=4"),
    *("max_response_tokens=24", "task.train_problems=8", "validation.every=2", "validation.problems=16", "seed=7"),
]


@pytest.fixture(scope="module")
def sweep(verl_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    """One sweep of two arms, one after the other."""
    folder = tmp_path_factory.mktemp("verl")
    command = [sys.executable, "-P", "-m", "pth_exp.cli", "run", "arm=ppo_clip,san", *SMALL]
    environment = {**os.environ, "PTH_VERL_PYTHON": str(verl_python)}
    done = subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True, timeout=2400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return Sweep.load(folder / "multirun_outputs")


def test_inside_verls_environment(verl_python: Path) -> None:
    command = [
        str(verl_python),
        "-m",
        "pytest",
        "-q",
        "-o",
        "addopts=",
        "-p",
        "no:cacheprovider",
        str(Path(__file__).with_name("inside")),
    ]
    done = subprocess.run(command, text=True, capture_output=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_checks_pass(sweep: Sweep) -> None:
    """All four: the lag is as scheduled, the ratio is the sampler's, and verl's backward pass follows the written equation."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pth_exp.cli", "check", str(sweep.path)], text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_sampler_takes_weights_on_every_third_update_only(sweep: Sweep) -> None:
    initial = fingerprint(load_policy(ModelConfig(name="embedded", path="embedded"), "cpu")[0])
    for run in sweep.runs:
        assert run.column("sampler/version") == [0, 0, 0, 3, 3]
        assert run.column("data/age") == [0, 1, 2, 0, 1]
        sampler, learner = run.column("sampler/fingerprint"), run.column("learner/fingerprint")
        assert sampler == [initial] * 3 + [learner[3]] * 2
        assert learner[0] == initial and len(set(learner)) == UPDATES


def test_validation_evaluates_the_learner_and_leaves_the_sampler_alone(sweep: Sweep) -> None:
    for run in sweep.runs:
        learner = run.column("learner/fingerprint")
        assert [row["update"] for row in run.evaluations] == [0, 2, 4, UPDATES]
        for row in run.evaluations:
            assert row["sampler/fingerprint_before"] == row["sampler/fingerprint_after"]
            assert row["update"] == UPDATES or row["learner/fingerprint"] == learner[row["update"]]
            assert len(row["correct"]) == 16 and len(set(row["problems"])) == 16


def test_the_recorded_q_is_the_samplers_own_probability(sweep: Sweep) -> None:
    """With equal weights q and pi agree to rounding; a lag of a step is far above it."""
    for run in sweep.runs:
        shift = run.column("rollout_corr/mean_abs_shift")
        quiet, lagged = [shift[0], shift[3]], [shift[1], shift[2], shift[4]]
        assert max(quiet) < 2e-6 and min(lagged) > 1e-4, shift


def test_old_policy_and_reference_are_whose_they_should_be(sweep: Sweep) -> None:
    clip, san = sweep.runs
    assert clip.column("ratio/old_sampler_max_abs") == [0.0] * UPDATES, "ppo_clip's old policy is what the sampler recorded"
    assert max(san.column("ratio/old_policy_max_abs")) < 1e-5, "san's is the learner's, recomputed"
    for run in sweep.runs:
        assert run.column("actor/kl_loss")[0] < 1e-10 < run.column("actor/kl_loss")[-1]


def test_equal_seeds_draw_equal_batches_until_weights_differ(sweep: Sweep) -> None:
    clip, san = sweep.runs
    assert clip.first_batches == san.first_batches, "verl's order over three epochs; the worker has held it against the trainer's"
    assert [row["batch_id"] for row in clip.batches[:INTERVAL]] == [row["batch_id"] for row in san.batches[:INTERVAL]]
    assert clip.batches[-1]["batch_id"] != san.batches[-1]["batch_id"]


def test_rows_are_ordered_by_drawn_prompt_and_response(sweep: Sweep) -> None:
    for run in sweep.runs:
        for row in run.batches:
            assert [tuple(pair) for pair in row["rows"]] == [(name, n) for name in row["prompt_ids"] for n in range(4)]


def test_what_arrived_is_read_back_and_verls_whole_config_kept(sweep: Sweep) -> None:
    for run in sweep.runs:
        assert run.received is not None and run.received["seeds.data"] == 7
        assert run.received["objects"]["parameters"] == 153_792 and run.received["objects"]["reference"]
        asked, held = (yaml.safe_load((run.path / name).read_text()) for name in ("verl.yaml", "received_verl.yaml"))
        places = run.received["objects"]["places"]
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
