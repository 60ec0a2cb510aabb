"""What ``pth doctor`` says of environments: found, missing, too old, and with what remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pth_exp import doctor, interpreters
from pth_exp.cli import main
from pth_exp.launchers import slurm_client


def ask(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["doctor", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without verl's environment."""
    monkeypatch.delenv(interpreters.VARIABLE, raising=False)
    monkeypatch.setattr(interpreters, "_folders", lambda: [tmp_path])
    return tmp_path


def stub(folder: Path, answer: str) -> Path:
    """An interpreter that gives ``answer``, whatever it is asked."""
    python = folder / interpreters.FOLDER / "bin" / "python"
    python.parent.mkdir(parents=True)
    (folder / interpreters.FOLDER / interpreters.STAMP).touch()
    python.write_text(f"#!/bin/sh\ncat <<'END'\n{answer}\nEND\n")
    python.chmod(0o755)
    return python


def test_without_verl_the_trainer_alone_is_judged(nowhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, told = ask(capsys)
    trainer, verl = told["environments"]
    assert code == 0 and trainer["complete"] and not verl["asked"]
    assert {item["name"]: item["state"] for item in trainer["items"]}["torch"] == "present"


def test_asking_for_verl_where_it_is_not_fails_with_the_command_that_installs_it(
    nowhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, told = ask(capsys, "verl")
    (item,) = told["environments"][1]["items"]
    assert code == 1 and item["state"] == "missing"
    assert "make verl" in item["remedy"] and str(nowhere) in item["remedy"]


def test_what_is_missing_or_too_old_in_verls_environment_is_named(nowhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from pth_exp.freeze import source_hash

    versions = {"verl": "0.7.1", "ray": "2.60.0", "tensordict": "0.10.0", "TransferQueue": "0.1.11", "torch": "2.13.0+cpu"}
    answer = {"python": "3.11.7", "versions": versions | {"pth-exp": "0.1.0"}, "source": source_hash()}
    stub(nowhere, json.dumps(answer))
    code, told = ask(capsys)
    states = {item["name"]: (item["state"], item["remedy"]) for item in told["environments"][1]["items"]}
    assert code == 1
    assert states["verl"] == ("old", "make verl") and states["vllm"] == ("missing", "make verl")
    assert {states[name][0] for name in ("ray", "tensordict", "TransferQueue", "torch", "source")} == {"present"}


def test_another_version_of_this_package_in_verls_environment_is_no_environment(
    nowhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    needed = {"verl": "0.9.1", "vllm": "0.32.0+cpu", "ray": "2.60.0", "tensordict": "0.10.0", "TransferQueue": "0.1.11"}
    versions = needed | {"torch": "2.13.0+cpu", "pth-exp": "0.1.0"}
    stub(nowhere, json.dumps({"python": "3.11.7", "versions": versions, "source": "0" * 64}))
    code, told = ask(capsys)
    assert code == 1
    assert [item["name"] for item in told["environments"][1]["items"] if item["state"] not in ("present", "optional")] == [
        "source"
    ]


def test_a_half_installed_environment_is_none(nowhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stub(nowhere, "{}")
    (nowhere / interpreters.FOLDER / interpreters.STAMP).unlink()
    code, told = ask(capsys, "verl")
    assert code == 1 and "make verl" in told["environments"][1]["items"][0]["remedy"]


def test_a_broken_interpreter_is_no_environment(nowhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stub(nowhere, "no JSON")
    code, told = ask(capsys)
    assert code == 1 and told["environments"][1]["items"][0]["name"] == "interpreter"


def test_unknown_stack_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "vrel"]) == 2
    assert "vrel" in capsys.readouterr().err


def test_text_names_each_environment(nowhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main([]) == 0
    said = capsys.readouterr().out
    assert "trainer: " in said and "verl: not installed" in said and "make verl" in said


def _programs(folder: Path, scontrol: str, names: tuple[str, ...] = slurm_client.PROGRAMS) -> str:
    """A path with SLURM's commands on it, of which ``scontrol`` says ``scontrol``."""
    for name in names:
        program = folder / name
        program.write_text("#!/bin/sh\n" + (scontrol if name == "scontrol" else "echo slurm 23.11.4") + "\n")
        program.chmod(0o755)
    return str(folder)


@pytest.mark.parametrize(
    ("scontrol", "names", "said"),
    [
        ("echo 'Slurmctld(primary) at head is UP'", slurm_client.PROGRAMS, "23.11.4, its controller answers"),
        (
            "echo 'Slurmctld(primary) at head is DOWN'",
            slurm_client.PROGRAMS,
            "23.11.4, its controller does not answer: Slurmctld(primary) at head is DOWN",
        ),
        (
            "echo 'scontrol: error: no configuration' >&2; exit 1",
            slurm_client.PROGRAMS,
            "23.11.4, its controller does not answer: no configuration",
        ),
        (
            "echo 'Slurmctld(primary) at head is UP'",
            tuple(name for name in slurm_client.PROGRAMS if name not in ("squeue", "scancel")),
            "23.11.4, without squeue, scancel, its controller answers",
        ),
        ("", (), "none of its commands is on the path: this machine submits no jobs"),
    ],
)
def test_slurm_is_told_by_its_commands_and_its_controller(
    scontrol: str,
    names: tuple[str, ...],
    said: str,
    nowhere: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PATH", _programs(tmp_path, scontrol, names))
    assert doctor.main([]) == 0
    out = capsys.readouterr().out
    assert f"\nSLURM    {said}\n" in out and "submitit" in out
    _, told = ask(capsys)
    assert told["slurm"]["missing"] == [name for name in slurm_client.PROGRAMS if name not in names]
    assert told["slurm"]["answers"] is (None if not names else "controller answers" in said)
