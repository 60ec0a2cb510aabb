"""What `tracking` may say, what it needs where, and that it is no part of what a run is."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from pth_exp import interpreters
from pth_exp.cli import main

SMALL = ["run", "arm=grpo", "updates=3", "task.train_problems=64", "task.test_problems=16", "validation.every=null"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    assert main([*SMALL, "--dry-run", *overrides]) == 2
    return capsys.readouterr().err


def without(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this interpreter had no such package."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == package else find(name, *more))


def test_another_backend_is_refused_with_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "tracking.backends=[console,mlflow]")
    assert "tracking.backends=mlflow: no such backend" in said and "backends are console, file, wandb" in said
    assert "console" in refused(capsys, "tracking=mlflow") and not Path("multirun_outputs").exists()


def test_a_key_in_the_place_of_its_name_is_refused_and_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    key = "0123456789abcdef0123456789abcdef01234567"
    said = refused(capsys, "tracking=wandb", f"tracking.key_variable={key}")
    assert "tracking.key_variable: is no name of an environment variable" in said and "export the key as WANDB_API_KEY" in said
    assert key not in said


def test_a_tracker_that_is_not_installed_is_refused_with_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    without("wandb", monkeypatch)
    said = refused(capsys, "tracking=wandb")
    assert f"tracking.backends=wandb: {sys.executable} has no package wandb" in said and "pip install 'pth-exp[wandb]'" in said
    assert main([*SMALL, "tracking=wandb"]) == 2 and not Path("multirun_outputs").exists()


def test_on_verl_it_is_verls_interpreter_that_is_asked(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    python = here / "python"
    monkeypatch.setenv(interpreters.VARIABLE, str(python))
    for found in (False, True):
        python.write_text(f'#!/bin/sh\n[ "$2" = -c ] && exit {int(not found)}\nexit 1\n')
        python.chmod(0o755)
        code = main([*SMALL, "stack=verl", "tracking=wandb", "--dry-run"])
        said = capsys.readouterr().err
        assert code == 2 and (f"{python} has no package wandb" in said) is (not found), said


def test_tracking_is_no_part_of_what_a_run_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from pth_exp.launchers.local import LocalPlace

    monkeypatch.setattr(LocalPlace, "dispatch", lambda self, runs: [])
    identities: list[dict[str, Any]] = []
    for more in ([], ["tracking=file", "tracking.project=other", "tracking.mode=online"]):
        main([*SMALL, *more])
        (frozen,) = Path("multirun_outputs/latest").resolve().glob("*/frozen.yaml")
        identities.append(yaml.safe_load(frozen.read_text()))
    assert identities[0]["config_id"] == identities[1]["config_id"]
    assert [frozen["config"]["tracking"]["backends"] for frozen in identities] == [["console", "file"], ["file"]]
    assert [frozen["config"]["tracking"]["project"] for frozen in identities] == ["adhoc", "other"]
