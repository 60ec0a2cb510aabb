"""One contract, two stacks: a step on the same batch from the same weights comes to the same on the trainer and on verl.

Each stack answers in its own interpreter (``contract_trainer.py``, ``contract_verl.py``) to the table of ``contract_cases.py``;
the answers are compared here. What is expected of either is the other's answer, and the equation of the arm.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from contract_cases import SEEDS, Answer, Case, cases

from pth_exp.verl_stack.switch import SWITCH

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

HERE = Path(__file__).parent
CASES = cases()
NATS, RELATIVE, WEIGHTS = 1e-5, 1e-5, 1e-6
"""Tolerances: of log-probabilities and losses; of gradients and metrics, over the largest element; of weights after a step."""
ROUGH = {"san_ref", "san_ref_written"}
"""These weigh by a quotient of surprisals that both may be near 0, where rounding of 1e-6 nats is a part in a thousand of them:
their gradients are held to 1e-5 as they are, not over the largest."""


@dataclass(frozen=True)
class Answers:
    trainer: Path
    verl: Path


@pytest.fixture(scope="module")
def answers(verl_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    folder = tmp_path_factory.mktemp("contract")
    own = {**os.environ, "OMP_NUM_THREADS": "1"}
    verl = own | {SWITCH: "1", "VERL_PLATFORM": "cpu", "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    trainer_driver, verl_driver = str(HERE / "contract_trainer.py"), str(HERE / "contract_verl.py")
    inputs, found = folder / "inputs", Answers(folder / "trainer", folder / "verl")
    inputs.mkdir()
    _done(_start([sys.executable, trainer_driver, str(inputs)], own, folder / "inputs.log"))
    one = _start([str(verl_python), verl_driver, str(inputs), str(found.verl), "0", "1"], verl, folder / "verl.log")
    _done(_start([sys.executable, trainer_driver, str(inputs), str(found.trainer)], own, folder / "trainer.log"))
    _done(one)
    ranks = [[str(verl_python), verl_driver, str(inputs), str(found.verl), str(rank), "2"] for rank in (0, 1)]
    pair = [_start(command, verl, folder / f"rank{rank}.log") for rank, command in enumerate(ranks)]
    for process in pair:
        _done(process)
    return found


@dataclass(frozen=True)
class _Process:
    process: subprocess.Popen[bytes]
    log: Path


def _start(command: list[str], environment: dict[str, str], log: Path) -> _Process:
    with log.open("wb") as output:
        return _Process(subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT), log)


def _done(started: _Process) -> None:
    assert started.process.wait(timeout=2400) == 0, started.log.read_text()[-4000:]


def differences(case: Case, expected: Answer, found: Answer) -> dict[str, float]:
    """What is farther apart than it may be, and by how much."""
    rough = case.arm in ROUGH
    assert expected.arrays.keys() == found.arrays.keys() and expected.row.keys() == found.row.keys()
    far: dict[str, float] = {}
    for name, value in expected.arrays.items():
        assert value.shape == found.arrays[name].shape and np.isfinite(value).all(), name
        error = float(np.abs(value - found.arrays[name]).max())
        if name.startswith("weights/"):
            bound = 10 * WEIGHTS if rough else WEIGHTS
        elif name in ("logp", "old_logp", "ref_logp", "advantage"):
            bound = NATS
        else:
            whole = [v for k, v in expected.arrays.items() if k.split("/")[0] == name.split("/")[0]]
            bound = NATS if rough else RELATIVE * max(float(np.abs(v).max()) for v in whole)
        if not error <= bound:
            far[name] = error
    for name, value in expected.row.items():
        other = found.row[name]
        if isinstance(value, float) and isinstance(other, float):
            near = 1e-3 if rough and not name.endswith("loss") else RELATIVE
            if not abs(value - other) <= near * max(1.0, abs(value)) and not name.startswith("backward/"):
                far[name] = abs(value - other)
        elif name not in ("sampler/fingerprint", "backward/worst", "backward/norm_ratio", "backward/response_norm_ratio"):
            same = value == other if not isinstance(value, list) else np.allclose(value, other, rtol=RELATIVE, atol=NATS)
            if not same:
                far[f"{name}: {value} and {other}"] = np.inf
    return far


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_step_is_the_same_on_both_stacks(answers: Answers, case: Case) -> None:
    """Prompts, log-probabilities, advantages, loss, metrics, gradients, norm, and the weights after the step."""
    expected, found = Answer.load(answers.trainer, case.alone.name), Answer.load(answers.verl, case.name)
    assert differences(case, expected, found) == {}


@pytest.mark.parametrize("case", [case for case in CASES if case.ranks > 1], ids=lambda case: case.name)
def test_two_ranks_come_to_what_one_does(answers: Answers, case: Case) -> None:
    assert differences(case, Answer.load(answers.verl, case.alone.name), Answer.load(answers.verl, case.name)) == {}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_backward_pass_is_the_equations(answers: Answers, case: Case) -> None:
    """Of the arm and of the penalty, evaluated in float64 apart from the losses."""
    for answer in (Answer.load(answers.trainer, case.alone.name), Answer.load(answers.verl, case.name)):
        assert max(answer.row["backward/value_error"], answer.row["backward/gradient_error"]) < 1e-6


def test_the_batch_shows_what_it_should(answers: Answers) -> None:
    """Unequal responses, some of them cut; two groups of equal rewards; a sampler, an old policy and a reference of their own."""
    answer = Answer.load(answers.verl, "ppo_clip")
    lengths = (answer.arrays["logp"] != 0).sum(axis=1)
    assert 0 < answer.row["response_length/clip_ratio"] < 1 and len(set(lengths.tolist())) > 3
    advantage = answer.arrays["advantage"].reshape(4, 4)
    assert (advantage[:2] == 0).all() and (advantage[2:] != 0).all()
    assert answer.row["actor/kl_loss"] > 1e-4 and answer.row["actor/pg_clipfrac"] > 0.01
    assert {Answer.load(answers.verl, case.name).row["actor/grad_clipped"] for case in CASES} == {True, False}


def test_both_stacks_draw_the_same_prompts(answers: Answers) -> None:
    """With each seed, and with none, over the end of an epoch: out of verl's own loader and sampler."""
    expected, found = (json.loads((folder / "prompts.json").read_text()) for folder in (answers.trainer, answers.verl))
    assert found == expected and len(found) == len(SEEDS)
    assert len({json.dumps(drawn) for drawn in found}) == len(SEEDS), "each seed has an order of its own"
