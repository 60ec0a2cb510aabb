"""What is frozen beside a verl run's config, by a stand-in for verl's interpreter."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from sweeping import freeze_sweep, pth

from pth_exp import freeze
from pth_exp.freeze import FrozenError
from pth_exp.refusal import Refusal

STAND_IN = """\
#!{python}
import json, sys
from pathlib import Path
asked = json.load(sys.stdin)
with Path("{calls}").open("a") as file:
    print(json.dumps([sys.argv[1:], [run["config"]["arm"]["name"] for run in asked["runs"]]]), file=file)
{body}
"""
ANSWER = """json.dump({"runs": [{"text": "n: %d" % run["config"]["seed"]} for run in asked["runs"]]}, sys.stdout)"""
OBJECT = """json.dump({"runs": [{"objections": [dict(field="stack.overrides", value="x=1", why="no such", remedy="leave it")]}
                      if run["config"]["stack"]["overrides"] else {"text": "n: 0"} for run in asked["runs"]]}, sys.stdout)"""


@pytest.fixture
def calls(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return stand_in(here, ANSWER, monkeypatch)


def stand_in(here: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a stand-in where the interpreter is looked for; returns the file that it writes its calls to."""
    script, calls = here / "stand_in", here / "calls.jsonl"
    script.write_text(STAND_IN.format(python=sys.executable, calls=calls, body=body))
    script.chmod(0o755)
    monkeypatch.setenv("PTH_VERL_PYTHON", str(script))
    return calls


def called(calls: Path) -> list[Any]:
    return [json.loads(line) for line in calls.read_text().splitlines()]


def test_one_call_serves_a_sweep_and_the_trainers_runs_have_no_files(calls: Path) -> None:
    blocks = 'hydra.sweeper.blocks=["stack=verl arm=grpo,san seed=1,2","stack=trainer arm=grpo seed=1,2"]'
    _, jobs = freeze_sweep(blocks, "design.vary=[arm,seed]", "design.blocks=[stack]")
    assert called(calls) == [[["-P", "-m", "pth_exp.verl_stack.render"], ["grpo", "grpo", "san", "san"]]]
    files = [freeze.load(job.frozen, job.sha256).files for job in jobs]
    expected = {n: {"verl.yaml": hashlib.sha256(f"n: {n}".encode()).hexdigest()} for n in (1, 2)}
    assert files == [expected[1], expected[2], expected[1], expected[2], {}, {}]
    assert [(job.run_dir / "verl.yaml").read_text() for job in jobs[:2]] == ["n: 1", "n: 2"]
    assert not (jobs[4].run_dir / "verl.yaml").exists()


def test_a_sweep_without_verl_calls_nobody(calls: Path) -> None:
    freeze_sweep("arm=grpo,san")
    assert not calls.exists()


def test_an_edited_file_is_refused_naming_both_hashes(calls: Path) -> None:
    _, (job,) = freeze_sweep("arm=grpo", "stack=verl", "seed=1")
    frozen = freeze.load(job.frozen, job.sha256)
    freeze.verify_inputs(frozen)
    (job.run_dir / "verl.yaml").write_text("n: 2")
    with pytest.raises(FrozenError) as error:
        freeze.verify_inputs(frozen)
    for part in ("verl.yaml", hashlib.sha256(b"n: 1").hexdigest(), hashlib.sha256(b"n: 2").hexdigest()):
        assert part in str(error.value)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pth_exp.worker", "--frozen", str(job.frozen), "--sha256", job.sha256],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and "refused: verl.yaml changed after the run was frozen" in done.stderr, done.stderr
    (job.run_dir / "verl.yaml").unlink()
    with pytest.raises(FrozenError, match=r"verl\.yaml.*now gone"):
        freeze.verify_inputs(frozen)


def test_identity_is_the_same_whatever_verl_makes_of_it(here: Path, calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, (first,) = freeze_sweep("arm=grpo", "stack=verl")
    stand_in(here, ANSWER.replace("n:", "other:"), monkeypatch)
    _, (second,) = freeze_sweep("arm=grpo", "stack=verl")
    assert first.sha256 != second.sha256 and first.run_dir.name == second.run_dir.name


def test_one_run_that_verl_refuses_and_nothing_is_frozen(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(here, OBJECT, monkeypatch)
    blocks = ("stack=trainer arm=grpo", "stack=verl arm=grpo", "'stack=verl' arm=san 'stack.overrides=[\"model.x=1\"]'")
    with pytest.raises(Refusal) as refusal:
        freeze_sweep(f"hydra.sweeper.blocks={json.dumps(blocks)}", "design.gate=label")
    assert "arm=san" in str(refusal.value) and "stack.overrides=x=1: no such" in str(refusal.value)
    assert not (here / "multirun_outputs").exists()


def test_a_dry_run_asks_verl_too_and_writes_nothing(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = stand_in(here, OBJECT, monkeypatch)
    code, out, _ = pth(capsys, "run", "arm=grpo", "stack=verl", "seed=1,2", "--dry-run")
    assert code == 0 and "verl takes them; 1 different files for 2 runs" in out and len(called(calls)) == 1
    code, _, err = pth(capsys, "run", "arm=grpo", "stack=verl", 'stack.overrides=["global_profiler.x=1"]', "--dry-run")
    assert code == 2 and "stack.overrides=x=1: no such" in err
    assert not (here / "multirun_outputs").exists()


@pytest.mark.parametrize(
    ("body", "said"),
    [("sys.exit('no module named verl')", "no module named verl"), ("print('{')", "says nothing that can be read")],
)
def test_an_interpreter_that_fails_is_named(
    body: str, said: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(here, body, monkeypatch)
    code, _, err = pth(capsys, "run", "arm=grpo", "stack=verl")
    assert code == 2 and "stack.python" in err and said in err and "pth doctor" in err and str(here / "stand_in") in err
    assert not (here / "multirun_outputs").exists()


def test_without_the_interpreter_nothing_starts_and_the_remedy_is_said(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PTH_VERL_PYTHON", "/nowhere/python")
    code, _, err = pth(capsys, "run", "arm=grpo", "stack=verl,trainer")
    assert code == 2 and "/nowhere/python" in err and "make verl" in err and "nothing was started" in err
    assert not (here / "multirun_outputs").exists()


@pytest.mark.parametrize(("gpus", "device"), [(["0"], "cuda"), ([], "cpu")])
def test_auto_is_settled_for_verl_and_left_to_the_trainer(
    gpus: list[str], device: str, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pth_exp.machine.visible_gpus", lambda: gpus)
    _, jobs = freeze_sweep("arm=grpo", "stack=verl,trainer", "stack.device=auto")
    assert [yaml.safe_load(job.frozen.read_text())["config"]["stack"]["device"] for job in jobs] == [device, "auto"]


def test_cuda_may_be_frozen_where_there_is_none(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pth_exp.machine.visible_gpus", lambda: [])
    _, (job,) = freeze_sweep("arm=grpo", "stack=verl", "stack.device=cuda")
    assert job.device == "cuda"


def test_overrides_are_a_difference_that_the_gate_and_diff_see(calls: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setting = "actor_rollout_ref.rollout.enforce_eager"
    blocks = json.dumps(["arm=grpo stack=verl", f"arm=grpo stack=verl 'stack.overrides=[\"{setting}=false\"]'"])
    with pytest.raises(Refusal, match=rf"undeclared-difference: stack\.overrides.*\n?.*{setting}=false"):
        freeze_sweep(f"hydra.sweeper.blocks={blocks}")
    sweep, jobs = freeze_sweep(f"hydra.sweeper.blocks={blocks}", "design.blocks=[stack.overrides]")
    code, out, _ = pth(capsys, "diff", str(sweep))
    assert code == 0 and "stack.overrides" in out and f"{setting}=false" in out
    assert jobs[0].run_dir.name.partition("-")[2] != jobs[1].run_dir.name.partition("-")[2], "another run, another config_id"
