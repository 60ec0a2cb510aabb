"""`pth equations`: what it prints, and that it reads the YAML as Hydra does."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pth_exp import cli, schema
from pth_exp.armfiles import arm_paths, read_arm

BUILT_IN = sorted(path.stem for path in arm_paths(Path("/")).values())


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_an_arm_with_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["equations", "tis_ppo"]) == 0
    out = capsys.readouterr().out
    for part in [
        "tis_ppo: TIS (PPO)",
        "tis_ppo.yaml:",
        "    w       = min(exp(clip(log π_old - log q, -20, 20)), cap)\n",
        "correction: weight",
        "π_old: the learner, recomputed at the start of the update",
        "q: the sampler",
        "dual_clip=3, aggregation=token_mean, norm_tokens=null, cap=2",
    ]:
        assert part in out
    assert "grpo:" not in out and "KL penalty" not in out


def test_without_names_every_arm_and_the_penalty(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["equations"]) == 0
    out = capsys.readouterr().out
    for name in BUILT_IN:
        assert f"\n{name}: " in "\n" + out
    assert "estimate = exp(x) - 1 - x" in out


def test_latex(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["equations", "san", "grpo", "--latex"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("% san: SAN\n\\[\n\\begin{aligned}\n") and out.count(r"\end{aligned}") == 2


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["equations", "san", "ppo_clip", "--json"]) == 0
    san, ppo = json.loads(capsys.readouterr().out)
    assert (san["name"], san["label"], san["parameters"], san["inputs"]) == ("san", "SAN", {}, ["advantage", "logp"])
    assert Path(san["path"]).read_text().splitlines()[san["line"] - 1] == "equation: |"
    assert (ppo["old_policy"], ppo["correction"], ppo["parameters"]["clip_low"]) == ("sampler", "ratio", 0.2)
    assert "self-anchored" in san["about"].lower() and san["equation"].startswith("l = -logp\n")


def test_an_unknown_arm(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["equations", "grpp"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "did you mean grpo?" in captured.err and "choose one of" in captured.err


def option(here: Path, text: str) -> None:
    (here / "conf" / "arm").mkdir(parents=True)
    (here / "conf" / "arm" / "mine.yaml").write_text(text)


def test_an_arm_of_a_study_that_inherits(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields = "name: mine\nlabel: Mine\nclip_high: 3e-4\nnorm_tokens: ${max_response_tokens}\n"
    option(here, f"# Narrow.\ndefaults: [ppo_clip, _self_]\n{fields}")
    assert cli.main(["equations", "mine"]) == 0
    out = capsys.readouterr().out
    assert "mine: Mine  conf/arm/mine.yaml:1\n  Narrow.\n" in out
    assert "clip_low=0.2, clip_high=0.0003, dual_clip=3, aggregation=token_mean, norm_tokens=max_response_tokens" in out
    assert "π_old: the sampler" in out


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "defaults: [grpo, _self_]\nequation: |\n  l = -logp\n  loss = l +\n",
            ["mine.yaml:4", "line 2, column 11", "arm.equation"],
        ),
        ("defaults: [grpo, _self_]\nclip_hihg: 1\n", ["arm.clip_hihg", "did you mean clip_high?"]),
        ("defaults: [nothing, _self_]\n", ["defaults=nothing", "mine.yaml"]),
        ("defaults: [mine, _self_]\n", ["defaults=mine"]),
        ("defaults: [/schema/arm/nothing@_here_]\n", ["no such loss"]),
        ("loss: nothing\n", ["names no known loss", "grpo"]),
        ("a: [\n", ["mine.yaml", "is not YAML"]),
    ],
)
def test_a_file_that_cannot_be_read(text: str, expected: list[str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    option(here, text)
    assert cli.main(["equations", "mine"]) == 2
    err = capsys.readouterr().err
    for part in [*expected, "remedy: "]:
        assert part in err


def test_an_arm_without_an_equation(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    option(here, "defaults: [grpo, _self_]\nequation: null\n")
    assert cli.main(["equations", "mine"]) == 0
    assert "no equation: check 4 cannot judge this loss" in capsys.readouterr().out


def test_what_is_read_is_what_hydra_composes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", f"arm={','.join(BUILT_IN)}", "--cfg", "job"]) == 0
    composed = {}
    for document in capsys.readouterr().out.split("# run ")[1:]:
        arm = yaml.safe_load(document.split("\n", 1)[1])["arm"]
        composed[arm["name"]] = arm
    for name in BUILT_IN:
        read = dataclasses.asdict(read_arm(name, Path.cwd()).arm)
        norm = composed[name].get("norm_tokens")
        assert read == composed[name] | ({"norm_tokens": norm.strip("${}")} if isinstance(norm, str) else {})
        assert type(read_arm(name, Path.cwd()).arm) is schema.BUILTIN_ARMS[read["loss"]]


def test_neither_torch_nor_hydra_is_loaded() -> None:
    heavy = "{'torch', 'hydra', 'omegaconf', 'transformers'}"
    code = f"import sys; from pth_exp import cli; cli.main(['equations']); print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
