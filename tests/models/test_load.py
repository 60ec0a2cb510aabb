"""Where models come from, and what must not come along."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from pth_exp import schema
from pth_exp.models import ModelError, fingerprint, resolve
from pth_exp.models.load import load_policy, load_tokenizer, special_tokens
from pth_exp.models.resolve import EMBEDDED_FOLDER


def config(path: str | Path, revision: str | None = None, dtype: schema.Dtype = schema.Dtype.float32) -> schema.ModelConfig:
    return schema.ModelConfig(name="test", path=str(path), revision=revision, dtype=dtype)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EMBEDDED_FOLDER, tmp_path / "model"))


def logits(path: str | Path) -> torch.Tensor:
    model, tokenizer = load_policy(config(path), "cpu")
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokenizer("ana has 9 keys, buys 7?").input_ids])).logits  # type: ignore[no-any-return]


def test_a_planted_generation_config_has_no_effect(folder: Path) -> None:
    planted = {"do_sample": True, "top_k": 1, "top_p": 0.1, "repetition_penalty": 9.0, "eos_token_id": [3, 4]}
    (folder / "generation_config.json").write_text(json.dumps(planted))
    model, tokenizer = load_policy(config(folder), "cpu")
    assert transformers.GenerationConfig.from_pretrained(folder).top_k == 1  # the plant works where it is read
    assert model.generation_config.to_diff_dict() == transformers.GenerationConfig().to_diff_dict()
    plain, its_tokenizer = load_policy(config("embedded"), "cpu")
    assert special_tokens(model.config, tokenizer) == special_tokens(plain.config, its_tokenizer)
    assert torch.equal(logits(folder), logits("embedded"))
    assert fingerprint(config(folder)) == fingerprint(config("embedded"))


def test_policy_is_in_evaluation_mode_and_of_the_type_asked_for() -> None:
    model, _ = load_policy(config("embedded", dtype=schema.Dtype.bfloat16), "cpu")
    assert not model.training
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("configured", "end", "pad", "expected"),
    [
        (10, "<|end|>", "<|pad|>", ((10,), 11, (11,))),
        ([10, 12], "<|end|>", "<|pad|>", ((10, 12), 11, (11,))),
        (None, "<|end|>", None, ((10,), 10, ())),
        (10, "<|end|>", "<|end|>", ((10,), 10, ())),
        (10, None, "<|pad|>", ((10,), 11, (11,))),
    ],
)
def test_end_and_padding_tokens(
    configured: int | list[int] | None, end: str | None, pad: str | None, expected: tuple[tuple[int, ...], int, tuple[int, ...]]
) -> None:
    model, tokenizer = load_policy(config("embedded"), "cpu")
    model.config.eos_token_id, tokenizer.eos_token, tokenizer.pad_token = configured, end, pad
    found = special_tokens(model.config, tokenizer)
    assert (found.eos, found.pad, found.forbidden) == expected


def test_a_model_without_an_end_is_refused() -> None:
    model, tokenizer = load_policy(config("embedded"), "cpu")
    model.config.eos_token_id = tokenizer.eos_token = None
    with pytest.raises(ModelError, match=r"model.path: .*no end-of-sequence token; set eos_token"):
        special_tokens(model.config, tokenizer)


def test_fingerprint_follows_every_file_that_a_run_reads(folder: Path) -> None:
    before = fingerprint(config(folder))
    for name, kinds in {
        "model.safetensors": {0},
        "config.json": {0},
        "tokenizer.json": {1},
        "tokenizer_config.json": {1},
        "README.md": set(),
    }.items():
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content + b" ")
        after = fingerprint(config(folder))
        assert {i for i in (0, 1) if after[i] != before[i]} == kinds, name
        (folder / name).write_bytes(content)
    assert fingerprint(config(folder)) == before
    (folder / "added_tokens.json").write_text("{}")
    assert fingerprint(config(folder))[1] != before[1]


def test_fingerprints_need_no_torch() -> None:
    code = (
        "import sys; from pth_exp import schema, models, tasks;"
        "models.fingerprint(schema.ModelConfig(name='e', path='embedded'));"
        "tasks.data_fingerprint(schema.ArithmeticTask('arithmetic'));"
        "sys.exit(bool({'torch', 'transformers', 'hydra'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("path", ["./nowhere", "/nowhere/at/all", "~/nowhere", "a/b/c"])
def test_missing_folder_names_field_value_and_remedy(path: str) -> None:
    with pytest.raises(ModelError, match=rf"model.path: there is no folder '{path}'.* model=embedded"):
        resolve(config(path))


def test_incomplete_folders_are_named(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"model.path: .*empty' has no config.json"):
        resolve(config(tmp_path / "empty"))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"model.path: .*has no \*.safetensors .*convert"):
        resolve(config(folder))


def test_unreadable_weights_are_named(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ModelError, match=r"model.path: .*cannot be loaded"):
        load_policy(config(folder), "cpu")


def test_remote_code_is_not_run(folder: Path, tmp_path: Path) -> None:
    settings = json.loads((folder / "config.json").read_text())
    settings |= {"model_type": "mine", "auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}}
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    with pytest.raises(ModelError, match=r"model.path: .*cannot be loaded"):
        load_policy(config(folder), "cpu")
    assert not (tmp_path / "ran").exists()


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.mark.usefixtures("offline")
def test_unreachable_hub_names_field_value_and_remedy() -> None:
    for function in (resolve, fingerprint, load_tokenizer):
        with pytest.raises(ModelError, match=r"model.path: 'org/model' .* the hub cannot be reached .*model=embedded"):
            function(config("org/model"))


@pytest.mark.usefixtures("offline")
def test_impossible_hub_name_is_named() -> None:
    with pytest.raises(ModelError, match=r"model.path: 'not a name' is neither"):
        resolve(config("not a name"))
