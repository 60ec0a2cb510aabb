"""The shipped model and the script that made it."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from pth_exp import schema
from pth_exp.models import solutions, warm_start
from pth_exp.models.load import load_policy
from pth_exp.models.resolve import EMBEDDED_FOLDER
from pth_exp.models.vocabulary import build_tokenizer
from pth_exp.tasks import Split
from pth_exp.tasks.arithmetic import NAMES, Arithmetic, Story

EMBEDDED = schema.ModelConfig(name="embedded", path="embedded")
RECORD = json.loads((EMBEDDED_FOLDER / "warm_start.json").read_text())


def stories(n: int) -> list[Story]:
    return list(Arithmetic(schema.ArithmeticTask("arithmetic", train_problems=n)).stories(Split.train))


@pytest.fixture(scope="module")
def shipped_tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(EMBEDDED_FOLDER)


def test_tokenizer_survives_saving_and_plain_auto_loading(tmp_path: Path, shipped_tokenizer: Any) -> None:
    built = build_tokenizer()
    built.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text((EMBEDDED_FOLDER / "config.json").read_text())
    texts = [text for s in stories(200) for text in (s.prompt, solutions.answer(s, random.Random(s.prompt)))]
    for loaded in (shipped_tokenizer, transformers.AutoTokenizer.from_pretrained(tmp_path)):
        assert loaded.get_vocab() == built.get_vocab()
        assert (loaded.eos_token_id, loaded.pad_token_id) == (built.eos_token_id, built.pad_token_id)
        assert [loaded(t).input_ids for t in texts] == [built(t).input_ids for t in texts]
        assert [loaded.decode(loaded(t).input_ids) for t in texts] == texts


def test_digits_join_and_operands_do_not(shipped_tokenizer: Any) -> None:
    pieces = [" so ", "9", " + ", "7", " = ", "1", "6", ",", " total ", "1", "6", "."]
    tokens = shipped_tokenizer.convert_tokens_to_ids(pieces)
    assert None not in tokens
    tokens.append(shipped_tokenizer.eos_token_id)
    assert shipped_tokenizer.decode(tokens, skip_special_tokens=True) == " so 9 + 7 = 16, total 16."


def test_every_token_of_the_model_has_a_word(shipped_tokenizer: Any) -> None:
    config = transformers.AutoConfig.from_pretrained(EMBEDDED_FOLDER)
    assert sorted(shipped_tokenizer.get_vocab().values()) == list(range(config.vocab_size))


def test_architecture_is_one_that_vllm_takes_on_a_cpu() -> None:
    model, _ = load_policy(EMBEDDED, "cpu")
    c = model.config
    assert (c.model_type, c.hidden_size, c.num_hidden_layers, c.intermediate_size) == ("qwen2", 64, 3, 192)
    assert (c.num_attention_heads, c.num_key_value_heads, c.hidden_size // c.num_attention_heads) == (2, 1, 32)
    assert sum(p.numel() for p in model.parameters()) == RECORD["parameters"]
    assert 140_000 < RECORD["parameters"] < 180_000


def test_shipped_files() -> None:
    names = {p.name for p in EMBEDDED_FOLDER.iterdir() if p.is_file()}
    model = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert names == model | {"README.md", "warm_start.json"}
    assert sum(p.stat().st_size for p in EMBEDDED_FOLDER.iterdir()) < 2_000_000


def test_shipped_weights_are_those_of_the_recorded_settings() -> None:
    weights = (EMBEDDED_FOLDER / "model.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest() == RECORD["weights_sha256"]
    assert warm_start.Settings(**RECORD["settings"]) == warm_start.Settings()
    assert RECORD["styles"] == solutions.SHARES
    card = (EMBEDDED_FOLDER / "README.md").read_text()
    assert RECORD["weights_sha256"] in card
    assert f"| greedy | {RECORD['measured']['greedy_accuracy']:.3f} |" in card


@pytest.mark.slow
def test_measured_accuracy_is_that_of_the_shipped_weights() -> None:
    measured = warm_start.measure(*load_policy(EMBEDDED, "cpu"))
    assert measured.keys() == RECORD["measured"].keys()
    for name, value in measured.items():
        # Another machine may round differently and so part ways with a few responses.
        assert value == pytest.approx(RECORD["measured"][name], rel=0.05), name


@pytest.mark.slow
def test_the_script_twice_gives_identical_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        command = [sys.executable, "-m", "pth_exp.models.warm_start", "--out", str(tmp_path / name), "--steps", "3"]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONHASHSEED": "random"}, capture_output=True)
    first, second = ({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("a", "b"))
    assert first == second
    assert set(first) == {p.name for p in EMBEDDED_FOLDER.iterdir()}
    assert first["model.safetensors"] != (EMBEDDED_FOLDER / "model.safetensors").read_bytes()


def test_a_quarter_of_the_answers_imitated_is_correct() -> None:
    shares = [solutions.SHARES[name] for name in NAMES]
    assert all(sum(share.values()) == pytest.approx(1) for share in shares)
    assert sum(share[solutions.Style.correct] for share in shares) / len(shares) == pytest.approx(0.25)
    assert len({tuple(share.values()) for share in shares}) > 1
    task = Arithmetic(schema.ArithmeticTask("arithmetic"))
    problems, rng = task.problems(Split.train), random.Random(1)
    scores = [task.score(solutions.answer(s, rng), p) for s, p in zip(task.stories(Split.train), problems, strict=True)]
    # A guess is right one time in nine, and a needless step is never right.
    assert sum(scores) / len(scores) == pytest.approx(0.25 + 0.27 / 9, abs=0.025)


def test_training_never_sees_a_test_problem() -> None:
    test = {s.prompt for s in Arithmetic(schema.ArithmeticTask("arithmetic")).stories(Split.test)}
    assert len(test) == 512
    assert not test & {s.prompt for s in stories(warm_start.Settings().steps * warm_start.Settings().examples_per_step)}
