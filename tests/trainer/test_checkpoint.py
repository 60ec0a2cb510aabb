from __future__ import annotations

from pathlib import Path

import pytest

from pth_exp import schema

from .conftest import Configure, Execute


@pytest.mark.parametrize("queue", list(schema.Queue))
@pytest.mark.parametrize("stops", [(1,), (6,), (5, 9)])
def test_a_resumed_run_equals_the_uninterrupted_one(
    configure: Configure, execute: Execute, queue: schema.Queue, stops: tuple[int, ...]
) -> None:
    config = configure(
        "tis_ppo",
        refresh_interval=4,
        replay_age=3,
        queue=queue,
        updates=11,
        prompts_per_update=2,
        max_response_tokens=4,
        validation__every=2,
        optimizer__steps_per_batch=2,
    )
    whole, resumed = execute(config, "whole"), execute(config, "resumed", stops)
    assert len(list(resumed.folder.glob("updates.*.jsonl"))) == len(stops) + 1
    assert resumed.all() == whole.all()
    # The last validation's fingerprint is that of the final weights.
    assert len({row["learner/fingerprint"] for row in whole.rows("updates")}) == 11


def test_periodic_checkpoints_are_resumed_from(configure: Configure, execute: Execute, tmp_path: Path) -> None:
    config = configure(updates=7, stack__checkpoint_every=3, stack__keep_checkpoints=1)
    ran = execute(config)
    names = sorted(path.name for path in (ran.folder / "checkpoint").iterdir())
    assert [name[:15] for name in names] == ["update-00000006", "update-00000007"], "the last two are kept, and nothing else"


def test_a_run_with_its_norm_set_resumes_and_counts_what_it_skips(configure: Configure, execute: Execute) -> None:
    """Some groups' rewards are equal; without a KL a batch of such groups has no gradient, and the weights stay."""
    config = configure(
        "san",
        optimizer__grad_norm=schema.GradNorm.set,
        optimizer__steps_per_batch=2,
        kl__coef=0.0,
        prompts_per_update=1,
        responses_per_prompt=2,
        updates=12,
    )
    whole, resumed = execute(config, "whole"), execute(config, "resumed", (3, 8))
    assert resumed.all() == whole.all()
    rows = whole.rows("updates")
    skipped = [row["actor/grad_skipped"] for row in rows]
    assert set(skipped) == {0, 2}
    assert all(row["actor/grad_clipped"] is None for row in rows)
    for row, after, count in zip(rows, rows[1:], skipped, strict=False):
        assert (row["learner/fingerprint"] == after["learner/fingerprint"]) is (count == 2)


def test_a_bfloat16_run_resumes_with_its_masters(configure: Configure, execute: Execute) -> None:
    config = configure(model__dtype=schema.Dtype.bfloat16, lr=1e-4, updates=4)
    whole, resumed = execute(config, "whole"), execute(config, "resumed", (2,))
    assert resumed.all() == whole.all()
