from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from pth_exp import schema
from pth_exp.trainer.checkpoint import CheckpointStore

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


def state(number: int) -> dict[str, object]:
    return {
        "update": number,
        "weights": {"a": torch.arange(5.0) * number},
        "names": [["x", "y"]],
        "batches": {3: (1, True, None)},
    }


def test_round_trip(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoint", keep=1)
    assert store.load() is None
    store.save(4, state(4))
    loaded = store.load()
    assert loaded is not None
    assert torch.equal(loaded.pop("weights")["a"], torch.arange(5.0) * 4)
    assert loaded == {"update": 4, "names": [["x", "y"]], "batches": {3: (1, True, None)}}


@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_a_damaged_file_falls_back_to_the_one_before(tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    store.save(2, state(2))
    newest = store.save(9, state(9))
    content = bytearray(newest.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
    newest.write_bytes(content[:-1] if damage == "cut" else content)
    with caplog.at_level(logging.WARNING):
        loaded = store.load()
    assert loaded is not None
    assert loaded["update"] == 2
    assert newest.name in caplog.text
    assert "falling back" in caplog.text
    store.save(9, state(9))
    again = store.load()
    assert again is not None
    assert again["update"] == 9


def test_an_interrupted_write_leaves_the_older_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path, keep=0)
    store.save(1, state(1))

    def fail(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="no space"):
        store.save(2, state(2))
    assert [path.name[:15] for path in tmp_path.iterdir()] == ["update-00000001"]


def test_the_number_of_checkpoints_is_bounded(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for update in range(12):
        store.save(update, state(update))
    assert sorted(int(path.name[7:15]) for path in tmp_path.iterdir()) == [9, 10, 11]
