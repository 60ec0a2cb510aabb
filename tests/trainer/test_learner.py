from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pth_exp import schema
from pth_exp.losses import get_loss
from pth_exp.trainer.learner import Learner, UpdateReport, micro_batches
from pth_exp.trainer.optimizer import GradientReport, MasterOptimizer
from pth_exp.trainer.policy import Policy
from pth_exp.trainer.rollout import Prompt, Rollout, pad_rows

from .test_sampler import PAD, VOCABULARY, model_of

PROMPTS = [(9, 8, 7), (5, 6, 7, 8, 9, 10, 11, 12), (30, 31, 32, 33, 34)]
LENGTHS = [[4, 1, 9, 2], [7, 7, 3, 1], [1, 2, 12, 5]]
ADVANTAGES = [[0.5, -1.0, 2.0, 0.1], [0.0, 0.0, 1.5, -0.5], [-2.0, 0.3, 0.7, 1.0]]
TEMPERATURE = 0.8


def responses() -> list[list[tuple[int, ...]]]:
    generator = torch.Generator().manual_seed(5)
    return [[tuple(torch.randint(1, VOCABULARY, (n,), generator=generator).tolist()) for n in group] for group in LENGTHS]


def rollout_of(order: Sequence[int] = (0, 1, 2), within: Sequence[int] = (0, 1, 2, 3), extra: int = 0) -> tuple[Rollout, Tensor]:
    """The fixed batch with groups and rows in some order, padded ``extra`` wider than needed; and its advantages."""
    rows = [responses()[g][r] for g in order for r in within]
    tokens = pad_rows(rows, torch.int64, max(map(len, rows)) + extra)
    lengths = torch.tensor([len(row) for row in rows])
    rollout = Rollout(
        draw=0,
        version=0,
        fingerprint="",
        prompts=tuple(Prompt(g, str(g), PROMPTS[g]) for g in order),
        tokens=tokens,
        mask=torch.arange(tokens.shape[1]) < lengths[:, None],
        lengths=lengths,
        sampler_logp=torch.full(tokens.shape, -3.0),
        truncated=torch.zeros(len(rows), dtype=torch.bool),
        rewards=torch.zeros(len(rows)),
    )
    return rollout, torch.tensor([ADVANTAGES[g][r] for g in order for r in within])


def perturbed(model: Any) -> Any:
    reference = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.02)
    return reference


def learner_of(kind: str, arm: str, activations: schema.Activations, micro_batch_tokens: int, **settings_: Any) -> Learner:
    model = model_of(kind)
    reference = Policy(perturbed(model).requires_grad_(False), TEMPERATURE, [PAD])
    optimizer = schema.OptimizerConfig(**settings_)
    kl = schema.KlConfig(coef=0.1, clamp=None, aggregation=schema.Aggregation.seq_mean_token_mean)
    return Learner(
        policy=Policy(model, TEMPERATURE, [PAD]),
        reference=reference,
        optimizer=MasterOptimizer(model, optimizer, 1e-3),
        loss=get_loss(arm),
        old_policy=schema.OldPolicy.sampler if arm == "ppo_clip" else schema.OldPolicy.recomputed,
        kl=kl,
        steps_per_batch=optimizer.steps_per_batch,
        micro_batch_tokens=micro_batch_tokens,
        activations=activations,
    )


def gradients(learner: Learner, rollout: Rollout, advantage: Tensor, monkeypatch_step: list[Tensor]) -> UpdateReport:
    """One update whose gradients, taken just before the step, go into ``monkeypatch_step``."""
    step = learner.optimizer.step

    def keep() -> GradientReport:
        monkeypatch_step[:] = [p.grad.clone() for p in learner.policy.model.parameters() if p.grad is not None]
        return step()

    learner.optimizer.step = keep  # type: ignore[method-assign]
    return learner.update(rollout, advantage)


def plain_logp(model: Any, prompt: Sequence[int], response: Sequence[int]) -> Tensor:
    """Log-probabilities of one response by a plain pass: the temperature divides the logits, and the rest sums to 1 again."""
    logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
    allowed = torch.arange(VOCABULARY) != PAD
    return logits[torch.arange(len(response)), torch.tensor(response)] - logits[:, allowed].logsumexp(-1)


def written_loss(arm: str, model: Any, reference: Any) -> Tensor:
    """The arm's loss plus the penalty, one plain unpadded pass a response, from the equations."""

    tokens = sum(map(sum, LENGTHS))
    policy_terms, penalties = [], []
    for prompt, group, advantages in zip(PROMPTS, responses(), ADVANTAGES, strict=True):
        for response, advantage in zip(group, advantages, strict=True):
            ours, theirs = plain_logp(model, prompt, response), plain_logp(reference, prompt, response).detach()
            x = theirs - ours
            penalties.append((x.exp() - x - 1).mean() / 12)
            if arm == "grpo":  # one step: the ratio is 1 and its gradient that of log pi
                policy_terms.append(-(advantage * (ours - ours.detach()).exp()).sum() / tokens)
            elif arm == "tis_reinforce":
                weight = (ours.detach() + 3.0).exp().clamp(max=2)
                policy_terms.append(-(advantage * weight * ours).sum() / 12)
            else:  # san, equation (1)
                surprisal = -ours
                weight = (surprisal.mean() / surprisal).detach().clamp(max=1)
                robust = (weight * surprisal).sum() / weight.sum()
                policy_terms.append(advantage * robust / robust.detach() / 12)
    return torch.stack(policy_terms).sum() + 0.1 * torch.stack(penalties).sum()


@pytest.mark.parametrize("activations", list(schema.Activations))
@pytest.mark.parametrize("arm", ["grpo", "tis_reinforce", "san"])
@pytest.mark.parametrize("kind", ["qwen2", "mistral with a sliding window", "gpt2"])
def test_gradient_equals_the_written_loss_on_unpadded_passes(kind: str, arm: str, activations: schema.Activations) -> None:
    learner = learner_of(kind, arm, activations, 40)
    model = copy.deepcopy(learner.policy.model)
    loss = written_loss(arm, model, copy.deepcopy(learner.reference.model))  # type: ignore[union-attr]
    loss.backward()
    expected = [p.grad for p in model.parameters() if p.grad is not None]
    found: list[Tensor] = []
    report = gradients(learner, *rollout_of(), found)
    assert report.steps[0].loss == pytest.approx(float(loss.detach()), rel=1e-5)
    largest = max(float(g.abs().max()) for g in expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).abs().max() < 2e-6 * max(1.0, largest)
    norm = torch.stack([g.norm() for g in expected]).norm()
    assert report.steps[0].gradient.norm == pytest.approx(float(norm), rel=1e-5)


@settings(max_examples=12, deadline=None)
@given(
    st.permutations(range(3)),
    st.permutations(range(4)),
    st.integers(0, 9),
    st.integers(1, 200),
    st.sampled_from(list(schema.Activations)),
)
def test_nothing_depends_on_split_order_or_padding(
    order: list[int], within: list[int], extra: int, tokens: int, activations: schema.Activations
) -> None:
    expected: list[Tensor] = []
    whole = gradients(learner_of("qwen2", "san", schema.Activations.whole_batch, 10**6), *rollout_of(), expected)
    found: list[Tensor] = []
    other = gradients(learner_of("qwen2", "san", activations, tokens), *rollout_of(order, within, extra), found)
    assert other.steps[0].loss == pytest.approx(whole.steps[0].loss, rel=1e-5)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=2e-6)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=30), st.integers(1, 300))
def test_micro_batches_partition_the_rows(lengths: list[int], tokens: int) -> None:
    parts = [part.tolist() for part in micro_batches(torch.tensor(lengths), tokens)]
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    for part in parts:
        padded = len(part) * max(lengths[row] for row in part)
        assert padded <= tokens or len(part) == 1


@pytest.mark.parametrize("activations", list(schema.Activations))
def test_old_logp_is_the_first_forward_pass_to_the_bit_and_stays(activations: schema.Activations) -> None:
    rollout, advantage = rollout_of()
    report = learner_of("qwen2", "grpo", activations, 40, steps_per_batch=3).update(rollout, advantage)
    first, *later = [step.batch for step in report.steps]
    assert first.old_logp is not None
    assert torch.equal(first.old_logp[first.mask], first.logp[first.mask])
    for batch in later:
        assert torch.equal(batch.old_logp, first.old_logp)  # type: ignore[arg-type]
        assert not torch.equal(batch.logp, first.logp)


@torch.no_grad()
def all_logp(model: Any) -> list[Tensor]:
    return [plain_logp(model, p, r) for p, group in zip(PROMPTS, responses(), strict=True) for r in group]


@pytest.mark.parametrize("arm", ["grpo", "ppo_clip", "tis_ppo"])
def test_the_ratio_on_a_second_step_is_the_declared_formula(arm: str) -> None:
    """r = pi_theta/pi_old with pi_theta after the first step: pi_old is what it was before (grpo, tis_ppo), or q (ppo_clip).

    tis_ppo's weight stays pi_old/q: it does not follow the learner from step to step.
    """
    learner = learner_of("qwen2", arm, schema.Activations.whole_batch, 400, steps_per_batch=2)
    single = learner_of("qwen2", arm, schema.Activations.whole_batch, 400)
    before = all_logp(single.policy.model)
    single.update(*rollout_of())
    after = all_logp(single.policy.model)
    assert max(float((a - b).abs().max()) for a, b in zip(after, before, strict=True)) > 1e-2, "the ratio is not 1 any more"
    terms, coefs = [], []
    for new, old, advantage in zip(after, before, (a for group in ADVANTAGES for a in group), strict=True):
        r = (new - (torch.tensor(-3.0) if arm == "ppo_clip" else old)).exp()
        clipped = r.clamp(0.8, 1.2)
        weight = (old + 3.0).exp().clamp(max=2) if arm == "tis_ppo" else torch.ones(len(r))
        bounded = torch.maximum(-advantage * r, -advantage * clipped)
        free = -advantage * r >= -advantage * clipped
        if advantage < 0:
            free &= bounded < -advantage * 3
            bounded = bounded.clamp(max=-advantage * 3)
        terms.append(weight * bounded)
        coefs.append(weight * advantage * r * free)
    output = learner.update(*rollout_of()).steps[1].output
    tokens = sum(map(sum, LENGTHS))
    assert float(output.loss.detach()) == pytest.approx(float(torch.cat(terms).sum() / tokens), rel=1e-4)
    got = [row[: len(c)] for row, c in zip(output.token_coef, coefs, strict=True)]
    torch.testing.assert_close(torch.cat(got), torch.cat(coefs) / tokens, rtol=1e-3, atol=1e-6)


def test_temperature_divides_logits_and_not_log_probabilities() -> None:
    """Probabilities sum to 1 at any temperature, and the odds of two tokens are those of the logits over it."""
    model = model_of("qwen2")
    prompt, response = PROMPTS[0], (5, 6)
    whole = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1].detach()
    logp = Policy(model, TEMPERATURE, [PAD]).log_probs(whole)
    assert float(logp.exp().sum()) == pytest.approx(1.0, rel=1e-5)
    assert float(logp[5] - logp[6]) == pytest.approx(float((whole[5] - whole[6]) / TEMPERATURE), rel=1e-4)
    rollout, advantage = rollout_of()
    seen = learner_of("qwen2", "san", schema.Activations.whole_batch, 400).update(rollout, advantage).steps[0].batch.logp
    for row, expected in zip(seen, all_logp(model_of("qwen2")), strict=True):
        torch.testing.assert_close(row[: len(expected)], expected, rtol=1e-4, atol=1e-5)


def test_the_arm_s_aggregation_does_not_rescale_the_penalty() -> None:
    """What the KL adds to d total / d logp is the same under each of them: the penalty has an aggregation of its own."""
    added = {}
    for how in schema.Aggregation:
        learner = learner_of("qwen2", "grpo", schema.Activations.whole_batch, 400)
        learner.loss = get_loss("grpo", aggregation=how, norm_tokens=12.0)
        step = learner.update(*rollout_of()).steps[0]
        assert step.kl_loss is not None
        added[how] = (step.logp_grad + step.output.token_coef, step.kl_loss, step.output.token_coef)
    penalties = [penalty for penalty, _, _ in added.values()]
    for how, (penalty, value, coef) in added.items():
        torch.testing.assert_close(penalty, penalties[0], rtol=1e-4, atol=1e-7)
        assert value == added[schema.Aggregation.token_mean][1] > 0
        if how is not schema.Aggregation.token_mean:
            assert not torch.allclose(coef, added[schema.Aggregation.token_mean][2], rtol=1e-2)
    assert penalties[0].abs().max() > 1e-4


def test_the_sampler_s_record_is_old_logp_for_an_arm_that_says_so() -> None:
    rollout, advantage = rollout_of()
    batch = learner_of("qwen2", "ppo_clip", schema.Activations.whole_batch, 40).update(rollout, advantage).steps[0].batch
    assert torch.equal(batch.old_logp, rollout.sampler_logp)  # type: ignore[arg-type]


def test_reported_logp_gradient_is_that_of_the_total_loss() -> None:
    """d total / d logp from the report, against finite differences of loss and penalty."""
    rollout, advantage = rollout_of()
    step = learner_of("qwen2", "tis_reinforce", schema.Activations.micro_batch, 40).update(rollout, advantage).steps[0]
    batch = step.batch
    assert batch.sampler_logp is not None
    assert batch.ref_logp is not None
    weight = (batch.logp - batch.sampler_logp).exp().clamp(max=2)
    x = batch.ref_logp - batch.logp
    per_token = torch.where(batch.mask, 1 / (12 * rollout.lengths[:, None]), torch.zeros(()))
    expected = -advantage[:, None] * weight * batch.mask / 12 + 0.1 * per_token * (1 - x.exp())
    assert torch.allclose(step.logp_grad, expected, atol=1e-7)


def test_a_micro_batch_that_is_scaled_or_lost_shows_in_the_reported_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part's pass back through the policy takes its rows of d total / d logp; here every one takes three times that."""
    rollout, advantage = rollout_of()
    right = learner_of("qwen2", "san", schema.Activations.micro_batch, 20).update(rollout, advantage).steps[0].logp_grad
    original = torch.autograd.backward

    def thrice(tensors: Any, gradient: Any = None) -> None:
        original(tensors, gradient if gradient is None else 3 * gradient)

    monkeypatch.setattr(torch.autograd, "backward", thrice)
    wrong = learner_of("qwen2", "san", schema.Activations.micro_batch, 20).update(rollout, advantage).steps[0].logp_grad
    assert right.abs().max() > 1e-3
    assert torch.equal(wrong, 3 * right)


@pytest.mark.parametrize(("bound", "acts"), [(1e-3, True), (1e9, False), (None, False)])
def test_gradient_clip(bound: float | None, acts: bool) -> None:
    """One Adam step is blind to the gradient's scale, so the clip is read from the optimiser's first moment."""
    learner = learner_of("qwen2", "san", schema.Activations.whole_batch, 400, max_grad_norm=bound)
    report = learner.update(*rollout_of()).steps[0]
    assert report.gradient.clipped is acts
    assert not report.gradient.skipped
    assert applied_norm(learner) == pytest.approx(bound if acts and bound else report.gradient.norm, rel=1e-3)


def applied_norm(learner: Learner) -> float:
    """Global norm of the gradient that the optimiser was given at its first step."""
    moments = [state["exp_avg"] for state in learner.optimizer.optimizer.state.values()]
    return float(torch.stack([m.norm() for m in moments]).norm() / 0.1)


@pytest.mark.parametrize("target", [1e-3, 1.0, 50.0])
def test_a_norm_that_is_set_is_the_same_whatever_the_gradient_s_was(target: float) -> None:
    """Above and below the gradient's own, direction kept."""
    learner = learner_of("qwen2", "san", schema.Activations.whole_batch, 400, grad_norm=schema.GradNorm.set, max_grad_norm=target)
    gradient: list[Tensor] = []
    report = gradients(learner, *rollout_of(), gradient).steps[0].gradient
    assert 1e-2 < report.norm < 30, "the targets are on either side"
    assert (report.clipped, report.skipped) == (None, False)
    assert applied_norm(learner) == pytest.approx(target, rel=1e-5)
    moments = [state["exp_avg"] for state in learner.optimizer.optimizer.state.values()]
    for moment, own in zip(moments, gradient, strict=True):
        torch.testing.assert_close(moment, 0.1 * target / report.norm * own, rtol=1e-4, atol=1e-9 * target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_too_small_to_be_set_takes_no_step(dtype: torch.dtype) -> None:
    """After a step that left moments behind: AdamW would move by them, and decay the weights."""
    model = model_of("qwen2").to(dtype)
    optimizer = MasterOptimizer(model, schema.OptimizerConfig(grad_norm=schema.GradNorm.set, skip_below=1e-3), 1e-2)
    weights = list(model.parameters())

    def step(size: float) -> GradientReport:
        for weight in weights:
            weight.grad = torch.full_like(weight, size)
        return optimizer.step()

    assert not step(1.0).skipped
    before = copy.deepcopy((optimizer.state(), [w.detach() for w in weights]))
    count = sum(w.numel() for w in weights) ** 0.5
    for size in (0.0, 0.9e-3 / count):
        report = step(size)
        assert (report.skipped, report.clipped) == (True, None)
        assert report.norm == pytest.approx(size * count, rel=1e-2)
        assert all(w.grad is None for w in weights), "no rest of it is left for the next step"
        torch.testing.assert_close((optimizer.state(), [w.detach() for w in weights]), before, rtol=0, atol=0)
    assert not step(1.1e-3 / count).skipped
    assert any(not torch.equal(w, old) for w, old in zip(weights, before[1], strict=True))


def test_a_norm_that_is_not_set_skips_nothing() -> None:
    learner = learner_of("qwen2", "san", schema.Activations.whole_batch, 400, skip_below=1e9)
    before = [p.detach().clone() for p in learner.policy.model.parameters()]
    assert not learner.update(*rollout_of()).steps[0].gradient.skipped
    assert any(not torch.equal(a, b) for a, b in zip(before, learner.policy.model.parameters(), strict=True))


def test_one_step_is_adamw_s_first_step_by_hand() -> None:
    learner = learner_of("qwen2", "san", schema.Activations.whole_batch, 400, max_grad_norm=None, weight_decay=0.1)
    before = [p.detach().clone() for p in learner.policy.model.parameters()]
    gradient: list[Tensor] = []
    gradients(learner, *rollout_of(), gradient)
    for old, g, new in zip(before, gradient, learner.policy.model.parameters(), strict=True):
        expected = old * (1 - 1e-3 * 0.1) - 1e-3 * g / (g.abs() + 1e-8)
        assert torch.allclose(new, expected, atol=1e-7)


def test_small_steps_are_not_lost_in_bfloat16() -> None:
    model = model_of("qwen2").to(torch.bfloat16)
    optimizer = MasterOptimizer(model, schema.OptimizerConfig(weight_decay=0.0, max_grad_norm=None), 1e-5)
    weight = next(model.parameters())
    before = weight.detach().clone()
    for _ in range(300):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    moved = float((before - weight.detach()).float().mean())
    assert moved == pytest.approx(300 * 1e-5, rel=0.2)
