"""What changed after a run was frozen: refused by file, accepted with a reason, on record from the update on that it held."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from frozen_sweeps import SMALL_TASK, freeze_sweep, runs_of

import pth_exp
from pth_exp import changes, cli, freeze, provenance
from pth_exp.checks import config as config_check
from pth_exp.checks.result import Outcome, Verdict
from pth_exp.launchers.local import LocalPlace
from pth_exp.launchers.place import Job, RunResult
from pth_exp.lifecycle import State, history, state
from pth_exp.records.reader import Sweep

Work = Callable[..., int]
Resume = Callable[..., int]
HASH = r"[0-9a-f]{64}"


@pytest.fixture
def resume(monkeypatch: pytest.MonkeyPatch, work: Work) -> Resume:
    """``pth resume`` on a place that runs each worker in this process, on a stack of stacks.py; its exit code."""

    def dispatch(self: LocalPlace, jobs: list[Job]) -> list[RunResult]:
        for job in jobs:
            work(job.run_dir, stack, job.sha256)
        return [RunResult(job.index, job.label, *state(job.run_dir), "") for job in jobs]

    def run(sweep: Path, with_stack: str, *arguments: str) -> int:
        nonlocal stack
        stack = with_stack
        return cli.main(["resume", str(sweep), *arguments])

    stack = ""
    monkeypatch.setattr(LocalPlace, "dispatch", dispatch)
    return run


@pytest.fixture(scope="session")
def frozen_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return freeze_sweep(tmp_path_factory.mktemp("one"), "arm=grpo", "updates=12", "seed=4", *SMALL_TASK)


@pytest.fixture
def one(frozen_once: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A sweep of one run, and its frozen file."""
    sweep = Path(shutil.copytree(frozen_once, tmp_path / "sweep"))
    (run_dir,) = runs_of(sweep)
    return sweep, run_dir / "frozen.yaml"


def _rows(run_dir: Path, event: str) -> list[dict[str, Any]]:
    return [row for row in changes.rows(run_dir) if row["event"] == event]


def _verdict(sweep: Path) -> Verdict:
    """Of a run whose stack reads back what it was given, as those of stacks.py do not."""
    (run_dir,) = runs_of(sweep)
    (run_dir / "received.yaml").write_text(
        yaml.safe_dump({"seed": yaml.safe_load((run_dir / "frozen.yaml").read_text())["config"]["seed"]})
    )
    (verdict,) = config_check.check(Sweep.load(sweep))
    return verdict


def _edit_source(monkeypatch: pytest.MonkeyPatch, files: dict[str, str | None]) -> None:
    """The package's source as it would be with these files changed, new or gone."""
    as_is = freeze.source_files
    edited = lambda root=None: {k: v for k, v in {**as_is(), **files}.items() if v is not None}  # noqa: E731
    monkeypatch.setattr(freeze, "source_files", edited)


def test_code_that_changed_midway_is_refused_by_file_and_goes_on_record_when_accepted(
    one: tuple[Path, Path], resume: Resume, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep, run_dir = one[0], one[1].parent
    assert resume(sweep, "stops_at_a_checkpoint") == 1  # of update 3
    was, now = freeze.source_hash(), "f" * 64
    with monkeypatch.context() as edited:
        _edit_source(edited, {"losses/san.py": now, "losses/new.py": now, "losses/cispo.py": None})
        changed = freeze.source_hash()
        assert resume(sweep, "completes") == 1
        found, told = state(run_dir)
        assert found is State.FAILED and was in told and changed in told
        assert "(losses/cispo.py is gone, losses/new.py is new, losses/san.py changed)" in told
        assert f"pth resume {sweep} --accept-changes 'why'" in told
        assert not (run_dir / changes.FILE).exists()

        capsys.readouterr()
        assert resume(sweep, "stops_at_a_checkpoint", "--accept-changes", "a bug in SAN's floor") == 1
        assert "goes on over changes, on record: source losses/cispo.py is gone" in capsys.readouterr().err
        (accepted,) = _rows(run_dir, "accepted")
        assert accepted["reason"] == "a bug in SAN's floor" and accepted["inputs"] == {"source": changed}
        (began,) = _rows(run_dir, "began")
        assert (began["attempt"], began["from_update"], began["reason"]) == (2, 3, "a bug in SAN's floor")
        before = json.loads((sweep / freeze.LISTING).read_text())["source"][was]
        assert began["changes"] == accepted["changes"] == [
            {"kind": "source", "name": "losses/cispo.py", "before": before["losses/cispo.py"], "after": None},
            {"kind": "source", "name": "losses/new.py", "before": None, "after": now},
            {"kind": "source", "name": "losses/san.py", "before": before["losses/san.py"], "after": now},
        ]  # fmt: skip
        assert re.match(r"resume \S+@\S+, pid \d+$", accepted["by"]) and began["accepted_by"] == accepted["by"]
        assert any("from update 3 on source losses/cispo.py is gone" in row.get("reason", "") for row in history(run_dir))
        assert json.loads((run_dir / "manifest.json").read_text())["changes"] == changes.rows(run_dir)
        assert "from update 3 on source" in state(run_dir)[1] and "a bug in SAN's floor" in state(run_dir)[1]

        edited.setattr(freeze, "source_files", lambda root=None: {"another.py": now})
        assert resume(sweep, "completes") == 1  # what was accepted is these hashes, not whatever comes
        assert state(run_dir)[0] is State.FAILED
    assert resume(sweep, "completes") == 0  # as it was frozen
    assert [row["changes"] == [] for row in _rows(run_dir, "began")] == [False, True]
    assert "; as frozen again from update 6 on" in state(run_dir)[1]
    verdict = _verdict(sweep)
    assert (verdict.outcome, verdict.number) == (Outcome.warned, "changed at 3")
    (detail,) = verdict.details
    assert "losses/san.py changed (accepted by " in detail and "a bug in SAN's floor" in detail


def test_weights_that_changed_are_named_by_their_file(tmp_path: Path, resume: Resume) -> None:
    model = Path(shutil.copytree(Path(pth_exp.__file__).parent / "models" / "embedded", tmp_path / "model"))
    sweep = freeze_sweep(tmp_path, "arm=grpo", "updates=3", f"model.path={model}", *SMALL_TASK)
    (run_dir,) = runs_of(sweep)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    assert resume(sweep, "completes") == 1
    assert "(model.safetensors changed)" in state(run_dir)[1]
    assert resume(sweep, "completes", "--accept-changes", "trained longer") == 0
    (began,) = _rows(run_dir, "began")
    assert began["from_update"] == 0 and began["changes"][0]["after"] == freeze.file_hash(weights)
    (model / "tokenizer.json").unlink()


def test_data_that_changed_are_named_by_their_split(tmp_path: Path, resume: Resume) -> None:
    rows = {"train": 7473, "test": 1319}  # GSM8K's sizes: other files are not taken
    for split, count in rows.items():
        lines = [json.dumps({"question": f"What is {i} + 1?", "answer": f"#### {i + 1}"}) for i in range(count)]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    sweep = freeze_sweep(tmp_path, "arm=grpo", "updates=3", "task=gsm8k", f"task.path={tmp_path}")
    (run_dir,) = runs_of(sweep)
    train = tmp_path / "train.jsonl"
    train.write_text(train.read_text().replace("What is 17 + 1?", "What is 17 plus 1?"))
    assert resume(sweep, "records_only", "--only", "0") == 1
    assert "(train (7473 problems) changed)" in state(run_dir)[1]


def test_a_study_s_loss_that_changed_is_executed_once_it_is_accepted(tmp_path: Path, resume: Resume) -> None:
    study = tmp_path / "study"
    study.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(study)
        assert cli.main(["new", "arm", "tidal"]) == 0
    sweep = freeze_sweep(study, "arm=tidal", "updates=3", *SMALL_TASK)
    (run_dir,) = runs_of(sweep)
    losses = study / "my_losses.py"
    losses.write_text(losses.read_text() + "\n# a better idea\n")
    assert resume(sweep, "completes") == 1
    assert f"(study {losses} changed)" in state(run_dir)[1] and "--accept-changes" in state(run_dir)[1]
    assert resume(sweep, "completes", "--accept-changes", "a better idea") == 0
    assert _rows(run_dir, "began")[0]["changes"][0]["after"] == freeze.file_hash(losses)
    losses.unlink()
    (run_dir / "attempts").rename(run_dir / "gone")
    assert resume(sweep, "completes", "--accept-changes", "no idea") == 1  # nothing to go on with


def _replace(path: Path, old: str, new: str) -> None:
    assert path.read_text().count(old) == 1
    path.write_text(path.read_text().replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("  lr: 0.0002\n", "  lr: 0.0003\n", "config.lr 0.0002 → 0.0003"),
        ("    data: 4\n", "    data: null\n", "config.seeds.data 4 → None"),
        ("label: grpo\n", "label: san\n", "run.label grpo → san"),
        ("  updates: 12\n", "", "config.updates 12 → (absent)"),
    ],
)
def test_a_frozen_file_edited_into_another_run_is_refused_whatever_the_reason(
    one: tuple[Path, Path], resume: Resume, capsys: pytest.CaptureFixture[str], old: str, new: str, told: str
) -> None:
    sweep, frozen = one
    was = freeze.file_hash(frozen)
    _replace(frozen, old, new)
    for arguments in ([], ["--accept-changes", "it is only a little"]):
        assert resume(sweep, "completes", *arguments) == 1
        error = capsys.readouterr().err
        assert was in error and freeze.file_hash(frozen) in error and told in error, error
        assert "Traceback" not in error and not (frozen.parent / "attempts").exists()
    assert not (frozen.parent / changes.FILE).exists()


def test_an_edit_of_a_frozen_file_that_decides_no_number_can_be_accepted(one: tuple[Path, Path], resume: Resume) -> None:
    sweep, frozen = one
    _replace(frozen, "heartbeat_every: 5.0", "heartbeat_every: 4.0")
    assert resume(sweep, "completes") == 1
    assert resume(sweep, "completes", "--accept-changes", "a slow disk") == 0
    (began,) = _rows(frozen.parent, "began")
    field = {"kind": "frozen.yaml", "name": "config.lease.heartbeat_every", "before": 5.0, "after": 4.0}
    assert began["changes"] == [field]
    assert json.loads((frozen.parent / "attempts" / "0001.json").read_text())["heartbeat_every"] == 4.0
    assert (_verdict(sweep).outcome, _verdict(sweep).number) == (Outcome.warned, "changed at 0")
    _replace(frozen, "lost_after: 90.0", "lost_after: 80.0")
    verdict = _verdict(sweep)
    assert verdict.outcome is Outcome.failed and verdict.number == "frozen.yaml edited"  # not what was accepted


def test_an_edit_that_cannot_be_told_for_certain_is_refused(
    one: tuple[Path, Path], resume: Resume, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep, frozen = one
    _replace(frozen, "heartbeat_every: 5.0", "heartbeat_every: 4.0")
    shutil.rmtree(frozen.parent / ".hydra")
    assert resume(sweep, "completes", "--accept-changes", "a slow disk") == 1
    assert "what it was cannot be told for certain" in capsys.readouterr().err


def test_what_was_made_from_the_frozen_config_is_never_accepted(
    one: tuple[Path, Path], resume: Resume, capsys: pytest.CaptureFixture[str]
) -> None:
    """As verl.yaml is."""
    sweep, frozen = one
    content = yaml.safe_load(frozen.read_text()) | {"files": {"verl.yaml": "0" * 64}}
    frozen.write_bytes(freeze.dump(content))
    index = json.loads((sweep / "index.json").read_text())
    index["runs"][0]["frozen_sha256"] = freeze.file_hash(frozen)
    (sweep / "index.json").write_text(json.dumps(index))
    (frozen.parent / "verl.yaml").write_text("n: 2")
    assert resume(sweep, "completes", "--accept-changes", "why not") == 1
    assert "verl.yaml changed after the run was frozen" in capsys.readouterr().err


def test_a_reason_is_needed(one: tuple[Path, Path], resume: Resume, capsys: pytest.CaptureFixture[str]) -> None:
    assert resume(one[0], "completes", "--accept-changes", " ") == 2
    assert "needs a reason" in capsys.readouterr().err


def test_other_libraries_midway_are_on_record_and_refuse_nothing(
    one: tuple[Path, Path], resume: Resume, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep, run_dir = one[0], one[1].parent
    assert resume(sweep, "stops_at_a_checkpoint") == 1
    versions = json.loads((run_dir / "attempts" / "0001.facts.json").read_text())["versions"]
    as_is = provenance._version
    monkeypatch.setattr(provenance, "_version", lambda name: "9.9" if name == "torch" else as_is(name))
    assert resume(sweep, "stops_at_a_checkpoint") == 1
    (began,) = changes.rows(run_dir)
    assert (began["event"], began["attempt"], began["from_update"]) == ("began", 2, 3) and "reason" not in began
    assert began["changes"] == [{"kind": "version", "name": "torch", "before": versions["torch"], "after": "9.9"}]
    told = f"from update 3 on torch {versions['torch']} → 9.9"
    assert told in state(run_dir)[1] and told in [row.get("reason") for row in history(run_dir)]
    assert resume(sweep, "completes") == 0
    assert len(changes.rows(run_dir)) == 1  # attempt 3 has what attempt 2 had
    verdict = _verdict(sweep)
    assert (verdict.outcome, verdict.number) == (Outcome.warned, "changed at 3") and "torch" in verdict.details[0]
