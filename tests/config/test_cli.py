"""The command line as people type it: light, shown before it is started, complete with tabs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sweeping import pth

from pth_exp import cli


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=os.environ | environment, timeout=120)


def test_help_loads_neither_hydra_nor_torch() -> None:
    loaded = (
        "import sys; from pth_exp import cli; cli.main(['--help']); print(sorted({'torch', 'hydra', 'yaml'} & set(sys.modules)))"
    )
    done = python("-c", loaded)
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "[]"
    for name in cli.COMMANDS:
        assert name in done.stdout


@pytest.mark.parametrize("module", ["freeze", "design", "schema", "refusal", "validity", "extensions"])
def test_what_every_command_imports_is_light(module: str) -> None:
    heavy = "{'torch', 'hydra', 'omegaconf', 'transformers', 'numpy'}"
    done = python("-c", f"import sys, pth_exp.{module}; print(sorted({heavy} & set(sys.modules)))")
    assert done.stdout.strip() == "[]", done.stderr


def test_running_a_sweep_does_not_load_torch_here() -> None:
    code = "import sys; from pth_exp import cli; cli.main(['run', 'arm=grpo', '--dry-run']); print('torch' in sys.modules)"
    assert python("-c", code).stdout.splitlines()[-1] == "False"


def test_unknown_command_is_named_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = pth(capsys, "rnu", "arm=grpo")
    assert code == 2 and "'rnu'" in err and "did you mean run?" in err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    from pth_exp import __version__

    assert pth(capsys, "--version")[1] == f"pth-exp {__version__}\n"


@pytest.mark.parametrize("flag", [["--dry-run"], ["--dry-run", "-m"], ["-m", "--dry-run"]])
def test_dry_run_shows_every_config_and_the_table_and_leaves_nothing(
    flag: list[str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = pth(capsys, "run", "arm=grpo,san", "seed=42,43", *flag)
    assert code == 0
    assert out.count("refresh_interval: 1") == 4 and out.count("\n  data: 43\n") == 2
    assert "4 runs; the fields that differ" in out and "design gate: pass" in out
    assert list(here.iterdir()) == []


def test_options_may_stand_between_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = pth(capsys, "run", "arm=grpo", "--dry-run", "seed=1,2", "-m", "lr=1e-3")
    assert code == 0 and out.count("lr: 0.001") == 2


def test_dry_run_of_a_refused_sweep_still_shows_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = pth(capsys, "run", "arm=grpo,san", "seed=1,2", "seeds.data=1", "--dry-run")
    assert code == 2
    assert "unexpected" in out and "design gate: refused" in out and "swept-but-equal: seeds.data" in err


def test_a_wide_sweep_is_shown_by_values(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = pth(capsys, "run", "arm=grpo,san", "seed=range(0,6)", "--dry-run")
    assert code == 0 and "seed (varied)" in out and "runs 3, 9" in out


def test_cfg_job_shows_what_was_composed_and_resolve_what_would_be_frozen(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = pth(capsys, "run", "arm=grpo,san", "seed=7", "--cfg", "job")
    assert code == 0 and out.count("data: ${seed}") == 2
    code, out, _ = pth(capsys, "run", "arm=grpo,san", "seed=7", "--cfg", "job", "--resolve")
    assert code == 0 and out.count("data: 7") == 2
    assert list(here.iterdir()) == []


def test_cfg_hydra_info_and_helps(capsys: pytest.CaptureFixture[str]) -> None:
    assert "pth_local" in pth(capsys, "run", "arm=grpo", "--cfg", "hydra")[1]
    assert "arm/grpo" in pth(capsys, "run", "arm=grpo", "--info", "defaults")[1]
    assert "--hydra-help" in pth(capsys, "run", "--hydra-help")[1]
    out = pth(capsys, "run", "--help")[1]
    listed = next(line for line in out.splitlines() if line.strip().startswith("arm: ")).partition("arm: ")[2].split(", ")
    assert {"grpo", "ppo_clip", "san", "tis_ppo", "tis_reinforce"} <= set(listed) and "--dry-run" in out


def test_config_dir_adds_options(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "more" / "optimizer").mkdir(parents=True)
    (here / "more" / "optimizer" / "slow.yaml").write_text("defaults: [adamw, _self_]\nbeta2: 0.95\n")
    code, out, _ = pth(capsys, "run", "arm=grpo", "optimizer=slow", "--config-dir", "more", "--dry-run")
    assert code == 0 and "beta2: 0.95" in out


@pytest.mark.parametrize(("line", "first"), [("pth run arm=", "run"), ("pth-run arm=", "pth-run")])
def test_tab_completion_of_options(
    line: str, first: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COMP_LINE", line)
    if first == "run":
        code, out, _ = pth(capsys, "-sc", "query=bash")
    else:
        monkeypatch.setattr(sys, "argv", ["pth-run", "-sc", "query=bash"])
        code, out = cli.run_main(), capsys.readouterr().out
    assert code == 0
    assert {"arm=grpo", "arm=ppo_clip", "arm=san", "arm=tis_ppo", "arm=tis_reinforce"} <= set(out.split())
    assert all(option.startswith("arm=") for option in out.split())


def test_tab_completion_of_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COMP_LINE", "pth ru")
    assert pth(capsys, "-sc", "query=bash")[1].split() == ["run"]


def test_completion_script_is_for_the_command_that_prints_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/pth", "run", "-sc", "install=bash"])
    assert pth(capsys, "run", "-sc", "install=bash")[1].strip().endswith("hydra_bash_completion pth")
