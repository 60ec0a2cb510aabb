"""The frozen file: what is written reads back as the same values, and nothing of it or of its inputs can change unseen."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from sweeping import freeze_sweep, index_of

from pth_exp import freeze, schema, sections
from pth_exp.freeze import FrozenError, canonical, config_id, load, verify_inputs

INPUTS = {"source": "a" * 64, "data": "d" * 64, "model": "e" * 64, "tokenizer": "f" * 64, "study": None, "plugins": {}}

floats = st.floats(allow_nan=False, allow_infinity=False)
plain = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), floats, st.text("ab1é:# '\"-.e~", max_size=6)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text("abe1-_.", min_size=1, max_size=4), inner, max_size=3)
    ),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    """Equal in value and in type, so that 1, 1.0, true and -0.0 are four things."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b and (not isinstance(a, float) or math.copysign(1, a) == math.copysign(1, b))


@given(plain)
def test_yaml_reads_back_the_very_same_values(value: Any) -> None:
    assert same(yaml.safe_load(sections.dump({"value": value})), {"value": value})


@given(st.dictionaries(st.text("abc", min_size=1, max_size=3), plain, max_size=4), st.randoms())
def test_canonical_form_does_not_depend_on_the_order_of_keys(values: dict[str, Any], random: Any) -> None:
    keys = list(values)
    random.shuffle(keys)
    assert canonical({k: values[k] for k in keys}) == canonical(values)
    assert same(json.loads(canonical(values)), values)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_canonical_form_refuses_what_json_cannot_say(value: float) -> None:
    with pytest.raises(ValueError):
        canonical({"lr": value})


def frozen_file(*overrides: str) -> Path:
    _, jobs = freeze_sweep(*(overrides or ("arm=grpo",)))
    return jobs[0].frozen


def test_a_frozen_run_reads_back_typed(here: Path) -> None:
    run = load(frozen_file("arm=tis_ppo", "seed=3", "lr=1e-5", "arm.cap=4"))
    assert (
        run.sha256 == hashlib.sha256(run.path.read_bytes()).hexdigest() == (run.path.parent / "frozen.sha256").read_text().strip()
    )
    config = run.config
    assert isinstance(config.arm, schema.TisPpoArm) and isinstance(config.task, schema.ArithmeticTask)
    assert (config.arm.cap, config.lr, config.seeds.data, config.seeds.eval) == (4.0, 1e-5, 3, 0)
    assert config.arm.parameters() == {
        "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0, "aggregation": schema.Aggregation.token_mean,
        "norm_tokens": None, "cap": 4.0,
    }  # fmt: skip
    assert run.run["overrides"] == ["arm=tis_ppo", "seed=3", "lr=1e-5", "arm.cap=4"]


def test_seed_null_concerns_the_data_order_only(here: Path) -> None:
    seeds = load(frozen_file("arm=grpo", "seed=null")).config.seeds
    assert (seeds.data, seeds.sampling, seeds.init, seeds.eval) == (None, 0, 0, 0)


@pytest.mark.parametrize("position", [0, 100, -2])
def test_one_byte_edited_is_refused_naming_both_hashes(position: int, here: Path) -> None:
    path = frozen_file()
    data = bytearray(path.read_bytes())
    before = hashlib.sha256(data).hexdigest()
    data[position] ^= 1
    path.write_bytes(data)
    after = hashlib.sha256(data).hexdigest()
    for expected in (None, before):
        with pytest.raises(FrozenError) as error:
            load(path, expected)
        assert before in str(error.value) and after in str(error.value) and "pth run" in str(error.value)


def test_a_file_and_its_hash_edited_together_do_not_pass_for_the_launcher_s_hash(here: Path) -> None:
    path = frozen_file()
    launched = load(path).sha256
    path.write_text(path.read_text().replace("lr: 0.0002", "lr: 0.0003"))
    (path.parent / "frozen.sha256").write_text(hashlib.sha256(path.read_bytes()).hexdigest() + "\n")
    with pytest.raises(FrozenError, match=launched):
        load(path, launched)
    with pytest.raises(FrozenError, match="config_id"):
        verify_inputs(load(path))


def test_a_missing_hash_is_no_pass(here: Path) -> None:
    path = frozen_file()
    (path.parent / "frozen.sha256").unlink()
    with pytest.raises(FrozenError, match=r"frozen\.sha256"):
        load(path)


@pytest.mark.parametrize("name", ["source", "data", "model", "tokenizer"])
def test_a_changed_input_is_refused_naming_both_hashes(name: str, here: Path) -> None:
    run = load(frozen_file())
    verify_inputs(run)
    was = run.inputs[name]
    run.inputs[name] = "0" * 64
    with pytest.raises(FrozenError) as error:
        verify_inputs(run)
    assert name in str(error.value) and "0" * 64 in str(error.value) and was in str(error.value)


def test_source_hash_is_of_what_a_worker_executes(tmp_path: Path) -> None:
    for name in ("a.py", "losses/b.py", "launchers/c.py", "conf/d.py", "readme.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("1")
    first = freeze.source_hash(tmp_path)
    for name in ("launchers/c.py", "conf/d.py", "readme.txt"):
        (tmp_path / name).write_text("2")
    assert freeze.source_hash(tmp_path) == first
    (tmp_path / "losses/b.py").write_text("2")
    assert freeze.source_hash(tmp_path) != first


# ------------------------------------------------------------------------------------------------------------ identity


def config_of(*overrides: str) -> schema.Config:
    return load(frozen_file(*overrides)).config


def test_identity_is_the_hash_of_science_and_contents_worked_out_by_hand(here: Path) -> None:
    fields: dict[str, Any] = {
        "arm.name": "san", "arm.loss": "san", "arm.old_policy": "recomputed", "arm.correction": "behaviour_free",
        "arm.needs_reference": False, "arm.needs_sampler_logp": False, "arm.advantage": "group_std",
        "stack.name": "trainer", "stack.record_sampler_logp": True,
        "task.name": "arithmetic", "task.cut_at": [], "task.train_after_cut": True, "task.chat_template": "never",
        "task.train_problems": 4096,
        "task.test_problems": 512, "task.min_steps": 4, "task.max_steps": 5, "task.max_operand": 5, "task.problem_seed": 0,
        "model.dtype": "float32", "model.reference": "initial",
        "optimizer.name": "adamw", "optimizer.beta1": 0.9, "optimizer.beta2": 0.999, "optimizer.eps": 1e-8,
        "optimizer.weight_decay": 0.01, "optimizer.grad_norm": "clip", "optimizer.max_grad_norm": 1.0,
        "optimizer.skip_below": 1e-6, "optimizer.steps_per_batch": 1,
        "kl.coef": 0.001, "kl.estimator": "k3", "kl.clamp": 10.0, "kl.aggregation": "token_mean",
        "validation.every": 10, "validation.problems": 256, "probe.first_batches": 8,
        "seeds.data": 0, "seeds.sampling": 0, "seeds.init": 0, "seeds.eval": 0,
        "seed": 0, "lr": 0.0002, "refresh_interval": 1, "replay_age": 0, "queue": "unique_prefill", "updates": 100,
        "prompts_per_update": 8, "responses_per_prompt": 8, "max_prompt_tokens": 64, "max_response_tokens": 56,
        "temperature": 1.0,
        "inputs.data": "d" * 64, "inputs.model": "e" * 64, "inputs.tokenizer": "f" * 64,
    }  # fmt: skip
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    assert config_id(config_of("arm=san"), INPUTS) == hashlib.sha256(text.encode()).hexdigest()


SAME = ["stack.threads=4", "stack.device=cpu", "stack.checkpoint_every=7", "arm.label=other", "name=other", "design.gate=label"]
OTHER = ["lr=3e-4", "seed=1", "seeds.data=5", "arm.clip_high=0.3", "kl.clamp=null", "queue=warmup", "task.problem_seed=1"]


def test_identity_knows_science_from_execution(here: Path) -> None:
    first = config_id(config_of(), INPUTS)
    assert {config_id(config_of("arm=grpo", o), INPUTS) for o in SAME} == {first}
    different = {config_id(config_of("arm=grpo", o), INPUTS) for o in OTHER}
    assert len(different) == len(OTHER) and first not in different
    assert config_id(config_of(), {**INPUTS, "model": "0" * 64}) != first


def test_identity_is_the_same_on_another_machine_with_the_data_elsewhere(here: Path) -> None:
    for folder in ("one", "two"):
        (here / folder).mkdir()
        for split, count in (("train", 7473), ("test", 1319)):
            rows = [
                json.dumps({"question": f"{split} {i}?", "answer": f"#### {i}"}) for i in range(count)
            ]  # as many as GSM8K has
            (here / folder / f"{split}.jsonl").write_text("\n".join(rows) + "\n")
    arguments = ("arm=grpo", "task=gsm8k", "max_prompt_tokens=256", "prompts_per_update=1", "validation.every=null")
    ids = [load(frozen_file(*arguments, f"task.path={here / f}")).config_id for f in ("one", "two")]
    assert ids[0] == ids[1]
    train = here / "two" / "train.jsonl"
    train.write_text(train.read_text().replace("train 7?", "train seven?"))
    assert load(frozen_file(*arguments, f"task.path={here / 'two'}")).config_id != ids[0]


# ---------------------------------------------------------------------------------------------------- what was resolved


def test_environment_is_read_once_and_carried(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PTH_TEST_NAME", "first")
    run = load(frozen_file("arm=grpo", "name=${oc.env:PTH_TEST_NAME}", "+hydra.job.env_set.TOKENIZERS_PARALLELISM='false'"))
    monkeypatch.setenv("PTH_TEST_NAME", "second")
    assert run.config.name == "first"
    assert run.environment == {"TOKENIZERS_PARALLELISM": "false"}


def test_index_names_every_run_by_its_hash(here: Path) -> None:
    sweep, jobs = freeze_sweep("arm=grpo,san", "seed=1,2")
    rows = index_of(sweep)["runs"]
    assert [row["frozen_sha256"] for row in rows] == [job.sha256 for job in jobs]
    assert [load(sweep / row["dir"] / "frozen.yaml", row["frozen_sha256"]).config_id for row in rows] == [
        r["config_id"] for r in rows
    ]
