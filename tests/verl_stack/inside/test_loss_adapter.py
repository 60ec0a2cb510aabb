"""The loss adapter against the loss itself. Runs in verl's environment; see ../test_verl_stack.py."""

from __future__ import annotations

import pytest

pytest.importorskip("verl", reason="not verl's environment: make verl")

import torch
from tensordict import NonTensorData, TensorDict

from pth_exp.losses import get_loss, kl_penalty
from pth_exp.losses.types import TokenBatch
from pth_exp.schema import Aggregation, KlConfig, KlEstimator
from pth_exp.verl_stack.loss import PolicyLoss

PROMPTS, RESPONSES = [3, 5, 4, 2], [4, 1, 6, 3]
KL = KlConfig(coef=0.1, estimator=KlEstimator.k3, clamp=10.0, aggregation=Aggregation.token_mean)


def nested(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def made(rows: list[int], without: str | None = None) -> tuple[TensorDict, torch.Tensor]:
    """verl's micro-batch of some of four responses, and the log-probabilities of the tokens of all four, flat."""
    torch.manual_seed(1)
    prompts = [torch.randint(0, 9, (n,)) for n in PROMPTS]
    responses = [torch.randint(0, 9, (n,)) for n in RESPONSES]
    values = {name: [-torch.rand(n) * 3 for n in RESPONSES] for name in ("rollout_log_probs", "old_log_probs", "ref_log_prob")}
    advantages = [torch.full((n,), a) for n, a in zip(RESPONSES, (1.0, -0.5, 0.25, -2.0), strict=True)]
    fields = {"prompts": prompts, "responses": responses, "advantages": advantages, **values}
    fields["response_mask"] = [torch.ones(n, dtype=torch.int64) for n in RESPONSES]
    fields.pop(without or "", None)
    data = TensorDict({name: nested([v[i] for i in rows]) for name, v in fields.items()}, batch_size=[len(rows)])
    data["index"] = torch.tensor([i // 2 for i in rows])
    data["session_id"] = torch.tensor([i % 2 for i in rows])
    for name, number in {"dp_size": 1, "batch_num_tokens": sum(RESPONSES), "global_batch_size": len(PROMPTS)}.items():
        data.set_non_tensor(name, number)
    return data, -torch.rand(sum(PROMPTS) + sum(RESPONSES)) * 3


def whole(flat: torch.Tensor) -> tuple[TokenBatch, torch.Tensor]:
    """The same four responses as the losses take them, padded by hand: token t is predicted one place before it stands."""
    data, _ = made([0, 1, 2, 3])
    logp = torch.zeros(4, max(RESPONSES))
    end = 0
    for i, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        end += prompt + response
        logp[i, :response] = flat[end - response - 1 : end - 1]
    padded = {n: data[n].to_padded_tensor(0) for n in ("rollout_log_probs", "old_log_probs", "ref_log_prob", "advantages")}
    mask = data["response_mask"].to_padded_tensor(0).bool()
    logp.requires_grad_()
    batch = TokenBatch(
        logp, padded["advantages"][:, 0], mask, padded["rollout_log_probs"], padded["old_log_probs"], padded["ref_log_prob"]
    )
    return batch, logp


@pytest.mark.parametrize("name", ["grpo", "ppo_clip", "tis_ppo", "tis_reinforce", "san"])
@pytest.mark.parametrize("split", [[[0, 1, 2, 3]], [[0, 1], [2, 3]], [[3], [0], [2, 1]]])
def test_parts_add_up_to_the_registrys_loss_on_the_whole_batch(name: str, split: list[list[int]]) -> None:
    _, flat = made([0])
    batch, logp = whole(flat)
    loss = get_loss(name)
    output = loss(batch)
    assert batch.ref_logp is not None
    penalty = kl_penalty(logp, batch.ref_logp, batch.mask, KL.estimator, KL.clamp, KL.aggregation)
    total = output.loss + KL.coef * penalty
    total.backward()
    assert logp.grad is not None

    adapter = PolicyLoss(loss, KL)
    lengths = [p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    for rows in split:
        data, _ = made(rows)
        part = nested([flat.split(lengths)[i] for i in rows]).detach().requires_grad_()
        value, _ = adapter({"log_probs": part}, data)
        value.backward()
    adapter.step_done(grad_norm=1.5, lr=0.1)
    (step,) = adapter.take()
    assert step.loss == pytest.approx(float(total), rel=1e-5)
    assert step.pg_loss == pytest.approx(float(output.loss), rel=1e-5, abs=1e-7)
    assert step.kl_loss == pytest.approx(float(penalty), rel=1e-5)
    for key, value_of in output.metrics.items():
        assert step.metrics[key] == pytest.approx(value_of, abs=1e-6)
    for place, (prompt, number) in enumerate(step.rows):
        row = 2 * prompt + number
        length = RESPONSES[row]
        torch.testing.assert_close(step.logp[place], batch.logp.detach()[row, :length])
        torch.testing.assert_close(step.token_coef[place], output.token_coef[row, :length])
        torch.testing.assert_close(step.logp_grad[place], logp.grad[row, :length])
    assert adapter.take() == []


def test_two_ranks_parts_are_doubled_since_verl_averages_over_ranks() -> None:
    data, flat = made([0, 1, 2, 3])
    lengths = [p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    part = nested(list(flat.split(lengths))).detach().requires_grad_()
    alone, _ = PolicyLoss(get_loss("san"), KL)({"log_probs": part}, data)
    data.set_non_tensor("dp_size", 2)
    doubled, _ = PolicyLoss(get_loss("san"), KL)({"log_probs": part}, data)
    assert float(doubled) == pytest.approx(2 * float(alone))


@pytest.mark.parametrize(
    ("name", "missing"),
    [("tis_ppo", "rollout_log_probs"), ("grpo", "old_log_probs"), ("grpo", "ref_log_prob"), ("san", "advantages")],
)
def test_a_missing_input_is_an_error_that_names_it(name: str, missing: str) -> None:
    data, flat = made([0, 1, 2, 3], without=missing)
    lengths = [p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    part = nested(list(flat.split(lengths))).detach().requires_grad_()
    with pytest.raises(ValueError, match=missing.replace("rollout_log_probs", "sampler_logp")):
        PolicyLoss(get_loss(name), KL)({"log_probs": part}, data)


def test_non_tensor_columns_are_read_as_verl_hands_them_out() -> None:
    from pth_exp.verl_stack.loss import _numbers

    assert _numbers([NonTensorData(3), NonTensorData(4)]) == [3, 4]
    assert _numbers(torch.tensor([5, 6])) == [5, 6]
