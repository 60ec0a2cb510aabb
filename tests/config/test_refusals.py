"""Everything that is refused before anything starts: exit code 2, and a message with the field, the value and the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest
from sweeping import pth

REFUSED: list[tuple[str, list[str], list[str]]] = [
    ("text for a float", ["arm=grpo", "lr='1'"], ["lr", "'1'", "float", "without quotes"]),
    ("number for a text", ["arm=grpo", "name=5"], ["\nname: 5", "str", "quotes"]),
    ("float for an integer", ["arm=grpo", "seed=1.5"], ["seed", "1.5", "int"]),
    ("truth for a number", ["arm=grpo", "updates=true"], ["updates", "True", "int"]),
    ("null for a number", ["arm=grpo", "updates=null"], ["updates", "None"]),
    ("unknown choice", ["arm=grpo", "queue=fifo"], ["queue", "fifo", "unique_prefill, warmup"]),
    ("enum inside a group", ["arm=grpo", "kl.estimator=k4"], ["kl.estimator", "k4", "k1, k2, k3"]),
    ("unknown field", ["arm=grpo", "lrr=1"], ["lrr=1", "unknown field", "did you mean lr?"]),
    ("unknown field with +", ["arm=grpo", "+stale.lagg=1"], ["stale.lagg=1", "unknown field"]),
    ("unknown field with ++", ["arm=grpo", "++kl.coeff=1"], ["kl.coeff=1", "did you mean kl.coef?"]),
    ("unknown field in a mapping", ["arm=grpo", "kl={coeff: 1}"], ["kl"]),
    ("field of another arm", ["arm=grpo", "arm.cap=3"], ["arm.cap=3", "arm grpo has", "blocks"]),
    ("known field with +", ["arm=grpo", "+lr=1e-4"], ["lr=0.0001", "write lr=1e-4"]),
    ("a field taken away", ["arm=grpo", "~lr"], ["lr", "every run needs"]),
    ("no arm", ["seed=1"], ["arm", "grpo", "san"]),
    ("unknown arm", ["arm=gropo"], ["arm/gropo", "grpo"]),
    ("missing value", ["arm=grpo", "kl.coef=???"], ["kl.coef", "has no value", "kl.coef=..."]),
    ("negative age", ["arm=grpo", "replay_age=-1"], ["replay_age=-1", "at least 0"]),
    ("interval of nothing", ["arm=grpo", "refresh_interval=0"], ["refresh_interval=0", "at least 1"]),
    ("no updates", ["arm=grpo", "updates=0"], ["updates=0", "at least 1"]),
    ("group of one", ["arm=grpo", "responses_per_prompt=1"], ["responses_per_prompt=1", "group of one", "at least 2"]),
    ("cold sampling", ["arm=grpo", "temperature=0"], ["temperature=0", "above 0"]),
    ("infinite rate", ["arm=grpo", "lr=inf"], ["lr=inf", "finite"]),
    ("no number", ["arm=grpo", "lr=nan"], ["lr=nan", "finite"]),
    ("cap below nothing", ["arm=tis_ppo", "arm.cap=0"], ["arm.cap=0", "above 0"]),
    (
        "a constant that is not given",
        ["arm=grpo", "arm.aggregation=seq_mean_token_sum_norm"],
        ["arm.norm_tokens=null", "arm.norm_tokens='${max_response_tokens}'"],
    ),
    (
        "replay on verl",
        ["arm=grpo", "stack=verl", "replay_age=4"],
        ["replay_age=4", "no replay queue", "refresh_interval", "stack=trainer"],
    ),
    ("8 bits on verl", ["arm=grpo", "stack=verl", "optimizer=adamw_8bit"], ["optimizer.name=adamw_8bit", "optimizer=adamw"]),
    ("a norm to set on verl", ["arm=grpo", "stack=verl", "optimizer.grad_norm=set"], ["optimizer.grad_norm=set", "cannot set"]),
    ("uneven ranks", ["arm=grpo", "stack=verl", "stack.ranks=3"], ["stack.ranks=3", "64 responses"]),
    ("uneven parts", ["arm=grpo", "stack=verl", "stack.micro_batch_rows=24"], ["stack.micro_batch_rows=24", "64 responses"]),
    (
        "ranks for a loss of the whole batch",
        ["arm=m2po", "stack=verl", "stack.ranks=2"],
        ["stack.ranks=2", "arm m2po", "batch of 64 at once, not 32", "stack.ranks=1", "stack=trainer"],
    ),
    (
        "parts for a loss of the whole batch",
        ["arm=grpo,mis_geo", "stack=verl", "stack.micro_batch_rows=16"],
        ["stack.micro_batch_rows=16", "arm mis_geo", "batch of 64 at once, not 16", "arm.count_rejected=true"],
    ),
    ("a bound of nothing in parts", ["arm=mis", "arm.lower=3", "stack=verl", "stack.ranks=2"], ["arm=mis", "lower is 3"]),
    ("the trainer's field on verl", ["arm=grpo", "stack=verl", "stack.activations=micro_batch"], ["stack.activations"]),
    (
        "an override that Hydra cannot read",
        ["arm=grpo", "stack=verl", "stack.overrides=[a.b=1]"],
        ["stack.overrides=[a.b=1]", "quotes"],
    ),
    (
        "a setting of verl's that a field decides",
        ["arm=grpo", "stack=verl", 'stack.overrides=["data.seed=3"]'],
        ["stack.overrides=data.seed=3", "set seeds.data instead"],
    ),
    (
        "verl's own correction beside the arm's",
        ["arm=tis_ppo", "stack=verl", 'stack.overrides=["algorithm.rollout_correction.rollout_is=token"]'],
        ["algorithm.rollout_correction", "the arm corrects for the sampler"],
    ),
    (
        "a numbered device for verl",
        ["arm=grpo", "stack=verl", "stack.device=cuda:1"],
        ["stack.device=cuda:1", "auto, cpu or cuda"],
    ),
    ("nothing for verl", ["arm=grpo", "stack=verl", "stack.overrides=[trainer]"], ["stack.overrides=trainer", "name=value"]),
    ("a constant of nothing", ["arm=grpo", "arm.norm_tokens=0"], ["arm.norm_tokens=0", "above 0"]),
    (
        "a constant in the KL",
        ["arm=grpo", "kl.aggregation=seq_mean_token_sum_norm"],
        ["kl.aggregation=seq_mean_token_sum_norm", "rescale kl.coef", "kl.aggregation=seq_mean_token_sum,"],
    ),
    (
        "a norm that is set to nothing",
        ["arm=grpo", "optimizer.grad_norm=set", "optimizer.max_grad_norm=null"],
        ["optimizer.max_grad_norm=null", "optimizer.grad_norm=set", "optimizer.max_grad_norm=1"],
    ),
    ("nothing to skip below", ["arm=grpo", "optimizer.skip_below=0"], ["optimizer.skip_below=0", "above 0"]),
    ("KL without reference", ["arm=grpo", "model.reference=none"], ["model.reference=none", "kl.coef=0.001", "kl.coef=0"]),
    (
        "arm without reference",
        ["arm=san", "arm.needs_reference=true", "kl=none", "model.reference=none"],
        ["model.reference=none", "san", "model.reference=initial"],
    ),
    (
        "weight without sampler",
        ["arm=tis_ppo", "stack.record_sampler_logp=false"],
        ["stack.record_sampler_logp=false", "tis_ppo", "stack.record_sampler_logp=true"],
    ),
    (
        "ratio without sampler",
        ["arm=ppo_clip", "stack.record_sampler_logp=false"],
        ["stack.record_sampler_logp=false", "ppo_clip"],
    ),
    ("more test problems than there are", ["arm=grpo", "validation.problems=600"], ["validation.problems=600", "512"]),
    ("prompt without question", ["arm=grpo", "task=gsm8k", "task.prompt=hello"], ["task.prompt", "{question}"]),
    (
        "two experiments",
        ["experiment=demo,paper_trainer_table4"],
        ["experiment=demo,paper_trainer_table4", "one after the other"],
    ),
    (
        "an experiment twice",
        ["experiment=demo", "experiment=paper_trainer_table4"],
        ["two experiments", "demo", "paper_trainer_table4"],
    ),
    ("a field twice", ["arm=grpo", "lr=1e-4", "lr=2e-4"], ["lr", "1e-4 and 2e-4", "once"]),
    ("a seed twice", ["arm=grpo", "seed=0,0"], ["seed=0,0", "seed=0 twice", "once"]),
    ("interval sweep", ["arm=grpo", "lr=interval(0,1)"], ["lr", "no list of values"]),
    ("batches", ["arm=grpo", "seed=0,1", "hydra.sweeper.max_batch_size=1"], ["max_batch_size=1", "hydra.launcher.slots"]),
    (
        "batches of the stock sweeper",
        ["arm=grpo", "seed=0,1", "hydra/sweeper=basic", "hydra.sweeper.max_batch_size=1"],
        ["max_batch_size=1", "hydra.launcher.slots"],
    ),
    ("callbacks", ["arm=grpo", "+hydra.callbacks.mine._target_=my.Callback"], ["hydra.callbacks", "never be called", "leave"]),
    ("chdir", ["arm=grpo", "hydra.job.chdir=true"], ["hydra.job.chdir=true", "by its path"]),
    ("a single run's folder", ["arm=grpo", "hydra.run.dir=here"], ["hydra.run.dir=here", "hydra.sweep.dir"]),
    ("slots that are no number", ["arm=grpo", "hydra.launcher.slots=two"], ["slots=two", "whole number"]),
    ("no option of a group", ["arm=grpo", "kl=null"], ["kl=null", "fall back", "kl=none"]),
    ("no option in a sweep", ["arm=grpo", "kl=null,verl"], ["kl=null", "fall back"]),
    ("a group taken away", ["arm=grpo", "~kl"], ["kl:", "fall back", "kl=none"]),
    ("no arm at all", ["arm=null"], ["arm=null", "give arm an option"]),
    ("no name", ["arm=grpo", "name=''"], ["name=''", "folder"]),
    ("a name that is a link's", ["arm=grpo", "name=latest"], ["name='latest'"]),
    ("a name that leads elsewhere", ["arm=grpo", "name=../mine"], ["name='../mine'"]),
    ("more of GSM8K's test problems than there are", ["arm=grpo", "task=gsm8k", "validation.problems=2000"], ["2000", "1319"]),
    ("run mode", ["arm=grpo", "hydra.mode=RUN"], ["hydra.mode=RUN", "freezing launcher"]),
    ("a launcher that does not freeze", ["arm=grpo", "hydra/launcher=basic"], ["hydra/launcher=basic", "freeze", "pth_"]),
    ("a run's folder", ["arm=grpo", "hydra.sweep.subdir=mine"], ["hydra.sweep.subdir=mine", "config_id"]),
    ("own primary config", ["--config-name=mine", "arm=grpo"], ["--config-name=mine", "conf/experiment"]),
    ("own config path", ["--config-path=mine", "arm=grpo"], ["--config-path=mine", "conf/experiment"]),
    ("rerun", ["--experimental-rerun=a.pickle"], ["--experimental-rerun=a.pickle", "pth resume"]),
    ("no such folder", ["--config-dir=nowhere", "arm=grpo"], ["--config-dir=nowhere", "no such directory"]),
    ("a secret in a value", ["arm=grpo", "name=${oc.env:WANDB_API_KEY}"], ["WANDB_API_KEY", "secret", "environment"]),
    ("a secret with a default", ["arm=grpo", "name=${oc.env:HF_TOKEN,x}"], ["HF_TOKEN", "secret"]),
    ("a secret for workers", ["arm=grpo", "+hydra.job.env_set.WANDB_API_KEY=abc"], ["WANDB_API_KEY", "secret", "export"]),
    ("unset variable", ["arm=grpo", "name=${oc.env:PTH_NOT_SET}"], ["PTH_NOT_SET", "no such variable"]),
    ("interpolation into nothing", ["arm=grpo", "name=${nothing}"], ["nothing"]),
    ("slots", ["arm=grpo", "hydra.launcher.slots=0"], ["slots", "0"]),
    ("unknown extended sweep", ["arm=grpo", "design.extends=nowhere"], ["design.extends=nowhere", "directory of a sweep"]),
    ("a design that differs", ["arm=grpo", "seed=1,2", "design.gate=refuse,label"], ["design", "once, for the whole sweep"]),
]


@pytest.mark.parametrize(("arguments", "expected"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_refused_with_field_value_and_remedy(
    arguments: list[str], expected: list[str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = pth(capsys, "run", *arguments)
    assert code == 2
    assert "Traceback" not in err
    for text in expected:
        assert text in err
    assert not (here / "multirun_outputs").exists()


HEALTHY = [
    ["arm=grpo", "lr=1"],
    ["arm=grpo", "name='5'"],
    ["arm=grpo", "name='ex périment 1'"],
    ["arm=grpo", "seed=null"],
    ["arm=grpo", "kl=none", "model.reference=none"],
    ["arm=san", "stack.record_sampler_logp=false"],
    ["arm=grpo", "responses_per_prompt=2"],
    ["arm=grpo", "kl={coef: 0.5}"],
    ["arm=grpo", "task=gsm8k", "task.path=${oc.env:HOME}"],
    ["arm=grpo", "seed=null,43,44"],
    ["experiment=demo"],
    ["experiment=demo", "updates=3"],
    ["arm=grpo", "design.per_arm=[{field: lr, values: {grpo: 1e-4}, reason: why}]"],
]


@pytest.mark.parametrize("arguments", HEALTHY, ids=" ".join)
def test_healthy_controls_are_not_refused(arguments: list[str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = pth(capsys, "run", *arguments, "--dry-run")
    assert (code, err) == (0, "")
    assert not (here / "multirun_outputs").exists()


def write(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_value_that_an_experiment_sets_and_its_defaults_list_loses(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = "# @package _global_\nlr: 1.0e-5\n"
    write(here, "conf/experiment/base.yaml", base)
    mine = "# @package _global_\ndefaults:\n{}\nlr: 3.0e-4\narm:\n  clip_high: 0.3\n"
    write(here, "conf/experiment/mine.yaml", mine.format("  - _self_\n  - base"))
    code, _, err = pth(capsys, "run", "arm=grpo", "experiment=mine", "--dry-run")
    assert code == 2
    assert "lr=0.0003" in err and "1e-05" in err and "_self_" in err

    write(here, "conf/experiment/mine.yaml", mine.format("  - base\n  - _self_"))
    code, out, _ = pth(capsys, "run", "arm=grpo", "experiment=mine", "--dry-run")
    assert code == 0
    assert "lr: 0.0003" in out and "clip_high: 0.3" in out


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lr: '0.001'", ["lr", "'0.001'", "float"]),
        ("name: 5", ["\nname: 5", "str", "quotes"]),
        ("kl: {coef: '1'}", ["kl.coef", "'1'", "float"]),
        ("seed: '3'", ["seed", "'3'", "int"]),
        ("kl: {koef: 1}", ["koef"]),
        ("hydra: {callbacks: {mine: {_target_: hydra.experimental.callback.Callback}}}", ["hydra.callbacks", "mine"]),
        ("hydra: {job: {chdir: true}}", ["hydra.job.chdir"]),
        ("hydra: {mode: RUN}", ["hydra.mode"]),
        ("hydra: {job: {env_set: {SOME_TOKEN: x}}}", ["SOME_TOKEN", "secret"]),
    ],
)
def test_what_a_yaml_file_says_is_held_to_the_same_rules(
    text: str, expected: list[str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(here, "conf/experiment/mine.yaml", f"# @package _global_\n{text}\n")
    code, _, err = pth(capsys, "run", "arm=grpo", "experiment=mine", "--dry-run")
    assert code == 2
    for part in expected:
        assert part in err


def test_an_option_of_a_study_that_ours_would_hide(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(here, "conf/arm/grpo.yaml", "name: grpo\n")
    code, _, err = pth(capsys, "run", "arm=grpo", "--dry-run")
    assert code == 2
    assert "grpo.yaml" in err and "rename" in err


def test_an_arm_file_that_calls_itself_by_another_name(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(here, "conf/arm/copied.yaml", "defaults:\n  - grpo\n  - _self_\nclip_high: 0.3\n")
    code, _, err = pth(capsys, "run", "arm=copied", "--dry-run")
    assert code == 2
    assert "override-did-not-arrive" in err and "arm=copied" in err and "calls itself grpo" in err
