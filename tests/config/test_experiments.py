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


RESULTS: dict[str, Any] = yaml.safe_load((Path(__file__).with_name("paper_verl.yaml")).read_text())
"""The paper's verl settings, and which cells of its tables have a number."""

ARMS = {"grpo_uncorrected": "grpo", "ppo_clip_label": "grpo", "tis": "tis_ppo"}
"""The names of its tables; what Table 2 calls PPO clip was trained as uncorrected GRPO."""

Cell = tuple[str, int, float, int | None]
"""Arm, refresh interval, learning rate, seed."""


def cells(table: str) -> set[Cell]:
    """Those of a table that have a number."""
    found = set()
    for name, rows in RESULTS[table].items():
        interval, _, lr = name.removeprefix("verl_").removeprefix("interval").partition("_lr")
        for row, values in rows.items():
            for seed, value in zip((None, 43, 44), values, strict=True):
                if value is not None:
                    found.add((ARMS.get(row, row), int(interval), float(lr or "2e-6"), seed))
    return found


def cell(run: dict[str, Any]) -> Cell:
    return run["arm"]["name"], run["refresh_interval"], run["lr"], run["seed"]


@pytest.mark.parametrize("table", ["table2", "table3"])
def test_every_cell_of_the_paper_s_verl_tables_is_a_run_and_nothing_else_is(
    table: str, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = configs(capsys, f"paper_verl_{table}")
    assert len(runs) == len({cell(run) for run in runs})
    assert {cell(run) for run in runs} == cells(table)
    astray = {cell(run) for run in runs if run["seeds"]["data"] != run["seed"]}
    assert astray == ({("tis_ppo", 64, 2e-6, 43), ("tis_ppo", 64, 2e-6, 44)} if table == "table2" else set()), "section 4.2"


def test_the_long_run_is_the_paper_s(capsys: pytest.CaptureFixture[str]) -> None:
    runs = configs(capsys, "paper_verl_updates300")
    assert {cell(run) for run in runs} == {("grpo", 64, 2e-6, None), ("san_plus", 64, 2e-6, None)}
    assert {run["updates"] for run in runs} == {300} and len(runs) == 2


@pytest.mark.parametrize("experiment", ["paper_verl_table2", "paper_verl_table3", "paper_verl_updates300"])
def test_verl_settings_are_the_paper_s(experiment: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its section 2; the KL estimator and its clamp are verl's low_var_kl."""
    paper = RESULTS["setup"]
    for run in configs(capsys, experiment):
        for field in ("prompts_per_update", "responses_per_prompt", "max_prompt_tokens", "max_response_tokens", "temperature"):
            assert run[field] == paper[field], field
        assert run["model"]["path"] == paper["model"] and run["task"]["name"] == "gsm8k" and run["task"]["cut_at"] == []
        assert run["validation"] == {"every": 10, "problems": 1319}
        assert (run["kl"]["coef"], run["kl"]["estimator"], run["kl"]["clamp"]) == (paper["kl_coef"], "k3", 10)
        assert run["optimizer"]["name"] == "adamw" and run["optimizer"]["steps_per_batch"] == paper["optimizer_steps_per_batch"]
        assert run["arm"]["advantage"] == "group_std" and run["replay_age"] == 0
        assert run["arm"].get("cap", paper["tis_cap"]) == paper["tis_cap"]
        for bound in ("clip_low", "clip_high"):
            assert run["arm"].get(bound, paper["clip_range"]) == paper["clip_range"]
        assert run["stack"]["name"] == "verl" and run["stack"]["device"] == "cuda" and run["stack"]["overrides"] == []
        assert run["stack"]["micro_batch_rows"] * (128 // run["stack"]["micro_batch_rows"]) == 128


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
