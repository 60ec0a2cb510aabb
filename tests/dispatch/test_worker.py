"""The worker: what it verifies before it starts, and how each way of ending is told."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from frozen_sweeps import SMALL_TASK, freeze_sweep, runs_of

import pth_exp
from pth_exp import exits, freeze, provenance
from pth_exp.launchers.place import WORKER
from pth_exp.lifecycle import State, history, state
from pth_exp.records.reader import RunRecords

Work = Callable[..., int]


def test_a_run_completes_once(sweep: Path, work: Work, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = runs_of(sweep)[0]
    assert work(run_dir, "completes") == 0
    assert state(run_dir)[0] is State.COMPLETED
    assert [row["update"] for row in RunRecords.load(run_dir).updates] == list(range(12))
    frozen = yaml.safe_load((run_dir / "frozen.yaml").read_text())
    manifest = json.loads((run_dir / "manifest.json").read_text())
    assert manifest["config_id"] == frozen["config_id"] and manifest["inputs"] == frozen["inputs"]
    assert manifest["frozen_sha256"] == (run_dir / "frozen.sha256").read_text().strip()
    assert manifest["versions"]["torch"] and manifest["python"] == ".".join(map(str, sys.version_info[:3]))
    assert manifest["device"]["cpu"] and manifest["host"] == os.uname().nodename
    assert [row["state"] for row in manifest["states"]] == ["FROZEN", "RUNNING", "COMPLETED"]
    before = {p: p.read_bytes() for p in run_dir.rglob("*") if p.is_file()}
    assert work(run_dir, "completes") == 2
    assert re.search(r"refused: .* was completed by attempt 1 on .*; a completed run is never run again", capsys.readouterr().err)
    assert {p: p.read_bytes() for p in run_dir.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize(
    ("stack", "code", "ended", "reason", "traceback"),
    [
        ("is_terminated", 3, State.PREEMPTED, "SIGTERM received", False),
        ("is_interrupted_twice", 3, State.PREEMPTED, "SIGINT received, then SIGINT once more: no checkpoint was written", False),
        ("divides_by_zero", 1, State.FAILED, "ZeroDivisionError: division by zero", True),
        ("exits", 1, State.FAILED, "SystemExit: gave up", True),
        ("ends_strangely", 1, State.FAILED, "RuntimeError: the stack trainer ended as 'tired'", True),
        ("names_a_bad_field", 2, State.FAILED, "^(error: )?model.path: there is no folder '/nowhere/to/be/found'", False),
        (
            "misdraws",
            1,
            State.FAILED,
            r"batch 0, prompt 0: the run drew train:\d+:\w{12}, its frozen config .* draws train",
            False,
        ),
        ("draws_too_little", 1, State.FAILED, "holds 7 batches; by probe.first_batches and updates it must hold 8", False),
        ("writes_no_draws", 1, State.FAILED, "first_batches.json is missing", False),
    ],
)
def test_every_end_is_a_state_with_a_reason(
    sweep: Path,
    work: Work,
    capfd: pytest.CaptureFixture[str],
    stack: str,
    code: int,
    ended: State,
    reason: str,
    traceback: bool,
) -> None:
    run_dir = runs_of(sweep)[0]
    assert work(run_dir, stack) == code
    found, detail = state(run_dir)
    assert found is ended and re.search(reason, detail), detail
    log = capfd.readouterr().err
    assert ("Traceback" in log) is traceback
    assert re.search(reason, log)
    assert not list((run_dir / "attempts").glob("*.heartbeat"))
    assert work(run_dir, "completes") == (0 if stack not in ("misdraws", "draws_too_little") else 1)  # what was drawn stays


def test_a_worker_that_lost_its_run_leaves_no_trace(sweep: Path, work: Work, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = runs_of(sweep)[0]
    assert work(run_dir, "is_taken_over") == exits.HELD
    assert "was taken over by attempt 2" in capsys.readouterr().err
    assert [(row["update"], row["attempt"]) for row in RunRecords.load(run_dir).updates] == [(0, 1)]
    assert [row["state"] for row in history(run_dir)] == ["FROZEN", "RUNNING", "LOST", "RUNNING"]
    assert state(run_dir)[0] is State.RUNNING  # as attempt 2


def test_a_worker_that_lost_its_files_too_says_that_it_lost_its_run(
    sweep: Path, work: Work, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who takes over clears away the unfinished checkpoint that the one before was writing."""
    run_dir = runs_of(sweep)[0]
    assert work(run_dir, "is_taken_over_in_a_checkpoint") == exits.HELD
    told = capsys.readouterr().err
    assert "was taken over by attempt 2" in told and "Traceback" not in told
    assert [row["state"] for row in history(run_dir)] == ["FROZEN", "RUNNING", "LOST", "RUNNING"]


def test_a_worker_that_is_stopped_before_it_began_claims_nothing(
    sweep: Path, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = runs_of(sweep)[0]
    verify = freeze.verify_inputs

    def verify_and_be_stopped(frozen: freeze.FrozenRun) -> None:
        verify(frozen)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(freeze, "verify_inputs", verify_and_be_stopped)
    assert work(run_dir, "completes") == exits.PREEMPTED
    assert state(run_dir) == (State.PREEMPTED, "SIGTERM received before it began")
    assert not (run_dir / "attempts").exists()
    monkeypatch.setattr(freeze, "verify_inputs", verify)
    assert work(run_dir, "completes") == exits.COMPLETED


def test_a_worker_that_is_stopped_while_it_loads_trains_nothing(sweep: Path, work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = runs_of(sweep)[0]
    monkeypatch.setattr(provenance, "provenance", lambda: os.kill(os.getpid(), signal.SIGTERM) or {})
    assert work(run_dir, "divides_by_zero") == exits.PREEMPTED
    assert state(run_dir) == (State.PREEMPTED, "SIGTERM received") and not RunRecords.load(run_dir).updates


# ------------------------------------------------------------------------------------------- changed after freezing


def _refused(run_dir: Path, text: str, *hashes: str) -> None:
    found, detail = state(run_dir)
    assert found is State.FAILED and detail.startswith("refused: "), detail
    assert text in detail and set(hashes) <= set(re.findall(r"\b[0-9a-f]{64}\b", detail))
    assert not (run_dir / "attempts").exists()


def test_an_edited_frozen_file_is_refused(sweep: Path, work: Work, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = runs_of(sweep)[0]
    path = run_dir / "frozen.yaml"
    was = freeze.file_hash(path)
    path.write_text(path.read_text().replace("lr: 0.0002", "lr: 0.0003"))
    assert work(run_dir, "completes", sha256=was) == 2
    _refused(run_dir, "frozen.yaml", was, freeze.file_hash(path))
    assert "Traceback" not in capsys.readouterr().err


def test_another_run_s_frozen_file_is_refused(sweep: Path, work: Work) -> None:
    """The hash beside the file fits, the one that the index and the launcher hold does not."""
    first, second, _ = runs_of(sweep)
    was, now = freeze.file_hash(first / "frozen.yaml"), freeze.file_hash(second / "frozen.yaml")
    for name in ("frozen.yaml", "frozen.sha256"):
        shutil.copy(second / name, first / name)
    assert work(first, "completes", sha256=was) == 2
    _refused(first, "frozen.yaml", was, now)


def test_changed_weights_are_refused(tmp_path: Path, work: Work) -> None:
    model = Path(shutil.copytree(Path(pth_exp.__file__).parent / "models" / "embedded", tmp_path / "model"))
    (run_dir,) = runs_of(freeze_sweep(tmp_path, "arm=grpo", "updates=3", f"model.path={model}", *SMALL_TASK))
    weights = model / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert work(run_dir, "completes") == 2
    _refused(run_dir, "model", yaml.safe_load((run_dir / "frozen.yaml").read_text())["inputs"]["model"])


def test_changed_data_are_refused(tmp_path: Path, work: Work) -> None:
    rows = {"train": 7473, "test": 1319}  # GSM8K's sizes: other files are not taken
    for split, count in rows.items():
        lines = [json.dumps({"question": f"What is {i} + 1?", "answer": f"#### {i + 1}"}) for i in range(count)]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    (run_dir,) = runs_of(freeze_sweep(tmp_path, "arm=grpo", "updates=3", "task=gsm8k", f"task.path={tmp_path}"))
    train = tmp_path / "train.jsonl"
    train.write_text(train.read_text().replace("What is 17 + 1?", "What is 17 plus 1?"))
    assert work(run_dir, "completes") == 2
    _refused(run_dir, "data", yaml.safe_load((run_dir / "frozen.yaml").read_text())["inputs"]["data"])


def test_changed_source_is_refused(sweep: Path, tmp_path: Path) -> None:
    """The worker of a copy of the package in which one comment was added."""
    run_dir = runs_of(sweep)[0]
    package = Path(pth_exp.__file__).parent
    copy = tmp_path / "elsewhere" / "pth_exp"
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__", "conf", "launchers"))
    with (copy / "losses" / "san.py").open("a") as file:
        file.write("\n# edited while the run waited\n")
    sha256 = (run_dir / "frozen.sha256").read_text().strip()
    command = [sys.executable, *WORKER, "--frozen", str(run_dir / "frozen.yaml"), "--sha256", sha256]
    environment = dict(os.environ, PYTHONPATH=str(copy.parent))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    frozen = yaml.safe_load((run_dir / "frozen.yaml").read_text())
    _refused(run_dir, "source", frozen["inputs"]["source"], freeze.source_hash(copy))


def test_the_frozen_environment_holds(tmp_path: Path, work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    (run_dir,) = runs_of(freeze_sweep(tmp_path, "arm=grpo", "updates=3", "+hydra.job.env_set.PTH_TEST_WORD=frozen", *SMALL_TASK))
    monkeypatch.setenv("PTH_TEST_WORD", "edited")
    assert work(run_dir, "tells_its_environment") == 0
    assert (run_dir / "environment.txt").read_text() == "frozen"
