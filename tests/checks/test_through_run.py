"""The checks through the user's path: ``pth run`` trains, ``pth check`` and ``pth diff`` read."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

SMALL = [
    "updates=6", "prompts_per_update=4", "responses_per_prompt=4", "validation.every=3", "validation.problems=8",
    "task.train_problems=256", "task.test_problems=16", "stack.checkpoint_every=null",
]  # fmt: skip
ARMS = ("grpo", "ppo_clip", "tis_ppo", "tis_reinforce", "san")


def pth(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pth_exp.cli", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


def run(cwd: Path, *overrides: str) -> Path:
    done = pth("run", *SMALL, *overrides, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return (cwd / "multirun_outputs" / "latest").resolve()


def check(sweep: Path) -> tuple[int, dict[str, Any]]:
    done = pth("check", str(sweep), "--json", "--no-figure", cwd=sweep)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout)


def outcomes(report: dict[str, Any], check: str) -> dict[str, str]:
    return {v["run"]: v["outcome"] for v in report["verdicts"] if v["check"] == check}


def sentences(report: dict[str, Any], run: str, check: str) -> str:
    (verdict,) = (v for v in report["verdicts"] if (v["run"], v["check"]) == (run, check))
    return " ".join((verdict["number"], verdict["reason"], *verdict["details"]))


def edit_design(sweep: Path, **design: Any) -> None:
    index = json.loads((sweep / "index.json").read_text())
    index["design"].update(design)
    (sweep / "index.json").write_text(json.dumps(index))


@pytest.fixture(scope="module")
def lagged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every arm with a sampler that lags by up to two updates."""
    return run(tmp_path_factory.mktemp("lagged"), f"arm={','.join(ARMS)}", "refresh_interval=3", "seed=42")


@pytest.fixture
def copy(lagged: Path, tmp_path: Path) -> Path:
    """The lagged sweep, to be damaged."""
    return Path(shutil.copytree(lagged, tmp_path / "sweep"))


def test_at_age_zero_every_arm_is_quiet(tmp_path: Path) -> None:
    sweep = run(tmp_path, f"arm={','.join(ARMS)}", "refresh_interval=1", "replay_age=0", "seed=42")
    code, report = check(sweep)
    assert code == 0
    assert {v["outcome"] for v in report["verdicts"]} == {"pass"}, report["verdicts"]
    assert len(report["verdicts"]) == 4 * len(ARMS)


def test_healthy_arms_under_lag(lagged: Path) -> None:
    code, report = check(lagged)
    assert code == 0
    assert outcomes(report, "ratio") == dict.fromkeys(ARMS, "pass") | {"grpo": "warn"}
    for name in ("config", "batches", "losses"):
        assert outcomes(report, name) == dict.fromkeys(ARMS, "pass")
    text = sentences(report, "grpo", "ratio")
    assert "Clip fraction exactly 0 on 6 of 6 updates" in text
    assert "Ratio identically 1 on 6 of 6 updates" in text
    assert all(run["accuracy"] is not None and run["state"] == "COMPLETED" for run in report["runs"])


FAULTS: Sequence[tuple[str, str]] = (
    ("tis_reinforce", "arm=tis_reinforce seed=42 queue=warmup replay_age=2"),
    ("san·seed=42", "arm=san seed=42 refresh_interval=3"),
    ("san·seed=43", "arm=san seed=43 seeds.data=42 refresh_interval=3"),
    ("ppo_clip", "arm=ppo_clip arm.old_policy=recomputed seed=42 refresh_interval=3"),
    ("two_steps", "arm=grpo seed=42 refresh_interval=3 optimizer.steps_per_batch=2"),
    ("unrecorded", "arm=grpo seed=42 refresh_interval=3 stack.record_sampler_logp=false"),
)


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """One sweep of the faults that ordinary config reaches, and each run's label."""
    blocks = ",".join(f'"{overrides}"' for _, overrides in FAULTS)
    apart = "queue,replay_age,refresh_interval,optimizer.steps_per_batch,stack.record_sampler_logp,arm.old_policy"
    sweep = run(
        tmp_path_factory.mktemp("faulty"),
        f"hydra.sweeper.blocks=[{blocks}]",
        "design.gate=label",
        "design.vary=[arm,seed]",
        f"design.blocks=[{apart}]",
    )
    runs = json.loads((sweep / "index.json").read_text())["runs"]
    return sweep, {name: entry["label"] for (name, _), entry in zip(FAULTS, runs, strict=True)}


def test_planted_faults(faulty: tuple[Path, dict[str, str]]) -> None:
    sweep, label = faulty
    code, report = check(sweep)
    assert code == 1
    ratio, config, batches = (outcomes(report, name) for name in ("ratio", "config", "batches"))

    assert batches[label["tis_reinforce"]] == "fail"
    assert "4 of 6" in sentences(report, label["tis_reinforce"], "batches")  # updates 0-2 on batch 0, then 1, 2, 3
    assert "3 updates (0-2) on batch 0" in sentences(report, label["tis_reinforce"], "batches")
    assert ratio[label["tis_reinforce"]] == "pass"

    assert (config[label["san·seed=42"]], config[label["san·seed=43"]]) == ("pass", "fail")
    assert "prompt IDs are those of" in sentences(report, label["san·seed=43"], "config")

    assert ratio[label["ppo_clip"]] == "fail"
    assert "No correction for the sampler: the arm claims ratio" in sentences(report, label["ppo_clip"], "ratio")

    assert ratio[label["two_steps"]] == "warn"
    text = sentences(report, label["two_steps"], "ratio")
    assert "No correction for the sampler's lag" in text
    assert "of 2 steps a batch" in text and "Clip fraction exactly 0 on 6 of 6" not in text

    assert ratio[label["unrecorded"]] == "not measured"
    unremarkable = {name: outcome for name, outcome in batches.items() if name != label["tis_reinforce"]}
    assert set(unremarkable.values()) == {"pass"}


def test_declared_faults_are_as_expected(faulty: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    sweep, label = faulty
    sweep = Path(shutil.copytree(sweep, tmp_path / "sweep"))
    expect = [
        {"run": label["tis_reinforce"], "check": "batches", "verdict": "fail", "reason": "warm-up"},
        {"run": label["san·seed=43"], "check": "config", "verdict": "fail", "reason": "data seed"},
        {"run": label["ppo_clip"], "check": "ratio", "verdict": "fail", "reason": "recomputed"},
        {"run": label["unrecorded"], "check": "ratio", "verdict": "not measured", "reason": "not recorded"},
    ]
    edit_design(sweep, expect=expect)
    code, report = check(sweep)
    assert (code, report["surprises"]) == (0, [])
    edit_design(sweep, expect=[*expect, {"run": label["san·seed=42"], "check": "ratio", "verdict": "fail", "reason": "no"}])
    code, report = check(sweep)
    assert code == 1
    assert [(s["run"], s["expected"], s["found"]) for s in report["surprises"]] == [(label["san·seed=42"], "fail", "pass")]


def test_diff_of_a_sweep_with_faults(faulty: tuple[Path, dict[str, str]]) -> None:
    sweep, label = faulty
    done = pth("diff", str(sweep), "--json", cwd=sweep)
    report = json.loads(done.stdout)
    assert done.returncode == 1
    assert "seeds.data" in report["unexpected"]
    runs = {entry["label"]: sweep / entry["dir"] for entry in json.loads((sweep / "index.json").read_text())["runs"]}
    pair = [str(runs[label[name]]) for name in ("san·seed=42", "san·seed=43")]
    done = pth("diff", *pair, cwd=sweep)
    assert done.returncode == 1
    assert "all 24 the same" in done.stdout and "although the seeds differ" in done.stdout


def test_diff_of_healthy_runs(lagged: Path) -> None:
    done = pth("diff", str(lagged), "--json", cwd=lagged)
    report = json.loads(done.stdout)
    assert done.returncode == 0
    assert report["unexpected"] == {} and "arm.name" in report["per_arm"]
    assert all(prompts["batch"] is None and prompts["expected"] for prompts in report["prompts"])


def test_a_torn_segment_is_named_and_not_measured(copy: Path) -> None:
    """What a killed run leaves behind: whole rows, and a torn last line."""
    segment = next(copy.glob("004-*/updates.0001.jsonl"))
    lines = segment.read_bytes().splitlines(keepends=True)
    segment.write_bytes(b"".join(lines[:4]) + lines[4][:50])
    code, report = check(copy)
    assert code == 1
    assert outcomes(report, "ratio")["san"] == outcomes(report, "batches")["san"] == "not measured"
    assert [v["outcome"] for v in report["verdicts"] if v["run"] == "tis_ppo"] == ["pass"] * 4
    (problem,) = report["problems"]["san"]
    assert (problem["kind"], problem["file"]) == ("torn", "updates.0001.jsonl")
    assert problem["offset"] == sum(map(len, lines[:4]))


def test_an_aliased_snapshot_is_caught(copy: Path) -> None:
    """The weights' fingerprint moves although the version stamp stands."""
    segment = next(copy.glob("004-*/updates.0001.jsonl"))
    rows = [json.loads(line) for line in segment.read_text().splitlines()]
    aliased = [row | {"sampler/fingerprint": row["learner/fingerprint"]} for row in rows]
    segment.write_text("".join(json.dumps(row) + "\n" for row in aliased))
    assert outcomes(check(copy)[1], "batches")["san"] == "fail"


@pytest.mark.parametrize(
    ("file", "name"), [("received.yaml", "config"), ("first_batches.json", "config"), ("batches.0001.jsonl", "batches")]
)
def test_missing_files_are_not_measured(copy: Path, file: str, name: str) -> None:
    next(copy.glob(f"004-*/{file}")).unlink()
    code, report = check(copy)
    assert code == 1
    assert outcomes(report, name) == dict.fromkeys(ARMS, "pass") | {"san": "not measured"}


def test_text_and_picture(lagged: Path) -> None:
    done = pth("check", str(lagged), cwd=lagged)
    assert done.returncode == 0
    for text in ("grpo", "No correction for the sampler's lag (uncorrected)", "As expected: all 20 verdicts", "Accuracy"):
        assert text in done.stdout
    assert (lagged / "check.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "\033[" not in done.stdout  # piped: no colour


WRITTEN: dict[str, list[str]] = {
    "san_plus": ["arm=san_plus_written", "arm.loss=san_plus"],
    "san_ref": ["arm=san_ref_written", "arm.loss=san_ref"],
    "right": ["arm=san_plus_written", "stack.activations=micro_batch", "stack.micro_batch_tokens=100"],
    "unwritten": ["arm=san", "arm.equation=null"],
    "scale": [
        "arm=tis_reinforce",
        "arm.cap=9",
        'arm.equation="loss = aggregate(-2 * A * sg(min(exp(logp - sampler_logp), 9)) * logp)"',
    ],
}


def test_a_loss_other_than_the_one_written_down(tmp_path: Path) -> None:
    """Section 4.4, by ordinary config: the name and the equation say written, the loss is the implementation's."""
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    design = {
        "gate": "label",
        "vary": ["arm"],
        "blocks": ["stack.activations", "stack.micro_batch_tokens", "arm.loss", "arm.cap"],
    }
    content = {"name": "written", "hydra": {"sweeper": {"blocks": list(WRITTEN.values())}}, "design": design}
    text = "# @package _global_\n" + json.dumps(content)
    (tmp_path / "conf" / "experiment" / "written.yaml").write_text(text)
    sweep = run(tmp_path, "experiment=written", "refresh_interval=3")
    labels = [entry["label"] for entry in json.loads((sweep / "index.json").read_text())["runs"]]
    code, report = check(sweep)
    found = dict(zip(WRITTEN, (outcomes(report, "losses")[label] for label in labels), strict=True))
    assert found == {"san_plus": "fail", "san_ref": "fail", "right": "pass", "unwritten": "not measured", "scale": "fail"}
    assert code == 1 and {s["check"] for s in report["surprises"]} == {"losses"}
    for name, label in zip(WRITTEN, labels, strict=True):
        if name.startswith("san_"):
            said = sentences(report, label, "losses")
            assert f"The loss {name} is not the equation of arm {name}_written" in said
            assert "a scale of each response's own (cosine 1 within a response)" in said
    expect = [
        {"run": label, "check": "losses", "verdict": found[name], "reason": "section 4.4"}
        for name, label in zip(WRITTEN, labels, strict=True)
        if found[name] != "pass"
    ]
    edit_design(sweep, expect=expect)
    assert check(sweep)[0] == 0


def test_shadows_name_one_method_through_the_users_path(tmp_path: Path) -> None:
    sweep = run(tmp_path, "arm=san", "probe.shadow_arms=[seq_norm,asympo_reading,grpo]", "refresh_interval=3")
    code, report = check(sweep)
    assert code == 0
    assert {(p["a"], p["b"]) for p in report["shadows"] if p["one_method"]} == {("seq_norm", "asympo_reading")}
    text = pth("check", str(sweep), "--no-figure", cwd=sweep).stdout
    assert "seq_norm and asympo_reading are one method on these batches" in " ".join(text.split())
