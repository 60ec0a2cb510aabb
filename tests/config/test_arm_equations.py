"""An arm whose equation cannot be held against its loss is refused when a sweep is composed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from sweeping import freeze_sweep, pth

from pth_exp.freeze import load


def arm(here: Path, equation: str, base: str = "grpo", **fields: object) -> None:
    """A study's arm with an equation of its own."""
    path = here / "conf" / "arm" / "mine.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump({"defaults": [base, "_self_"], "name": "mine", "equation": equation, **fields}))


@pytest.mark.parametrize(
    ("equation", "base", "expected"),
    [
        ("l = -logp\nloss = mean(mean(l)", "grpo", ["line 2", "never closed"]),
        ("loss = mean(mean(logp)) * capp", "tis_ppo", ["line 1, column 27", "capp", "did you mean cap?"]),
        ("loss = mean(mean(logp)) * cap", "grpo", ["line 1, column 27", "cap is not known", "clip_high"]),
        ("loss = aggregate(logp)", "san", ["line 1, column 8", "aggregation, a parameter that the arm has not"]),
        ("r = 1\nloss = aggregate(r * ref_logp)", "grpo", ["line 2, column 22", "ref_logp", "needs_reference: true"]),
        ("loss = aggregate(sampler_logp * logp)", "grpo", ["line 1, column 18", "sampler_logp", "needs_sampler_logp: true"]),
        ('loss = reference("nothing")', "grpo", ["'nothing'", "registered"]),
        ("loss = __import__('os').system('touch owned')", "grpo", ["line 1, column 8", "only a function of the language"]),
    ],
)
def test_is_refused_with_field_place_and_remedy(
    equation: str, base: str, expected: list[str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arm(here, equation, base)
    code, _, err = pth(capsys, "run", "arm=mine", "--dry-run")
    assert code == 2
    for part in ["arm.equation: ", "remedy: ", *expected]:
        assert part in err
    assert not (here / "owned").exists()


def test_what_the_arm_declares_to_need_can_be_read(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arm(here, "loss = aggregate(ref_logp * sampler_logp * logp)", needs_reference=True, needs_sampler_logp=True)
    assert pth(capsys, "run", "arm=mine", "--dry-run")[0] == 0


def test_null_says_that_there_is_no_equation(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "conf" / "arm").mkdir(parents=True)
    (here / "conf" / "arm" / "mine.yaml").write_text("defaults: [grpo, _self_]\nname: mine\nequation: null\n")
    assert pth(capsys, "run", "arm=mine", "--dry-run")[0] == 0


def test_a_frozen_file_keeps_the_equation_as_lines() -> None:
    _, jobs = freeze_sweep("arm=san")
    text = jobs[0].frozen.path.read_text() if hasattr(jobs[0].frozen, "path") else Path(jobs[0].frozen).read_text()
    assert "    equation: |\n      l = -logp\n      level = max(sg(l), 0)\n" in text
    equation = load(jobs[0].frozen).config.arm.equation
    assert equation is not None and equation.endswith("loss = mean(A * S_rob / max(sg(S_rob), 1e-6))\n")


def test_refusing_needs_no_torch(here: Path) -> None:
    arm(here, "loss = 1 +")
    code = "import sys; from pth_exp import cli; cli.main(['run', 'arm=mine', '--dry-run']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "False" and "arm.equation" in done.stderr
