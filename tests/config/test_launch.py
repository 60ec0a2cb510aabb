"""From overrides to a sweep's directory: blocks, layout, batches held against each other."""

from __future__ import annotations

import itertools
import re
import time
from pathlib import Path

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from sweeping import freeze_sweep, index_of, pth

from pth_exp.freeze import load
from pth_exp.launchers import blocks
from pth_exp.refusal import Refusal


def expand(blocks_: list[object], *arguments: str, **params: str) -> tuple[list[list[str]], tuple[str, ...]]:
    assert OverridesParser is not None
    return blocks.expand(blocks_, params, arguments, None)  # type: ignore[arg-type]


def test_one_empty_block_is_the_grid_that_hydra_makes() -> None:
    jobs, swept = expand([[]], "arm=grpo,san", "seed=range(0,3)", "lr=1e-4")
    assert jobs == [[f"arm={a}", f"seed={s}", "lr=1e-4"] for a, s in itertools.product(("grpo", "san"), (0, 1, 2))]
    assert swept == ("arm", "seed")


def test_a_union_of_grids_is_one_batch_in_order() -> None:
    jobs, swept = expand(
        [["arm=grpo,san", "refresh_interval=96"], "arm=tis_reinforce replay_age=32 queue=warmup,unique_prefill"], "seed=1"
    )
    assert jobs == [
        ["arm=grpo", "refresh_interval=96", "seed=1"],
        ["arm=san", "refresh_interval=96", "seed=1"],
        ["arm=tis_reinforce", "replay_age=32", "queue=warmup", "seed=1"],
        ["arm=tis_reinforce", "replay_age=32", "queue=unique_prefill", "seed=1"],
    ]
    assert set(swept) == {"arm", "queue"}


def test_the_command_line_stands_in_place_of_a_block_s_own_value() -> None:
    jobs, swept = expand([["seed=42", "arm=grpo"]], "seed=7,8", arm="san,grpo")
    assert jobs == [["arm=grpo", "seed=7"], ["arm=grpo", "seed=8"]]
    assert swept == ("seed",)


def test_a_key_that_every_block_gives_is_swept_and_one_that_some_give_is_not() -> None:
    _, swept = expand([["arm=grpo", "lr=1e-4"], ["arm=san"]])
    assert swept == ("arm",)


@pytest.mark.parametrize("block", [["lr=1", "lr=2"], ["seed=1,1"], ["lr=interval(0,1)"]])
def test_blocks_refuse_what_would_be_lost(block: list[str]) -> None:
    with pytest.raises(Refusal):
        expand([block])


def test_layout_of_a_sweep(here: Path) -> None:
    sweep, jobs = freeze_sweep("arm=grpo,san", "seed=1,2", "name=mine")
    assert sweep.parent == here / "multirun_outputs" / "mine"
    assert re.fullmatch(r"\d{8}T\d{6}-[0-9a-f]{4}", sweep.name)
    assert (here / "multirun_outputs" / "mine" / "latest").resolve() == sweep
    assert (here / "multirun_outputs" / "latest").resolve() == sweep
    index = index_of(sweep)
    assert [row["label"] for row in index["runs"]] == ["grpo·seed=1", "grpo·seed=2", "san·seed=1", "san·seed=2"]
    for number, row in enumerate(index["runs"]):
        assert row["dir"] == f"{number:03d}-{row['config_id'][:8]}"
        assert (row["arm"], row["seed"]) == (row["label"][:-7], int(row["label"][-1]))
    assert index["design"]["vary"] == ["arm", "seed"] and index["gate"] == {"verdict": "pass", "findings": []}
    assert [job.run_dir.name for job in jobs] == [row["dir"] for row in index["runs"]]


def test_default_seed_reads_null_in_a_label(here: Path) -> None:
    sweep, _ = freeze_sweep("arm=grpo", "seed=null,43")
    assert [row["label"] for row in index_of(sweep)["runs"]] == ["grpo·seed=null", "grpo·seed=43"]


def test_a_relative_path_is_frozen_as_absolute(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "data").mkdir()
    code, out, err = pth(capsys, "run", "arm=grpo", "task=gsm8k", "task.path=data", "--dry-run")
    assert (code, err) == (0, "") and f"  path: {here}/data\n" in out


def test_hydra_s_own_files_are_where_people_look(here: Path) -> None:
    _, jobs = freeze_sweep("arm=san", "seed=5")
    folder = jobs[0].run_dir / ".hydra"
    config, hydra, overrides = (yaml.safe_load((folder / f"{n}.yaml").read_text()) for n in ("config", "hydra", "overrides"))
    assert overrides == ["arm=san", "seed=5"]
    assert config["seeds"]["data"] == "${seed}" and config["seed"] == 5
    assert hydra["hydra"]["overrides"]["task"] == overrides and hydra["hydra"]["runtime"]["choices"]["arm"] == "san"


def test_output_subdir_null_is_honoured(here: Path) -> None:
    _, jobs = freeze_sweep("arm=san", "hydra.output_subdir=null")
    assert not (jobs[0].run_dir / ".hydra").exists()


def test_two_launches_cannot_share_a_directory(here: Path) -> None:
    freeze_sweep("arm=grpo", f"hydra.sweep.dir={here}/shared")
    with pytest.raises(Refusal, match=r"hydra\.sweep\.dir.*another launch"):
        freeze_sweep("arm=san", f"hydra.sweep.dir={here}/shared")


def test_a_sweep_elsewhere_is_the_latest_and_leaves_no_links_around_itself(here: Path) -> None:
    freeze_sweep("arm=grpo", "name=mine")
    sweep, _ = freeze_sweep("arm=san", f"hydra.sweep.dir={here}/deep/down/mine")
    assert (here / "multirun_outputs" / "latest").resolve() == sweep
    assert not [path for path in here.rglob("latest") if "multirun_outputs" not in path.parts]


def test_the_environment_is_looked_up_when_a_run_is_frozen(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHERE", "the disk")
    settings = ["+hydra.job.env_set.PLACE=${oc.env:WHERE}", "+hydra.job.env_set.NUMBER=seed ${seed}"]
    _, jobs = freeze_sweep("arm=san", "seed=5", *settings)
    assert jobs[0].environment == {"PLACE": "the disk", "NUMBER": "seed 5"}


def test_a_second_batch_is_held_against_the_first(here: Path) -> None:
    with pytest.raises(Refusal, match="duplicate"):
        freeze_sweep("arm=grpo", batches=[["seed=1,2"], ["seed=2,3"]])
    sweep, _ = freeze_sweep("arm=grpo", batches=[["seed=1,2"], ["seed=3,4"]])
    assert [row["seed"] for row in index_of(sweep)["runs"]] == [1, 2, 3, 4]


def test_a_sweep_that_extends_another_is_held_against_it(here: Path) -> None:
    first, _ = freeze_sweep("arm=grpo,san", "seed=1")
    extends = f"design.extends={first}"
    with pytest.raises(Refusal, match="duplicate"):
        freeze_sweep("arm=san", "seed=1,2", extends, "design.vary=[arm,seed]")
    with pytest.raises(Refusal, match="undeclared-difference: lr"):
        freeze_sweep("arm=san", "seed=2", "lr=1e-3", extends, "design.vary=[arm,seed]")
    freeze_sweep("arm=san", "seed=2", extends, "design.vary=[arm,seed]")


def test_declared_per_arm_value_is_given_to_its_arm(here: Path) -> None:
    _, jobs = freeze_sweep("arm=grpo,san", "design.per_arm=[{field: lr, values: {san: 3e-4}, reason: its optimum}]")
    assert [load(job.frozen).config.lr for job in jobs] == [2e-4, 3e-4]


def test_label_starts_what_refuse_stops(here: Path) -> None:
    arguments = ("arm=grpo,san", "seed=1,2", "seeds.data=1")
    with pytest.raises(Refusal, match=r"swept-but-equal: seeds\.data"):
        freeze_sweep(*arguments)
    assert not (here / "multirun_outputs").exists()
    sweep, jobs = freeze_sweep(*arguments, "design.gate=label")
    assert len(jobs) == 4
    gate = index_of(sweep)["gate"]
    assert gate["verdict"] == "labelled"
    assert [(f["kind"], f["field"], f["runs"]) for f in gate["findings"]] == [
        ("swept-but-equal", "seeds.data", ["grpo·seed=2", "san·seed=2"])
    ]


def test_the_stock_sweeper_and_a_stranger_s_work_too(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = pth(capsys, "run", "arm=grpo,san", "seed=1,2", "hydra/sweeper=basic", "--dry-run")
    assert code == 0 and "design gate: pass" in out and "san·seed=2" in out


@pytest.mark.slow
def test_freezing_100_runs_takes_at_most_15_seconds_of_one_core(here: Path) -> None:
    started = time.process_time()
    _, jobs = freeze_sweep("arm=grpo", "seed=range(0,100)")
    assert len(jobs) == 100
    assert time.process_time() - started < 15


def test_what_many_runs_breach_is_told_once(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = pth(capsys, "run", "arm=grpo,san", "seed=range(0,15)", "seeds.data=3", "stack.threads=1")
    assert code == 2 and not (here / "multirun_outputs").exists()
    assert len(err.splitlines()) < 8
    assert "seed is varied but did not reach seeds.data: all but seed=3" not in err
    assert "seed=0..2, 4..14 (28 runs): seed=0..2, 4..14 (14 values), seeds.data=3" in err
