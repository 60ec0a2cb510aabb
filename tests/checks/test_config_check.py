"""Check 2 on records made by the writer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import sweeps
import yaml

from pth_exp.checks import config as check_config
from pth_exp.checks.config import parting
from pth_exp.checks.result import Verdict
from pth_exp.records.reader import Sweep


def judge(root: Path) -> dict[str, Verdict]:
    return {verdict.run: verdict for verdict in check_config.check(Sweep.load(root))}


def pair(*arms: str, seeds: tuple[int | None, ...] = (42, 43), **fields: Any) -> dict[str, dict[str, Any]]:
    return {f"{arm}·seed={seed}": sweeps.config(arm, seed=seed, **fields) for arm in arms for seed in seeds}


def outcomes(verdicts: dict[str, Verdict]) -> dict[str, str]:
    return {run: str(verdict.outcome) for run, verdict in verdicts.items()}


def edit_received(run: Path, **values: Any) -> None:
    received = yaml.safe_load((run / "received.yaml").read_text())
    (run / "received.yaml").write_text(yaml.safe_dump(received | {k.replace("__", "."): v for k, v in values.items()}))


def test_a_healthy_sweep_passes(tmp_path: Path) -> None:
    verdicts = judge(sweeps.make(tmp_path / "s", pair("grpo", "san", seeds=(42, 43))))
    assert set(outcomes(verdicts).values()) == {"pass"}
    assert verdicts["grpo·seed=42"].number == "2 fields, 64 IDs"  # 8 first batches of 8 prompts


def test_the_data_seed_of_the_paper_did_not_arrive(tmp_path: Path) -> None:
    """Section 4.2: a run labelled with another seed shares the prompt IDs of the first."""
    runs = pair("san") | {"grpo·seed=42": sweeps.config("grpo"), "grpo·seed=43": sweeps.config("grpo", seed=43, seeds__data=42)}
    verdicts = judge(sweeps.make(tmp_path / "s", runs))
    assert outcomes(verdicts) == {"san·seed=42": "pass", "san·seed=43": "pass", "grpo·seed=42": "pass", "grpo·seed=43": "fail"}
    fault = " ".join((verdicts["grpo·seed=43"].reason, *verdicts["grpo·seed=43"].details))
    assert "Labelled seed 43, yet its first 64 prompt IDs are those of san·seed=42, in the same order" in fault


def test_three_runs_of_one_data_order(tmp_path: Path) -> None:
    """Every config says that its seed arrived, and the prompts say that none did: nobody is above suspicion."""
    root = sweeps.make(tmp_path / "s", pair("tis_ppo", seeds=(42, 43, 44)))
    runs = sorted(root.glob("0*"))
    for run in runs[1:]:
        (run / "first_batches.json").write_text((runs[0] / "first_batches.json").read_text())
    verdicts = judge(root)
    assert set(outcomes(verdicts).values()) == {"fail"}


def test_a_shared_data_order_that_the_design_declares(tmp_path: Path) -> None:
    runs = {f"san·seed={seed}": sweeps.config("san", seed=seed, seeds__data=7) for seed in (42, 43)}
    assert set(outcomes(judge(sweeps.make(tmp_path / "s", runs, {"fixed": ["seeds.data"]}))).values()) == {"pass"}


def test_equal_seeds_and_other_prompts(tmp_path: Path) -> None:
    root = sweeps.make(tmp_path / "s", pair("grpo", "tis_ppo", "san", seeds=(42,)))
    run = sorted(root.glob("0*"))[2]
    batches = json.loads((run / "first_batches.json").read_text())
    batches[3][5] = "train:0:other"
    (run / "first_batches.json").write_text(json.dumps(batches))
    verdicts = judge(root)
    assert outcomes(verdicts) == {"grpo·seed=42": "pass", "tis_ppo·seed=42": "pass", "san·seed=42": "fail"}
    fault = verdicts["san·seed=42"]
    assert "prompt IDs part at batch 3, position 5" in " ".join((fault.reason, *fault.details))


def test_received_is_not_what_was_frozen(tmp_path: Path) -> None:
    root = sweeps.make(tmp_path / "s", pair("san"))
    edit_received(sorted(root.glob("0*"))[1], lr=1e-3)
    verdicts = judge(root)
    assert outcomes(verdicts) == {"san·seed=42": "pass", "san·seed=43": "fail"}
    assert verdicts["san·seed=43"].reason == "lr is frozen as 0.0002, and the built object received 0.001."


def test_the_frozen_file_was_edited(tmp_path: Path) -> None:
    root = sweeps.make(tmp_path / "s", pair("san"))
    frozen = sorted(root.glob("0*"))[0] / "frozen.yaml"
    frozen.write_text(frozen.read_text().replace("lr: 0.0002", "lr: 0.0003"))
    verdicts = judge(root)
    assert verdicts["san·seed=42"].number == "frozen.yaml edited"


def test_an_undeclared_difference_fails(tmp_path: Path) -> None:
    runs = {"grpo·seed=42": sweeps.config("grpo"), "san·seed=42": sweeps.config("san", lr=1e-3)}
    verdicts = judge(sweeps.make(tmp_path / "s", runs, {"vary": ["arm"]}))
    assert set(outcomes(verdicts).values()) == {"fail"}
    assert "undeclared-difference: lr differs" in verdicts["san·seed=42"].reason


def test_an_override_that_did_not_arrive_fails(tmp_path: Path) -> None:
    """Only the gate saw what was asked for; its finding stands in the index."""
    root = sweeps.make(tmp_path / "s", pair("san"))
    index = json.loads((root / "index.json").read_text())
    finding = {"kind": "override-did-not-arrive", "field": "lr", "runs": ["san·seed=43"], "message": "asked", "remedy": ""}
    (root / "index.json").write_text(json.dumps(index | {"gate": {"verdict": "labelled", "findings": [finding]}}))
    assert outcomes(judge(root)) == {"san·seed=42": "pass", "san·seed=43": "fail"}


def test_a_sweep_that_extends_another(tmp_path: Path) -> None:
    """The earlier runs belong to the comparison: without them the arm would not vary."""
    earlier = sweeps.make(tmp_path / "earlier", pair("grpo"))
    vary = {"vary": ["arm", "seed"]}
    verdicts = judge(sweeps.make(tmp_path / "later", pair("san"), vary | {"extends": str(earlier)}))
    assert outcomes(verdicts) == {"san·seed=42": "pass", "san·seed=43": "pass"}
    assert set(outcomes(judge(sweeps.make(tmp_path / "alone", pair("san"), vary))).values()) == {"fail"}


def test_a_declared_difference_passes(tmp_path: Path) -> None:
    runs = {"grpo·seed=42": sweeps.config("grpo"), "san·seed=42": sweeps.config("san", lr=1e-3)}
    per_arm = [{"field": "lr", "values": {"san": 1e-3}, "reason": "tuned apart"}]
    assert set(outcomes(judge(sweeps.make(tmp_path / "s", runs, {"vary": ["arm"], "per_arm": per_arm}))).values()) == {"pass"}


def test_inputs_agree_between_runs_that_name_them(tmp_path: Path) -> None:
    root = sweeps.make(tmp_path / "s", pair("grpo", "tis_ppo", "san", seeds=(42,)))
    run = sorted(root.glob("0*"))[1]
    text = (run / "frozen.yaml").read_text().replace("d" * 64, "e" * 64)
    (run / "frozen.yaml").write_text(text)
    verdicts = judge(root)
    assert [run for run, outcome in outcomes(verdicts).items() if outcome == "fail"] == ["tis_ppo·seed=42"]
    assert any("The data has hash" in detail for detail in verdicts["tis_ppo·seed=42"].details)


def test_a_trained_batch_that_was_not_drawn(tmp_path: Path) -> None:
    def swapped(kind: str, row: dict[str, Any]) -> dict[str, Any]:
        return row | {"prompt_ids": row["prompt_ids"][::-1]} if kind == "batches" and row["update"] == 6 else row

    verdicts = judge(sweeps.make(tmp_path / "s", pair("san"), mutate={"san·seed=42": swapped}))
    assert verdicts["san·seed=42"].number == "batch 6 differs"


@pytest.mark.parametrize("file", ["received.yaml", "first_batches.json"])
def test_what_was_not_written_is_not_measured(tmp_path: Path, file: str) -> None:
    root = sweeps.make(tmp_path / "s", pair("san"))
    (sorted(root.glob("0*"))[0] / file).unlink()
    assert outcomes(judge(root)) == {"san·seed=42": "not measured", "san·seed=43": "pass"}


def test_received_without_a_field_of_the_config_is_not_measured(tmp_path: Path) -> None:
    root = sweeps.make(tmp_path / "s", pair("san"))
    (sorted(root.glob("0*"))[0] / "received.yaml").write_text("objects: {optimizer: AdamW}\n")
    assert outcomes(judge(root))["san·seed=42"] == "not measured"


def test_parting() -> None:
    assert parting([["a", "b"], ["c", "d"]], [["a", "b"], ["c", "x"]]) == (1, 1)
    assert parting([["a", "b"]], [["a", "b"], ["c"]]) is None
    assert parting([["a", "b"]], [["a"]]) == (0, 1)
