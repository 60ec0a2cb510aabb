"""A user's own loss, from `pth new arm` to a frozen run, and what happens when its file changes."""

from __future__ import annotations

import hashlib
import importlib
import sys
from pathlib import Path

import pytest
from sweeping import freeze_sweep, index_of, pth

from pth_exp import extensions
from pth_exp.freeze import FrozenError, load
from pth_exp.losses import registry


@pytest.fixture(autouse=True)
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test imports a study of its own, whose losses are gone after it."""
    sys.modules.pop(extensions.MODULE, None)
    monkeypatch.setattr(registry, "_ENTRIES", dict(registry._ENTRIES))


def unique(here: Path) -> str:
    """Losses register for the life of a process; each test names its own."""
    return "arm_" + hashlib.sha256(str(here).encode()).hexdigest()[:8].translate(str.maketrans("0123456789", "ghijklmnop"))


def test_new_arm_can_be_chosen_swept_and_frozen(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = unique(here)
    code, out, _ = pth(capsys, "new", "arm", name)
    assert code == 0 and f"run arm=grpo,{name}" in out
    sweep, jobs = freeze_sweep(f"arm={name}", "arm.scale=0.5,2")
    assert [row["arm"] for row in index_of(sweep)["runs"]] == [name, name]
    run = load(jobs[1].frozen)
    assert run.config.arm.parameters() == {"scale": 2.0}
    study = run.inputs["study"]
    assert study["path"] == str(here)
    assert study["files"]["my_losses.py"] == hashlib.sha256((here / "my_losses.py").read_bytes()).hexdigest()
    assert set(study["files"]) == {"my_losses.py", f"conf/arm/{name}.yaml"}


def test_its_loss_is_what_its_equation_says(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    from pth_exp.losses import TokenBatch, get_loss

    name = unique(here)
    pth(capsys, "new", "arm", name)
    extensions.arms_here(here)
    batch = TokenBatch(
        logp=torch.tensor([[-1.0, -2.0], [-3.0, -9.0]], requires_grad=True),
        advantage=torch.tensor([1.0, -0.5]),
        mask=torch.tensor([[True, True], [True, False]]),
    )
    out = get_loss(name, scale=2.0)(batch)
    assert out.loss.item() == pytest.approx((2 * 1 * 3 + 2 * -0.5 * 3) / 2)
    assert out.token_coef.tolist() == [[1.0, 1.0], [-0.5, 0.0]]


def test_editing_the_loss_after_freezing_is_refused_naming_both_hashes(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = unique(here)
    pth(capsys, "new", "arm", name)
    _, jobs = freeze_sweep(f"arm={name}")
    before = hashlib.sha256((here / "my_losses.py").read_bytes()).hexdigest()
    (here / "my_losses.py").write_text((here / "my_losses.py").read_text() + "# edited\n")
    after = hashlib.sha256((here / "my_losses.py").read_bytes()).hexdigest()
    run = load(jobs[0].frozen)
    assert run.run["label"] == name, "records stay readable"
    with pytest.raises(FrozenError) as error:
        _ = run.config
    assert before in str(error.value) and after in str(error.value)


def test_editing_the_yaml_after_freezing_changes_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = unique(here)
    pth(capsys, "new", "arm", name)
    _, jobs = freeze_sweep(f"arm={name}")
    (here / "conf" / "arm" / f"{name}.yaml").write_text("scale: 7\n")
    assert load(jobs[0].frozen).config.arm.parameters() == {"scale": 1.0}


def test_a_second_arm_joins_the_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = unique(here), unique(here / "x")
    assert pth(capsys, "new", "arm", first)[0] == 0
    assert pth(capsys, "new", "arm", second)[0] == 0
    assert {first, second} <= set(extensions.arms_here(here))


@pytest.mark.parametrize("name", ["grpo", "My-Loss", "class", "2fast"])
def test_names_that_cannot_be_used(name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = pth(capsys, "new", "arm", name)
    assert code == 2 and name in err and "remedy" in err
    assert list(here.iterdir()) == []


def test_nothing_of_the_user_s_is_overwritten(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = unique(here)
    pth(capsys, "new", "arm", name)
    text = (here / "my_losses.py").read_text()
    assert pth(capsys, "new", "arm", name)[0] == 2
    assert (here / "my_losses.py").read_text() == text


def test_every_file_of_a_plug_in_package_is_frozen(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = unique(here)
    (here / name).mkdir()
    (here / name / "__init__.py").touch()
    (here / name / "arms.py").write_text("from .inner import ARMS\n")
    (here / name / "inner.py").write_text("ARMS = {}\n")
    monkeypatch.syspath_prepend(str(here))
    module = importlib.import_module(f"{name}.arms")
    monkeypatch.setattr(extensions, "plugin_modules", lambda: {name: module})
    inputs = extensions.hashes(here)
    extensions.arms_of(inputs)
    (here / name / "inner.py").write_text("ARMS = {}  # another loss\n")
    changed = extensions.hashes(here)["plugins"][name]
    with pytest.raises(ValueError, match=f"{name} was frozen with sha256 {inputs['plugins'][name]}, now is {changed}"):
        extensions.arms_of(inputs)


def test_a_checkout_of_the_project_is_no_study(here: Path) -> None:
    checkout = Path(extensions.__file__).parents[1]
    if extensions.is_checkout(checkout):
        assert extensions.find_study(checkout) is None
    (here / "conf").mkdir()
    assert extensions.find_study(here) == extensions.Study(here)
    (here / "pth_exp").mkdir()
    (here / "pth_exp" / "worker.py").touch()
    assert extensions.find_study(here) is None


def test_in_a_checkout_a_folder_is_made_for_the_study(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "pth_exp").mkdir()
    (here / "pth_exp" / "worker.py").touch()
    code, out, _ = pth(capsys, "new", "arm", unique(here))
    assert code == 0 and "cd my_study && " in out and (here / "my_study" / "my_losses.py").is_file()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import nothing_of_this_name\n", ["my_losses.py", "nothing_of_this_name", "repair"]),
        ("ARMS = {'grpo': object}\n", ["grpo", "exists already"]),
        ("ARMS = {'mine': object}\n", ["mine", "pth_exp.schema.Arm"]),
    ],
)
def test_a_study_that_cannot_be_used(text: str, expected: list[str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "my_losses.py").write_text(text)
    code, _, err = pth(capsys, "run", "arm=grpo", "--dry-run")
    assert code == 2 and "Traceback" not in err
    for part in expected:
        assert part in err


@pytest.mark.slow
def test_new_arm_trains(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    import json
    import subprocess

    name = unique(here)
    small = "updates=2 prompts_per_update=2 responses_per_prompt=2 max_response_tokens=8 validation.every=null"
    pth_command = [sys.executable, "-m", "pth_exp.cli"]
    subprocess.run([*pth_command, "new", "arm", name], check=True, timeout=60)
    done = subprocess.run([*pth_command, "run", f"arm=grpo,{name}", *small.split()], timeout=300)
    assert done.returncode == 0
    runs = sorted((here / "multirun_outputs" / "latest").glob("0*"))
    assert len(runs) == 2
    for run in runs:
        rows = [json.loads(line) for line in (run / "updates.0001.jsonl").read_text().splitlines()]
        assert [row["update"] for row in rows] == [0, 1]
