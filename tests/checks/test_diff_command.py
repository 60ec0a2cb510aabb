"""``pth diff`` on runs made by the record writer, and on any YAML files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import sweeps

from pth_exp.cli import main


def diff(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    code = main(["diff", *map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


def runs(root: Path, design: dict[str, Any] | None = None, **second: Any) -> list[Path]:
    configs = {"grpo·seed=42": sweeps.config("grpo"), "san·seed=43": sweeps.config("san", **({"seed": 43} | second))}
    return sorted(sweeps.make(root, configs, design).glob("0*"))


def test_declared_differences_exit_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = runs(tmp_path / "s")
    code, found = diff(capsys, *pair)
    assert code == 0
    assert found["varied"]["seed"] == {"grpo·seed=42": 42, "san·seed=43": 43}
    assert set(found["varied"]) == {"seed", "seeds.data", "seeds.sampling", "seeds.init"}
    assert found["per_arm"]["arm.name"] == {"grpo·seed=42": "grpo", "san·seed=43": "san"}
    assert found["unexpected"] == {} and found["findings"] == []
    assert found["prompts"] == [
        {"run": "san·seed=43", "beside": "grpo·seed=42", "compared": 64, "batch": 0, "position": 0, "expected": True}
    ]
    assert diff(capsys, *(run / "frozen.yaml" for run in pair)) == (code, found)
    assert diff(capsys, tmp_path / "s")[0] == 0


def test_an_unexpected_difference_exits_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = diff(capsys, *runs(tmp_path / "s", lr=1e-3, optimizer__eps=1e-6))
    assert code == 1
    assert set(found["unexpected"]) == {"lr", "optimizer.eps"}
    assert found["unexpected"]["lr"] == {"grpo·seed=42": 2e-4, "san·seed=43": 1e-3}


def test_execution_fields_may_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = diff(capsys, *runs(tmp_path / "s", stack__threads=4))
    assert (code, set(found["execution"])) == (0, {"stack.threads"})


def test_where_prompt_ids_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = runs(tmp_path / "s", seed=42)
    code, found = diff(capsys, first, second)
    assert (code, found["prompts"][0]["batch"], found["prompts"][0]["expected"]) == (0, None, True)
    batches = json.loads((second / "first_batches.json").read_text())
    batches[2][6] = "train:1:x"
    (second / "first_batches.json").write_text(json.dumps(batches))
    code, found = diff(capsys, first, second)
    assert (code, found["prompts"][0]["batch"], found["prompts"][0]["position"]) == (1, 2, 6)
    assert main(["diff", str(first), str(second)]) == 1
    assert "part at update 2, position 6" in capsys.readouterr().out


def test_shared_prompt_ids_under_different_seeds_exit_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = runs(tmp_path / "s")
    shutil.copy(first / "first_batches.json", second / "first_batches.json")
    code, found = diff(capsys, first, second)
    assert (code, found["unexpected"], found["prompts"][0]["expected"]) == (1, {}, False)


def test_a_data_seed_that_did_not_arrive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = diff(capsys, *runs(tmp_path / "s", seeds__data=42))
    assert (code, set(found["unexpected"]), found["prompts"][0]["expected"]) == (1, {"seeds.data"}, False)


def test_runs_of_two_sweeps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No index speaks for both; the fields that may differ can be named."""
    first = runs(tmp_path / "a", {"vary": None})[0]
    second = runs(tmp_path / "b", {"vary": None})[1]
    assert diff(capsys, first, second)[0] == 1
    assert diff(capsys, first, second, "--vary", "arm,seed")[0] == 0


def test_two_yaml_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = tmp_path / "a.yaml", tmp_path / "b.yaml"
    a.write_text("lr: 2e-4\nwhen: 2026-01-01\nnested: {x: 1, y: [1, 2]}\n")
    b.write_text("lr: 0.0002\nwhen: 2026-01-01\nnested: {x: 1, y: [1, 2]}\n")
    assert diff(capsys, a, b)[0] == 0  # 2e-4 is a number, whatever PyYAML says
    b.write_text("lr: 0.0002\nnested: {x: 1, y: [1, 3]}\nnan: .nan\n")
    code, found = diff(capsys, a, b)
    assert code == 1
    assert found["unexpected"]["nested.y"] == {"a.yaml": [1, 2], "b.yaml": [1, 3]}
    assert set(found["unexpected"]) == {"nested.y", "when", "nan"}


def test_files_of_one_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.yaml").write_text(f"x: {folder}\n")
    code, found = diff(capsys, tmp_path / "a" / "config.yaml", tmp_path / "b" / "config.yaml")
    assert code == 1 and len(set(found["runs"])) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "No such file"), ("[1, 2]", "no mapping but a list"), ("a: [", "is not YAML"), ("", "no mapping")],
)
def test_bad_files_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, message: str) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text("a: 1\n")
    if content is not None:
        bad.write_text(content)
    assert main(["diff", str(good), str(bad)]) == 2
    assert message in capsys.readouterr().err


def test_one_run_alone_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", str(runs(tmp_path / "s")[0])]) == 2
    assert "give another beside it, or its sweep" in capsys.readouterr().err
