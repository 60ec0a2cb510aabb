"""A job of two ranks, each with two micro-batches and a vLLM server of its own, against the same job on one rank."""

from __future__ import annotations

from pathlib import Path

import pytest
from allocation import Allocation
from cluster import absent
from running import TWO_RANKS, pth

from pth_exp.records.reader import RunRecords, Sweep

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

UPDATES = 5
NEAR = ("actor/", "ratio/", "rollout_corr/", "coef/", "reward/", "response_length/")


@pytest.fixture(scope="module")
def two(verl_python: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RunRecords:
    """On two nodes of SLURM's where there is one; it takes as long as on this machine alone."""
    if not absent():
        allocation: Allocation = request.getfixturevalue("allocation")
        return RunRecords.load(allocation.run)
    folder = tmp_path_factory.mktemp("ranks")
    done = pth(folder, verl_python, "run", *TWO_RANKS)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = Sweep.load(folder / "multirun_outputs").runs
    return run


def test_the_batch_was_divided(two: RunRecords) -> None:
    assert two.received is not None
    objects = two.received["objects"]
    assert (objects["ranks"], objects["micro_batch_rows"], objects["sampler_servers"]) == (2, 4, 2)


def test_two_ranks_train_as_one_does(two: RunRecords, runs: dict[str, RunRecords]) -> None:
    """Until the first refresh both sample from the initial weights; by rounding alone the rest may differ."""
    one = runs["tis_ppo"]
    for update in range(4):
        mine, theirs = two.updates[update], one.updates[update]
        assert two.batches[update]["batch_id"] == one.batches[update]["batch_id"]
        assert (mine["sampler/version"], mine["sampler/fingerprint"]) == (
            theirs["sampler/version"],
            theirs["sampler/fingerprint"],
        )
        for name, value in theirs.items():
            if isinstance(value, float) and name.startswith(NEAR):
                # the least and the largest are one token's, on which AdamW's rounding shows
                near = 1e-4 if name.endswith(("q00", "q100", "max_abs")) else 1e-5
                assert mine[name] == pytest.approx(value, rel=near, abs=near), (update, name)
    assert two.updates[0]["learner/fingerprint"] == one.updates[0]["learner/fingerprint"]


def test_both_servers_take_the_weights(two: RunRecords) -> None:
    learner, sampler = two.column("learner/fingerprint"), two.column("sampler/fingerprint")
    assert two.column("sampler/version") == [0, 0, 0, 0, 4]
    assert sampler == [learner[0]] * 4 + [learner[4]] and len(set(learner)) == UPDATES


def test_the_backward_pass_is_the_equations(two: RunRecords) -> None:
    for row in (two.updates[update] for update in (0, 1, 2, 4)):
        assert max(row["backward/value_error"], row["backward/gradient_error"]) < 1e-5
