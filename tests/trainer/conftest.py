"""A tiny random model with a word tokenizer in a folder, and runs of the trainer on it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from pth_exp import schema
from pth_exp.models.vocabulary import build_tokenizer
from pth_exp.records.writer import RunRecorder
from pth_exp.trainer.loop import Outcome, run

ARMS: dict[str, schema.Arm] = {
    "grpo": schema.PpoClipArm("grpo", "grpo", "", "", schema.OldPolicy.recomputed, schema.Correction.none),
    "ppo_clip": schema.PpoClipArm("ppo_clip", "ppo_clip", "", "", schema.OldPolicy.sampler, schema.Correction.ratio, False, True),
    "tis_ppo": schema.TisPpoArm("tis_ppo", "tis_ppo", "", "", schema.OldPolicy.recomputed, schema.Correction.weight, False, True),
    "tis_reinforce": schema.TisReinforceArm(
        "tis_reinforce", "tis_reinforce", "", "", schema.OldPolicy.recomputed, schema.Correction.weight, False, True
    ),
    "san": schema.SanArm("san", "san", "", "", schema.OldPolicy.recomputed, schema.Correction.behaviour_free),
}


def arithmetic() -> schema.ArithmeticTask:
    return schema.ArithmeticTask("arithmetic", train_problems=64, test_problems=16, min_steps=1, max_steps=2)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """As a run of the trainer has it."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random Qwen2 of 2 layers over the task's words, near uniform, so that some of its numbers are right."""
    folder = tmp_path_factory.mktemp("tiny-model")
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        initializer_range=0.15,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


Configure = Callable[..., schema.Config]


@pytest.fixture
def configure(tiny_model: Path) -> Configure:
    """Makes a config; ``a__b=value`` sets field ``a.b``."""

    def make(arm: str = "grpo", **fields: Any) -> schema.Config:
        config = schema.Config(
            arm=dataclasses.replace(ARMS[arm]),
            stack=schema.TrainerStack("trainer", device="cpu", checkpoint_every=None),
            task=arithmetic(),
            model=schema.ModelConfig("tiny", str(tiny_model)),
            seeds=schema.Seeds(7, 7, 7),
            validation=schema.ValidationConfig(every=None, problems=8),
            lr=1e-2,
            updates=6,
            prompts_per_update=4,
            responses_per_prompt=8,
            max_response_tokens=6,
        )
        for path, value in fields.items():
            *parents, leaf = path.split("__")
            node: Any = config
            for parent in parents:
                node = getattr(node, parent)
            assert hasattr(node, leaf), path
            setattr(node, leaf, value)
        return config

    return make


class Ran:
    """The records that a run left behind, attempt after attempt, timings left out."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def rows(self, kind: str) -> list[dict[str, Any]]:
        """Rows of ``updates``, ``batches`` or ``evals``; of a repeated update the newest attempt's."""
        newest: dict[int, dict[str, Any]] = {}
        for path in sorted(self.folder.glob(f"{kind}.*.jsonl")):
            for row in map(json.loads, path.read_text().splitlines()):
                newest[row["update"]] = {k: v for k, v in row.items() if not k.startswith("timing_s/") and k != "attempt"}
        return [newest[update] for update in sorted(newest)]

    def all(self) -> dict[str, Any]:
        first = json.loads((self.folder / "first_batches.json").read_text())
        return {**{kind: self.rows(kind) for kind in ("updates", "batches", "evals")}, "first_batches": first}


Execute = Callable[..., Ran]


@pytest.fixture
def execute(tmp_path: Path) -> Execute:
    """Runs a config in a folder of that name; ``stops`` are the updates before which an attempt is told to stop."""

    def go(config: schema.Config, name: str = "run", stops: tuple[int, ...] = ()) -> Ran:
        folder = tmp_path / name
        folder.mkdir()
        asked = -1
        for attempt, stop in enumerate((*stops, None), start=1):
            start = max(asked, 0)
            asked = start - 1

            def should_stop(stop: int | None = stop) -> bool:
                nonlocal asked
                asked += 1
                return asked == stop

            with RunRecorder(folder, attempt, lambda: None) as recorder:
                outcome = run(config, recorder, folder / "checkpoint", should_stop)
            assert outcome is (Outcome.completed if stop is None else Outcome.preempted)
        return Ran(folder)

    return go
