"""What a SLURM job is asked to be, and launchers that are refused, on a machine without SLURM."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
from frozen_sweeps import pth
from hypothesis import given
from hypothesis import strategies as st

from pth_exp.launchers.place import Job
from pth_exp.launchers.sbatch import ranges
from pth_exp.launchers.slurm_settings import SlurmSettings
from pth_exp.refusal import Refusal

GIB = 1 << 30


def _job(**fields: object) -> Job:
    return Job(0, "run", Path("/sweep/000"), Path("/sweep/000/frozen.yaml"), "0" * 64, **fields)  # type: ignore[arg-type]


def test_a_trainer_run_asks_for_little_and_a_verl_run_for_what_its_ranks_need() -> None:
    trainer = SlurmSettings(partition="gpu").options(_job(threads=3, device="auto"))
    assert trainer["cpus-per-task"] == 3 and "gpus-per-node" not in trainer and "mem" not in trainer
    assert (
        trainer["partition"] == "gpu" and trainer["time"] == 60 and trainer["signal"] == "USR2@120" and trainer["requeue"] is True
    )
    assert SlurmSettings().options(_job(device="cuda"))["gpus-per-node"] == 1
    verl = SlurmSettings(nodes=2).options(_job(stack="verl", device="cuda", ranks=3, memory=13 * GIB))
    assert (verl["nodes"], verl["gpus-per-node"], verl["cpus-per-task"], verl["mem"]) == (2, 2, 8, "7168M")


def test_what_is_asked_for_is_what_is_given() -> None:
    settings = SlurmSettings(
        gpus_per_node="a100:2", cpus_per_task=5, mem_gb=1.5, requeue=False, additional_parameters={"mail_user": "me"}
    )
    asked = settings.options(_job(stack="verl", device="cuda", ranks=8, memory=99 * GIB))
    assert (asked["gpus-per-node"], asked["cpus-per-task"], asked["mem"], asked["mail-user"]) == ("a100:2", 5, "1536M", "me")
    assert asked["no-requeue"] is True and "requeue" not in asked
    assert settings.step(_job())[1] == "--cpus-per-task=5"
    assert SlurmSettings(gpus_per_node=0).options(_job(device="cuda")).get("gpus-per-node") is None


def test_the_container_comes_before_the_interpreter_that_it_holds() -> None:
    command = SlurmSettings(container="apptainer exec --nv 'my image.sif'", python="/opt/python").command(_job())
    assert command[:6] == ["apptainer", "exec", "--nv", "my image.sif", "/opt/python", "-P"]
    assert command[-4:] == ["--frozen", "/sweep/000/frozen.yaml", "--sha256", "0" * 64]
    assert SlurmSettings().command(_job())[0] == sys.executable


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("timeout_min", 0, "a whole number of at least 1"),
        ("timeout_min", None, "a whole number of at least 1"),
        ("timeout_min", "1:00:00", "a whole number of at least 1"),
        ("partition", 7, "a word"),
        ("setup", "module load cuda", "a list of texts"),
        ("requeue", "no", "true or false"),
        ("mem_gb", -1, "a number above 0"),
        ("additional_parameters", ["x"], "a mapping"),
        ("gpus_per_node", -1, "a whole number, or TYPE:NUMBER"),
    ],
)
def test_a_value_that_cannot_be_is_named(field: str, value: object, told: str) -> None:
    with pytest.raises(Refusal) as refusal:
        SlurmSettings(**{field: value})  # type: ignore[arg-type]
    assert f"launcher.{field}" in str(refusal.value) and told in str(refusal.value)


@given(st.sets(st.integers(0, 60), min_size=1))
def test_ranges_are_read_as_the_numbers_they_came_from(numbers: set[int]) -> None:
    text = ranges(sorted(numbers))
    spans = [part.partition("-") for part in text.split(",")]
    read = [n for first, _, last in spans for n in range(int(first), int(last or first) + 1)]
    assert read == sorted(numbers)
    assert len(spans) == sum(n - 1 not in numbers for n in numbers)


def test_hydras_own_launchers_are_refused_with_the_line_that_does_the_same(tmp_path: Path) -> None:
    told = pth(
        "run", "arm=grpo", "hydra/launcher=submitit_slurm", "hydra.launcher.partition=gpu", "hydra.launcher.timeout_min=90",
        "hydra.launcher.tasks_per_node=1", "hydra.launcher.max_num_timeout=3", "hydra.launcher.gres=gpu:1", cwd=tmp_path,
    )  # fmt: skip
    assert told.returncode == 2 and not (tmp_path / "multirun_outputs").exists()
    assert (
        "pth run hydra/launcher=pth_slurm arm=grpo hydra.launcher.partition=gpu hydra.launcher.timeout_min=90 "
        "hydra.launcher.requeue=true +hydra.launcher.additional_parameters.gres=gpu:1 "
    ) in told.stderr
    joblib = pth("run", "hydra/launcher=joblib", "arm=grpo", "hydra.launcher.n_jobs=2", cwd=tmp_path)
    assert joblib.returncode == 2 and "pth run hydra/launcher=pth_local arm=grpo " in joblib.stderr


def test_a_setting_that_a_place_does_not_have_is_refused_with_the_nearest(tmp_path: Path) -> None:
    told = pth("run", "arm=grpo", "hydra/launcher=pth_slurm", "hydra.launcher.partitoin=gpu", cwd=tmp_path)
    assert told.returncode == 2 and "launcher.partitoin: is no setting of pth_slurm; did you mean partition?" in told.stderr


def test_without_slurm_pth_slurm_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    if (git := shutil.which("git")) is not None:
        (folder / "git").symlink_to(git)
    monkeypatch.setenv("PATH", str(folder))
    assert not os.environ["PATH"].count(":")
    told = pth("run", "arm=grpo", "hydra/launcher=pth_slurm", cwd=tmp_path)
    assert told.returncode == 2 and "sbatch, squeue" in told.stderr and "login node" in told.stderr, told.stderr
