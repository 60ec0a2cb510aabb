"""The experiments that ship, held against the paper's settings and the demo's purpose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from sweeping import pth


def configs(capsys: pytest.CaptureFixture[str], experiment: str) -> list[dict[str, Any]]:
    code, out, err = pth(capsys, "run", f"experiment={experiment}", "--cfg", "job", "--resolve")
    assert code == 0, err
    return [yaml.safe_load(part) for part in out.split("# run ")[1:] for part in [part.split("\n", 1)[1]]]


PAPER = {
    "lr": 1e-5, "prompts_per_update": 6, "responses_per_prompt": 8, "max_response_tokens": 512, "updates": 100,
    "replay_age": 32, "refresh_interval": 1, "temperature": 1.0,
}  # fmt: skip
"""Section 2, the single-GPU trainer."""

TABLE4 = {"tis_reinforce", "asympo_reading", "seq_norm", "seq_gain", "san", "token_weights"}
"""Its rows; two of them once more with the gradient norm set to 1."""


@pytest.mark.parametrize(
    ("experiment", "arms", "seeds", "queues"),
    [
        ("paper_trainer_table4", TABLE4, {404, 505}, {"unique_prefill"}),
        ("paper_trainer_warmup", {"tis_reinforce", "san"}, {404, 505, 606}, {"warmup"}),
        ("paper_trainer_queues", {"tis_reinforce", "san"}, {404, 505}, {"unique_prefill", "warmup"}),
    ],
)
def test_trainer_settings_are_the_paper_s(
    experiment: str, arms: set[str], seeds: set[int], queues: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    runs = configs(capsys, experiment)
    normed = {run["arm"]["name"] for run in runs if run["optimizer"]["grad_norm"] == "set"}
    assert normed == ({"seq_norm", "token_weights"} if experiment == "paper_trainer_table4" else set())
    assert len(runs) == (len(arms) + len(normed)) * len(seeds) * len(queues)
    assert {run["arm"]["name"] for run in runs} == arms
    assert {run["seed"] for run in runs} == {run["seeds"]["data"] for run in runs} == seeds
    assert {run["queue"] for run in runs} == queues
    for run in runs:
        assert {key: run[key] for key in PAPER} == PAPER
        assert run["model"]["path"] == "Qwen/Qwen2.5-Math-1.5B" and run["model"]["reference"] == "none"
        assert run["kl"]["coef"] == 0 and run["optimizer"]["name"] == "adamw" and run["optimizer"]["max_grad_norm"] == 1
        assert run["task"]["name"] == "gsm8k" and run["task"]["cut_at"] == []
        assert run["validation"]["problems"] == 256


def test_truncated_weight_is_the_paper_s(capsys: pytest.CaptureFixture[str]) -> None:
    arms = {run["arm"]["name"]: run["arm"] for run in configs(capsys, "paper_trainer_table4")}
    assert arms["tis_reinforce"]["cap"] == 2
    assert arms["tis_reinforce"]["aggregation"] == "seq_mean_token_sum", "Table 4's coefficient has no 1/T"


def test_demo_plants_one_data_seed_one_loss_and_nothing_else(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = configs(capsys, "demo")
    shown = [(r["arm"]["name"], r["refresh_interval"], r["replay_age"], r["queue"], r["seed"], r["seeds"]["data"]) for r in runs]
    assert shown == [
        ("grpo", 96, 0, "unique_prefill", 42, 42),
        ("tis_ppo", 96, 0, "unique_prefill", 42, 42),
        ("san", 96, 0, "unique_prefill", 42, 42),
        ("tis_reinforce", 1, 32, "unique_prefill", 42, 42),
        ("tis_reinforce", 1, 32, "warmup", 42, 42),
        ("tis_ppo", 96, 0, "unique_prefill", 43, 42),
        ("san_plus_written", 96, 0, "unique_prefill", 42, 42),
    ]
    others = [run["arm"]["loss"] == run["arm"]["name"] for run in runs]
    assert others == [True] * 6 + [False] and runs[6]["arm"]["loss"] == "san_plus", "and one loss that is not the one written"
    code, out, _ = pth(capsys, "run", "experiment=demo", "--dry-run")
    assert code == 0 and "design gate: labelled" in out
    assert out.count("remedy") == 1 and "swept-but-equal: seed is varied but did not reach seeds.data: tis_ppo·seed=43" in out


@pytest.mark.parametrize(
    ("model", "path"),
    [
        ("qwen2_5_math_1_5b", "Qwen/Qwen2.5-Math-1.5B"),
        ("qwen2_5_math_7b", "Qwen/Qwen2.5-Math-7B"),
        ("qwen2_5_0_5b", "Qwen/Qwen2.5-0.5B"),
        ("qwen2_5_3b_instruct", "Qwen/Qwen2.5-3B-Instruct"),
        ("llama_3_2_3b_instruct", "meta-llama/Llama-3.2-3B-Instruct"),
        ("smollm2_135m", "smollm2_135m"),
        ("embedded", "embedded"),
    ],
)
def test_every_model_of_the_paper_has_an_option(model: str, path: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = pth(capsys, "run", "arm=grpo", f"model={model}", "--dry-run")
    assert code == 0 and f"  path: {path}\n" in out
