"""The memory estimate of `--dry-run`, held against numbers worked out by hand and against models' published sizes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sweeping import pth

from pth_exp import schema
from pth_exp.launchers.memory import GB, VERL_PROCESSES, Estimate, estimate, told
from pth_exp.launchers.shapes import KNOWN, NoShape, Shape, shape_of
from pth_exp.schema import Activations, Config, Dtype, ModelConfig

SMALL = Shape(hidden=4, intermediate=10, layers=3, heads=2, kv_heads=1, head_dim=2, vocabulary=7, tied=False, bias=True)


def run(stack: schema.StackConfig, **fields: Any) -> Config:
    arm = schema.PpoClipArm("grpo", "grpo", "GRPO", None, correction=schema.Correction.none)
    config = Config(
        arm=arm,
        stack=stack,
        task=schema.ArithmeticTask("arithmetic"),
        model=ModelConfig("m", "m", dtype=Dtype.bfloat16),
        prompts_per_update=4,
        responses_per_prompt=8,
        max_prompt_tokens=20,
        max_response_tokens=30,
    )
    return dataclasses.replace(config, **fields)


def verl(**fields: Any) -> schema.VerlStack:
    return schema.VerlStack("verl", **{"device": "cuda", "micro_batch_rows": 2, "sampler_rows": 10, "gpu_memory": 0.25, **fields})


def test_parameters_by_hand() -> None:
    attention = 4 * (4 + 4) + 4 * 4 + (4 + 4)  # queries and output 4 x 4, keys and values 4 x 2 each; three biases of 4, 2, 2
    assert SMALL.layer == attention + 3 * 4 * 10 + 2 * 4 == 184
    assert SMALL.ends == 2 * 7 * 4 + 4 == 60 and SMALL.parameters == 3 * 184 + 60 == 612
    assert dataclasses.replace(SMALL, tied=True, bias=False).parameters == 612 - 28 - 3 * 8


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("Qwen/Qwen2.5-0.5B", 494_032_768),
        ("Qwen/Qwen2.5-Math-1.5B", 1_543_714_304),
        ("Qwen/Qwen2.5-3B-Instruct", 3_085_938_688),
        ("Qwen/Qwen2.5-Math-7B", 7_615_616_512),
        ("meta-llama/Llama-3.2-3B-Instruct", 3_212_749_824),
    ],
)
def test_the_papers_models_have_their_published_number_of_parameters(name: str, published: int) -> None:
    assert KNOWN[name].parameters == published and shape_of(ModelConfig("m", name)) == KNOWN[name]


def test_the_embedded_models_config_gives_the_number_that_its_card_names() -> None:
    assert shape_of(ModelConfig("embedded", "embedded")).parameters == 153_792


@pytest.mark.parametrize(
    ("config", "said"), [(None, "not on this machine; name a folder"), ('{"model_type": "mamba"}', "model_type 'mamba'")]
)
def test_a_model_of_unknown_size_is_said_to_be_one(config: str | None, said: str, here: Path) -> None:
    if config is not None:
        (here / "config.json").write_text(config)
    with pytest.raises(NoShape, match=said):
        shape_of(ModelConfig("m", str(here)))


def test_verl_on_gpus_by_hand() -> None:
    """612 parameters in bfloat16, 2 ranks, micro-batches of 2 responses of 20 + 30 tokens."""
    found = estimate(run(verl(ranks=2)), SMALL)
    assert found.device == {
        "weights": 1224,
        "gradients": 1224,
        "Adam's moments": 2448,
        "gathered weights": 2 * (60 + 184),
        "activations": 2 * 100 * (3 * 4 + 8 * 4 + 4 * 10),
        "logits": 2 * 4 * 100 * 7,
    }
    assert found.sampler == {"weights": 2 * 612, "cache": 2 * 3 * 1 * 2 * 2 * 10 * 50}
    assert found.host == {"processes": VERL_PROCESSES, "reference": 4 * 612, "sampler's weights put aside": 2 * 612 * 2}
    learner, sampler = sum(found.device.values()), 1224 + 12_000
    assert learner == 27_784 and found.smallest_gpu == round(max(27_784 / 0.75, sampler / 0.25)) == 52_896


def test_what_a_run_does_without_takes_nothing() -> None:
    without = run(verl(), kl=schema.KlConfig(coef=0.0), validation=schema.ValidationConfig(every=None))
    assert estimate(without, SMALL).host == {"processes": VERL_PROCESSES}
    reads = dataclasses.replace(without.arm, needs_reference=True)
    assert estimate(dataclasses.replace(without, arm=reads), SMALL).host["reference"] == 2448


def test_verl_on_a_cpu_is_all_in_the_machines_memory() -> None:
    gpu, cpu = (estimate(run(verl(ranks=2, device=device)), SMALL) for device in ("cuda", "cpu"))
    assert cpu.device == cpu.sampler == {}
    together = 2 * (sum(gpu.device.values()) + sum(gpu.sampler.values())) + sum(gpu.host.values())
    assert sum(cpu.host.values()) == together


def test_the_trainer_by_hand() -> None:
    stack = schema.TrainerStack(
        "trainer", device="cuda", micro_batch_tokens=60, sampler_rows=10, activations=Activations.micro_batch
    )
    found = estimate(run(stack), SMALL)
    tokens = 20 + 60  # two responses of 30, whose prompt of 20 is computed once
    assert found.device == {
        "weights": (2 + 4) * 612,
        "gradients": (2 + 4) * 612,
        "Adam's moments": 8 * 612,
        "reference": 2 * 612,
        "activations": 2 * tokens * 3 * (8 * 4 + 4 * 10),
        "logits": 8 * 60 * 7,
        "cache": 12_000,
    }
    whole = estimate(run(dataclasses.replace(stack, activations=Activations.whole_batch)), SMALL)
    assert whole.device["logits"] == 8 * 32 * 30 * 7 and whole.device["activations"] == 2 * (80 + 960) * 3 * 72
    single = run(stack, model=ModelConfig("m", "m", dtype=Dtype.float32))
    assert estimate(single, SMALL).device["weights"] == 4 * 612, "float32 weights are their own masters"


@given(ranks=st.sampled_from([1, 2, 4]), rows=st.sampled_from([1, 2, 4, 8]), response=st.integers(1, 500))
def test_ranks_share_the_learner_and_nothing_grows_by_a_smaller_micro_batch(ranks: int, rows: int, response: int) -> None:
    def of(ranks: int, rows: int) -> Estimate:
        return estimate(run(verl(ranks=ranks, micro_batch_rows=rows), max_response_tokens=response), SMALL)

    one, more = of(1, rows), of(ranks, rows)
    sharded = ("weights", "gradients", "Adam's moments")
    assert all(more.device[name] * ranks == one.device[name] for name in sharded)
    assert all(of(ranks, max(1, rows // 2)).device[name] <= more.device[name] for name in more.device)


def test_the_paper_s_model_fits_one_gpu_of_80_gb_and_not_of_40(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """1.54e9 parameters: 16 bytes each are 24.7 GB; 8 x 1024 tokens of 151,936 logits, twice in float32, 10 GB."""
    monkeypatch.setenv("PTH_VERL_PYTHON", "/nowhere/python")
    code, out, err = pth(capsys, "run", "experiment=paper_verl_updates300", "--dry-run")
    assert code == 0, err
    assert "weights 6.2, gradients 6.2, Adam's moments 12.3" in out and "logits 10.0" in out and "reference 6.2" in out
    (line,) = [line for line in out.splitlines() if "smallest GPU" in line]
    assert 40 < float(line.split()[-2]) < 80
    assert not (here / "multirun_outputs").exists()


def test_a_dry_run_goes_on_without_verl_and_without_the_models_size(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PTH_VERL_PYTHON", "/nowhere/python")
    code, out, _ = pth(capsys, "run", "arm=grpo", "stack=verl", "model.path=some/model", "--dry-run")
    assert code == 0 and "verl's settings: not checked" in out and "make verl" in out
    assert "not estimated: the config of model.path=some/model is not on this machine" in out


def test_a_trainers_dry_run_says_nothing_of_verl(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = pth(capsys, "run", "arm=grpo", "stack.device=cpu", "--dry-run")
    assert "verl's settings" not in out and "the machine's memory: 0." in out


def test_amounts_are_told_in_units_that_people_read() -> None:
    text = told(Estimate({"weights": 3 * GB, "crumbs": 1}, {"cache": GB}, {"reference": GB}, 0.5))
    assert text.splitlines() == [
        "each GPU, learner: 3.0 GB (weights 3.0)",
        "each GPU, vLLM: 50% of it; needs at least 1.0 GB (cache 1.0)",
        "smallest GPU for that: 6.0 GB",
        "the machine's memory: 1.0 GB (reference 1.0)",
    ]
