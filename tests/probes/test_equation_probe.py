"""Check 4's measurement: healthy for every shipped arm, and a scale, a sign, a direction or a value that is off is seen."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from shipped import NAMES, shipped

from pth_exp.equations import Evaluation, WrittenBatch, evaluate, parse
from pth_exp.losses import BoundLoss, Loss, TokenBatch, get_loss, kl_penalty
from pth_exp.losses.types import LossOutput
from pth_exp.probes import is_due, probe_backward, probe_equation
from pth_exp.probes.equation import compare
from pth_exp.probes.inputs import fixed_inputs, random_inputs
from pth_exp.probes.likeness import Differences
from pth_exp.schema import Aggregation, Arm, KlConfig, KlEstimator

TIS = "w = sg(min(exp(clip(logp - sampler_logp, -20, 20)), cap))\nloss = aggregate(-A * w * logp)"


def bound(arm: Arm) -> BoundLoss:
    return get_loss(arm.loss, **arm.parameters())


def probed(arm: Arm, loss: Loss | None = None) -> dict[str, Any]:
    return probe_equation(arm, loss or bound(arm))


@pytest.mark.parametrize("name", NAMES)
def test_every_shipped_arm_is_its_equation(name: str) -> None:
    row = probed(shipped(name))
    assert row.get("not_measured") is None
    assert max(row["float64/value_error"], row["float64/gradient_error"]) < 1e-12
    assert max(row["float32/value_error"], row["float32/gradient_error"]) < 1e-5
    assert row["float64/response_cosine"] > 1 - 1e-12
    assert (row["inputs"], row["responses"]) == (25, 222)


@pytest.mark.parametrize("name", ["san", "grpo"])
def test_a_loss_that_takes_a_part_for_the_whole_is_seen(name: str) -> None:
    """On one machine nothing shows: a stack that hands it micro-batches weighs each as if it were the batch."""
    right = bound(shipped(name))
    wrong = dataclasses.replace(right, function=lambda b, **p: right.function(dataclasses.replace(b, totals=None), **p))
    row = probed(shipped(name), wrong)
    assert row["float64/gradient_error"] > 0.1
    assert row["float64/worst"]["input"].endswith("in parts")
    assert row["float32/gradient_error"] < 1e-5, "which takes the batch as one"


@pytest.mark.parametrize("name", [n for n in NAMES if "aggregation" in shipped(n).parameters()])
@pytest.mark.parametrize("aggregation", list(Aggregation))
def test_parameters_are_the_frozen_ones(name: str, aggregation: Aggregation) -> None:
    arm = shipped(name, aggregation=aggregation, norm_tokens=40.0)
    assert probed(arm)["float64/gradient_error"] < 1e-12
    other = dataclasses.replace(arm, norm_tokens=41.0)  # type: ignore[call-arg]
    off = probed(arm, bound(other))["float64/gradient_error"]
    assert (off > 1e-3) == (aggregation is Aggregation.seq_mean_token_sum_norm)


def test_the_papers_fault_is_seen() -> None:
    """Section 4.4: the code divides by the anchor mass, or by the reference's mean surprisal, the draft by S_rob."""
    for name in ("san_plus", "san_ref"):
        row = probed(shipped(f"{name}_written", loss=name))
        assert row["float64/gradient_error"] > 0.1
        assert row["float64/response_cosine"] > 1 - 1e-12, "the direction within a response is the written one"
        assert row["float64/cosine"] < 0.99
        low, high = row["float64/response_norm_ratio"]
        assert low < 0.5 and (high > 1.5 or name == "san_plus")  # the anchor mass is never below sum w l


def test_with_learner_and_reference_alike_the_two_forms_of_san_ref_agree() -> None:
    """Which is why the inputs keep them apart."""
    arm = shipped("san_ref_written", loss="san_ref")
    equation = parse(str(arm.equation), arm.parameters())
    alike = [given for given in fixed_inputs() if given.name == "all policies equal"]
    assert compare(bound(arm), equation, arm, alike, torch.float64).gradient_error < 1e-12
    others = [given for given in fixed_inputs() if given not in alike]
    assert compare(bound(arm), equation, arm, others, torch.float64).gradient_error > 0.1


WRONG = {
    "a scale": (TIS.replace("-A", "-A * 3"), 2 / 3, (1 / 3, 1 / 3), 1.0),
    "a sign": (TIS.replace("-A", "A"), 2.0, (1.0, 1.0), -1.0),
}


@pytest.mark.parametrize(("equation", "error", "ratio", "cosine"), WRONG.values(), ids=WRONG.keys())
def test_scale_and_sign(equation: str, error: float, ratio: tuple[float, float], cosine: float) -> None:
    row = probed(shipped("tis_reinforce", equation=equation))
    assert row["float64/gradient_error"] == pytest.approx(error)
    assert row["float64/response_norm_ratio"] == pytest.approx(ratio)
    assert row["float64/norm_ratio"] == pytest.approx(ratio)
    assert row["float64/cosine"] == pytest.approx(cosine)


@pytest.mark.parametrize(
    "equation",
    [
        TIS.replace("20, 20", "10, 10"),  # a clamp
        TIS.replace("aggregate(-A * w * logp)", "mean(mean(-A * w * logp))"),  # 1/T
        TIS.replace("cap)", "cap + 1e-4)"),
        TIS.replace("sg(", "("),  # a missing stop-gradient
        "loss = aggregate(-A * logp)",
    ],
)
def test_other_differences_are_far_above_the_tolerance(equation: str) -> None:
    assert probed(shipped("tis_reinforce", equation=equation))["float64/gradient_error"] > 2e-5


def test_a_value_may_be_off_alone() -> None:
    row = probed(shipped("tis_reinforce", equation=TIS + " + 0.125"))
    assert row["float64/gradient_error"] < 1e-12 < 1e-3 < row["float64/value_error"]


def altered(loss: Loss, change: Any) -> Loss:
    def call(batch: TokenBatch) -> LossOutput:
        out = loss(batch)
        return LossOutput(out.loss, change(out.token_coef), out.metrics)

    return call


def test_no_number_is_no_small_error() -> None:
    arm = shipped("san")
    row = probed(arm, altered(bound(arm), lambda coef: coef * float("nan")))
    assert row["float64/gradient_error"] == math.inf
    row = probed(arm, altered(bound(arm), lambda coef: coef + 1e-3))  # also where A = 0, and nothing was expected
    assert row["float64/gradient_error"] > 1e3


def test_the_worst_input_and_response_are_named() -> None:
    def third_off(coef: torch.Tensor) -> torch.Tensor:
        return torch.cat([coef[:1] * 1.5, coef[1:]]) if coef.shape == (4, 5) else coef

    arm = shipped("san")
    row = probed(arm, altered(bound(arm), third_off))
    assert row["float64/worst"] == {"input": "policies apart", "response": 0, "tokens": 1}
    assert row["float64/gradient_error"] == pytest.approx(0.5)


def test_a_fault_of_long_responses_alone_is_seen() -> None:
    def longer_twice(batch: TokenBatch) -> LossOutput:
        weight = 1.0 + (batch.mask.sum(dim=1) > 512)
        return bound(arm)(dataclasses.replace(batch, advantage=batch.advantage * weight))

    arm = shipped("tis_reinforce")
    row = probed(arm, longer_twice)
    assert row["float64/gradient_error"] == pytest.approx(1.0)
    assert row["float64/worst"]["input"].startswith("long, ") and row["float64/worst"]["tokens"] > 512


def raising(batch: TokenBatch) -> LossOutput:
    raise TypeError("no such thing")


@pytest.mark.parametrize(
    ("equation", "loss", "reason"),
    [
        (None, None, "arm.equation is null"),
        ("loss = mean(", None, "line 1"),
        ("loss = aggregate(logp * nothing)", None, "nothing"),
        (TIS, raising, "TypeError: no such thing"),
    ],
)
def test_what_cannot_be_measured_is_said_and_nothing_is_raised(equation: str | None, loss: Loss | None, reason: str) -> None:
    row = probed(shipped("tis_reinforce", equation=equation), loss)
    assert reason in row["not_measured"]
    assert not any(key.startswith("float") for key in row)
    b = TokenBatch(torch.zeros(1, 1), torch.ones(1), torch.ones(1, 1, dtype=torch.bool))
    if loss is None:
        found = probe_backward(shipped("tis_reinforce", equation=equation), KlConfig(coef=0.0), b, 0.0, torch.zeros(1, 1))
        assert reason in found["backward/not_measured"] and len(found) == 1


def test_no_stream_moves() -> None:
    torch.manual_seed(3)
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].tolist()  # type: ignore[index]
    probed(shipped("san"))
    assert torch.equal(torch.get_rng_state(), before)
    assert np.random.get_state()[1].tolist() == numpy_before  # type: ignore[index]


def test_inputs_are_what_the_measurement_says() -> None:
    """T = 1, no token, surprisal 0 or rounded below it, both signs, not centred, far and near; the same every time."""
    inputs = [*fixed_inputs(), *random_inputs(12, 16, 48)]
    lengths = np.concatenate([np.asarray(i.batch.lengths) for i in inputs])
    advantage = np.concatenate([np.asarray(i.batch.advantage) for i in inputs])
    logp, sampler, ref = (
        np.concatenate([np.asarray(getattr(i.batch, f"{p}logp")) for i in inputs]) for p in ("", "sampler_", "ref_")
    )
    assert {0, 1} <= set(lengths.tolist()) and lengths.max() > 40
    assert (advantage > 0).sum() > 50 < (advantage < 0).sum() and (advantage == 0).any()
    assert all(abs(np.asarray(i.batch.advantage).mean()) > 0.01 for i in inputs)
    assert (logp == 0).any() and all((values < 1e-7).all() for values in (logp, sampler, ref))
    for other in (sampler, ref):
        apart = abs(logp - other)
        assert (apart < 0.1).sum() > 100 < (apart > 3).sum() and (apart > 20).any()
    again = [*fixed_inputs(), *random_inputs(12, 16, 48)]
    assert all(np.array_equal(a.batch.logp, b.batch.logp) for a, b in zip(inputs, again, strict=True))
    assert all(np.array_equal(i.batch.logp, np.float32(i.batch.logp)) for i in inputs)


def test_a_token_on_the_edge_of_a_clip_is_held_against_the_nearer_side() -> None:
    """Its gradient is 1 or 0; a float32 that is one rounding off sees the other. A loss without the clip is still seen."""
    lengths = [1, 1]
    inside, outside = Evaluation(1.0, np.array([1.0, 1.0])), Evaluation(1.0, np.array([0.0, 1.0]))
    edge = Differences()
    edge.add("edge", lengths, inside, outside, [inside])
    assert edge.gradient_error == 0
    wrong = Differences()
    wrong.add("wrong", lengths, inside, outside, [outside])
    assert wrong.gradient_error > 1e8 and wrong.worst == {"input": "wrong", "response": 0, "tokens": 1}


# ---------------------------------------------------------------------------------------------------- the backward pass


def trained(arm: Arm, kl: KlConfig, apart: float = 0.3, advantage: Any = (1.0, -1.0, 0.5)) -> tuple[TokenBatch, torch.Tensor]:
    """A batch in float32 and the total loss of a stack on it, with its graph."""
    mask = torch.arange(5) < torch.tensor([5, 3, 1])[:, None]
    generator = torch.Generator().manual_seed(1)
    logp = -torch.rand(mask.shape, generator=generator) * 2
    others = [(logp + apart * torch.randn(mask.shape, generator=generator)).clamp(max=0) for _ in range(3)]
    batch = TokenBatch(logp.requires_grad_(), torch.tensor(advantage), mask, *others)
    total = bound(arm)(batch).loss
    if kl.coef:
        total = total + kl.coef * kl_penalty(logp, others[2], mask, kl.estimator, kl.clamp, kl.aggregation)
    return batch, total


def backward(arm: Arm, kl: KlConfig, held: KlConfig | None = None, scale: float = 1.0, **fields: Any) -> dict[str, Any]:
    batch, total = trained(arm, kl, **fields)
    (total * scale).backward()  # type: ignore[no-untyped-call]
    assert batch.logp.grad is not None
    return probe_backward(arm, held or kl, batch, float(total.detach()), batch.logp.grad)


@pytest.mark.parametrize("estimator", list(KlEstimator))
@pytest.mark.parametrize("name", NAMES)
def test_the_backward_pass_of_every_shipped_arm(name: str, estimator: KlEstimator) -> None:
    kl = KlConfig(coef=0.1, estimator=estimator, clamp=0.2, aggregation=Aggregation.seq_mean_token_mean)
    row = backward(shipped(name), kl)
    assert max(row["backward/value_error"], row["backward/gradient_error"]) < 1e-6
    assert backward(shipped(name), KlConfig(coef=0.0))["backward/gradient_error"] < 1e-6


KL = KlConfig(coef=0.1, clamp=10.0)


@pytest.mark.parametrize(
    "changed",
    [
        {"coef": 0.0},
        {"coef": 0.101},
        {"estimator": KlEstimator.k2},
        {"clamp": 0.01},
        {"aggregation": Aggregation.seq_mean_token_sum},
    ],
)
def test_a_penalty_other_than_configured_is_seen(changed: dict[str, Any]) -> None:
    row = backward(shipped("san"), dataclasses.replace(KL, **changed), held=KL)
    assert row["backward/gradient_error"] > 1e-4


EDGES = [("mis", 2.0), ("mis_seq", 2.0), ("mis_geo", 1.001), ("mis_geo", 0.999), ("icepop", 0.5), ("icepop", 5.0)]


@pytest.mark.parametrize(("name", "bound_of_w"), EDGES)
def test_a_weight_on_the_edge_of_rejection_raises_no_alarm(name: str, bound_of_w: float) -> None:
    """float32 and float64 may disagree there on what is kept, which no shift of the learner changes."""
    arm, mask = shipped(name), torch.ones(2, 4, dtype=torch.bool)
    edge = math.log(bound_of_w) * (4 if name == "mis_geo" else 1)
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        old = -0.1 - 2 * torch.rand(2, 4, generator=generator)
        sampler = old - 3e-4 * torch.rand(2, 4, generator=generator)
        rest = 0.0 if name in ("mis", "icepop") else float((old - sampler)[0, 1:].double().sum())
        sampler[0, 0] = old[0, 0].double() - (edge - rest)
        logp = old.clone().requires_grad_()
        batch = TokenBatch(logp, torch.tensor([1.0, -0.5]), mask, sampler, old, old)
        loss = bound(arm)(batch).loss
        loss.backward()  # type: ignore[no-untyped-call]
        assert logp.grad is not None
        row = probe_backward(arm, KlConfig(coef=0.0), batch, float(loss.detach()), logp.grad)
        assert max(row["backward/value_error"], row["backward/gradient_error"]) < 1e-5


def test_a_scaled_backward_pass_is_seen_as_a_scale() -> None:
    """Micro-batches that are averaged a second time: the value is right, the gradient a quarter."""
    row = backward(shipped("grpo"), KL, scale=0.25)
    assert row["backward/value_error"] < 1e-6
    assert row["backward/gradient_error"] == pytest.approx(0.75)
    assert row["backward/norm_ratio"] == pytest.approx([0.25, 0.25]) and row["backward/cosine"] > 1 - 1e-9


@pytest.mark.parametrize("apart", [0.0, 1e-7, 1e-5])
@pytest.mark.parametrize("estimator", list(KlEstimator))
def test_a_learner_at_its_reference_raises_no_alarm(apart: float, estimator: KlEstimator) -> None:
    """Update 0: the penalty is a difference of nearly equal numbers, and where all rewards are equal there is nothing else."""
    kl = KlConfig(coef=0.1, estimator=estimator)
    for advantage in ((1.0, -1.0, 0.5), (0.0, 0.0, 0.0)):
        row = backward(shipped("grpo"), kl, apart=apart, advantage=advantage)
        assert max(row["backward/value_error"], row["backward/gradient_error"]) < 1e-6


def test_the_backward_pass_reads_missing_tensors_as_missing() -> None:
    batch, _ = trained(shipped("tis_reinforce"), KlConfig(coef=0.0))
    gone = dataclasses.replace(batch, sampler_logp=None)
    row = probe_backward(shipped("tis_reinforce"), KlConfig(coef=0.0), gone, 0.0, torch.zeros(3, 5))
    assert "sampler_logp" in row["backward/not_measured"]


def test_which_updates_are_due() -> None:
    assert [u for u in range(100) if is_due(u)] == [0, 1, 2, 4, 8, 16, 32, 64]


def test_the_language_and_the_probe_agree_on_one_number() -> None:
    """One response, worked out by hand: A = 2, l = (1, 3), q = pi: loss = 2 (1 + 3), gradient -2."""
    batch = WrittenBatch([2], [2.0], [-1.0, -3.0], sampler_logp=[-1.0, -3.0])
    found = evaluate(parse(TIS), batch, {"cap": 2.0, "aggregation": "seq_mean_token_sum"})
    assert (found.value, found.gradient.tolist()) == (8.0, [-2.0, -2.0])
