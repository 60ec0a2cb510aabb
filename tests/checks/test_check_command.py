"""``pth check`` on records made by the writer: exit codes, expectations, text, JSON and the picture."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sweeps

from pth_exp.cli import main


def expectation(run: str, check: str, verdict: str) -> dict[str, str]:
    return {"run": run, "check": check, "verdict": verdict, "reason": "declared"}


def faulty(root: Path, **design: Any) -> Path:
    """A healthy run, and one whose warm-up reuses a batch."""
    runs = {
        "san·queue=unique_prefill": sweeps.config("san", replay_age=3),
        "san·queue=warmup": sweeps.config("san", replay_age=3, queue="warmup"),
    }
    return sweeps.make(root, runs, {"vary": ["queue"], **design})


WARM_UP = expectation("*warmup", "batches", "fail")


@pytest.mark.parametrize(
    ("expect", "code"),
    [
        ([], 1),  # an undeclared fail
        ([WARM_UP], 0),
        ([expectation("*", "batches", "fail")], 1),  # the healthy run does not fail
        ([expectation("*", "batches", "fail"), expectation("*prefill", "batches", "pass")], 0),  # the later one holds
        ([expectation("*warmup", "batches", "warn")], 1),
        ([WARM_UP, expectation("*", "ratio", "not measured")], 1),
        ([WARM_UP, expectation("nobody", "ratio", "fail")], 1),  # an expectation that meets no run
        ([WARM_UP, expectation("*", "rato", "fail")], 1),  # or no check
    ],
)
def test_exit_code_follows_the_expectations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], expect: list[dict[str, str]], code: int
) -> None:
    root = faulty(tmp_path / "s", expect=expect)
    assert main(["check", str(root), "--no-figure"]) == code
    assert ("As expected: all 8 verdicts." in capsys.readouterr().out) == (code == 0)
    assert main(["check", str(root), "--no-figure", "--json"]) == code
    assert json.loads(capsys.readouterr().out)["as_expected"] == (code == 0)


def test_a_failed_run_is_named_though_its_rows_are_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The last step of a run may fail after its last update; then nothing is as expected."""
    root = sweeps.make(tmp_path / "s", {"san": sweeps.config("san")}, updates={"san": 12})
    assert main(["check", str(root), "--no-figure"]) == 1
    out = capsys.readouterr().out
    assert "Not complete: 1 of 1 runs" in out and "san: PREEMPTED, 12 of 12 updates" in out


def test_a_run_under_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = {f"san·seed={seed}": sweeps.config("san", seed=seed) for seed in (1, 2)}
    root = sweeps.make(tmp_path / "s", runs, updates={"san·seed=2": 5})
    assert main(["check", str(root), "--no-figure", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    found = {(v["run"], v["check"]): v["outcome"] for v in report["verdicts"]}
    assert found["san·seed=1", "batches"] == "pass"
    assert found["san·seed=2", "batches"] == found["san·seed=2", "ratio"] == "not measured"
    assert [(run["updates"], run["planned"]) for run in report["runs"]] == [(12, 12), (5, 12)]


def test_a_run_without_a_directory_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = faulty(tmp_path / "s", expect=[WARM_UP])
    (next(root.glob("000-*")) / "frozen.yaml").unlink()
    assert main(["check", str(root), "--no-figure"]) == 1
    assert "san·queue=unique_prefill" in capsys.readouterr().out


def test_accuracy_by_arm_and_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = {f"{arm}·seed={seed}": sweeps.config(arm, seed=seed) for arm in ("grpo", "san") for seed in (1, 2)}
    accuracy = {"grpo·seed=1": 0.25, "grpo·seed=2": 0.5, "san·seed=1": 0.75, "san·seed=2": 0.875}

    def solving(share: float) -> sweeps.Mutate:
        return lambda kind, row: row | {"accuracy": share, "correct": [1, 0, 1, 1]} if kind == "evals" else row

    root = sweeps.make(tmp_path / "s", runs, mutate={label: solving(share) for label, share in accuracy.items()})
    assert main(["check", str(root), "--no-figure"]) == 0
    out = capsys.readouterr().out
    assert "Rests on what a run measured of itself: received.yaml" in out
    lines = [line.split() for line in out.splitlines()]
    assert ["seed", "1", "seed", "2", "mean"] in lines
    assert ["GRPO", "0.250", "0.500", "0.375"] in lines
    assert ["SAN", "0.750", "0.875", "0.812"] in lines


def test_picture_and_next_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = faulty(tmp_path / "s", expect=[WARM_UP], next_steps=["pth new arm mine"])
    assert main(["check", str(root)]) == 0
    assert (root / "check.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.rstrip().endswith("Next\n  pth new arm mine")


def test_a_sweep_that_has_not_begun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = sweeps.make(tmp_path / "s", {"san": sweeps.config("san")}, updates={"san": 0})
    assert main(["check", str(root)]) == 1
    assert not (root / "check.png").exists()
    assert "there is no accuracy to show" in capsys.readouterr().out


def test_nothing_to_check(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["check"]) == 2
    assert "start one with pth run" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["check", "--nonsense"])


def test_the_latest_sweep_is_the_default(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = faulty(tmp_path / "multirun_outputs" / "test" / "one", expect=[WARM_UP])
    (tmp_path / "multirun_outputs" / "latest").symlink_to(root)
    monkeypatch.chdir(tmp_path)
    assert main(["check", "--no-figure"]) == 0
    assert capsys.readouterr().out.startswith("multirun_outputs/test/one\n")


def test_nothing_heavy_is_imported(tmp_path: Path) -> None:
    root = faulty(tmp_path / "s", expect=[WARM_UP])
    code = (
        "import sys; from pth_exp.cli import main; main(['check', sys.argv[1], '--no-figure']); main(['diff', sys.argv[1]]);"
        "heavy = {'torch', 'transformers', 'hydra', 'omegaconf', 'numpy', 'matplotlib', 'rich'};"
        "print('heavy:', sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(root)], capture_output=True, text=True, check=True)
    assert done.stdout.rstrip().endswith("heavy: []")


def test_the_columns_are_documented(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["records"]) == 0
    assert "rollout_corr/mean_abs_shift" in capsys.readouterr().out
    assert main(["records", "--json"]) == 0
    columns = json.loads(capsys.readouterr().out)
    assert all(column["meaning"] for kind in columns.values() for column in kind)


def test_of_many_runs_the_same_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And a run of which something else is to be said is named."""
    configs = {f"{arm}·seed={s}": sweeps.config(arm, seed=s, updates=4) for arm in ("grpo", "san") for s in range(13)}
    better = {"grpo·seed=0": lambda kind, row: row | {"accuracy": 0.5} if kind == "evals" else row}
    root = sweeps.make(tmp_path / "s", configs, updates={"san·seed=7": 2}, mutate=better)
    assert main(["check", str(root), "--no-figure"]) == 1
    out = capsys.readouterr().out
    details = out[out.index("1 ratio: ") :]
    assert "  pass  all but san·seed=7, 25 runs\n" in details
    assert "  not measured (not as expected)  san·seed=7\n" in details
    assert "grpo·seed=3" not in details
    assert [line.split()[-4:] for line in out.splitlines() if line.startswith(("  GRPO ", "  SAN "))] == [
        ["13", "0.406", "0.413", "0.500"], ["12", "0.406", "0.406", "0.406"],
    ]  # fmt: skip
