"""``pth equations --check``: a table of errors, and an exit code that can be 1."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from pth_exp import cli
from pth_exp.armfiles import arm_paths
from pth_exp.report import equation_check


@pytest.fixture(autouse=True)
def few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In a folder of its own, with 8 random inputs in place of 1,000."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(equation_check.RANDOM, "count", 8)
    return tmp_path


def mine(here: Path, base: str, **fields: object) -> None:
    (here / "conf" / "arm").mkdir(parents=True)
    content = {"defaults": [base, "_self_"], "name": "mine", **fields}
    (here / "conf" / "arm" / "mine.yaml").write_text(yaml.safe_dump(content))


def test_every_arm_that_is_shipped_is_its_equation(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["equations", "--check", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["arm"] for row in rows] == list(arm_paths(Path("/")))
    assert all(max(*row["fixed"], *row["random"]) < 1e-11 and row["passed"] for row in rows)


def test_the_table_is_markdown(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["equations", "--check", "san", "dr_grpo"]) == 0
    lines = capsys.readouterr().out.splitlines()
    header = lines.index("| arm | value, fixed | gradient, fixed | value, random | gradient, random |")
    assert all(line.count("|") == 6 for line in lines[header:])
    assert [line.split()[1] for line in lines[header + 2 :]] == ["san", "dr_grpo"]


@pytest.mark.parametrize(
    ("base", "fields", "said"),
    [
        ("san_plus_written", {"loss": "san_plus"}, "mine **fail**"),  # the paper's section 4.4
        ("san_ref_written", {"loss": "san_ref"}, "mine **fail**"),
        ("san", {"equation": None}, "not measured: no equation"),
        ("tis_ppo", {"cap": -1.0}, "not measured: ValueError"),
    ],
)
def test_what_is_not_the_equation_or_was_not_measured_is_exit_code_1(
    few: Path, capsys: pytest.CaptureFixture[str], base: str, fields: dict[str, object], said: str
) -> None:
    mine(few, base, **fields)
    assert cli.main(["equations", "--check", "mine"]) == 1
    assert said in capsys.readouterr().out
