"""Names and parameters of losses."""

import dataclasses

import pytest
import torch
from torch import Tensor

from pth_exp.losses import TokenBatch, Totals, get_loss, loss_names, register
from pth_exp.losses import registry as registry_module
from pth_exp.schema import BUILTIN_ARMS, Arm


@pytest.mark.parametrize("name", sorted(BUILTIN_ARMS))
def test_defaults_are_those_of_the_arms_schema(name: str) -> None:
    own = set(f.name for f in dataclasses.fields(BUILTIN_ARMS[name])) - set(f.name for f in dataclasses.fields(Arm))
    declared = {f.name: f.default for f in dataclasses.fields(BUILTIN_ARMS[name]) if f.name in own}
    needed = {"norm_tokens": 7.0} if name == "dr_grpo" else {}
    assert dict(get_loss(name, **needed).parameters) == declared | needed


def test_dr_grpos_constant_has_no_default() -> None:
    with pytest.raises(ValueError, match="norm_tokens is None"):
        get_loss("dr_grpo")


def test_every_arm_of_the_schema_has_a_loss() -> None:
    assert set(BUILTIN_ARMS) <= set(loss_names())


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("ppo", {}, "'ppo' is not known; known are asympo_reading, cispo, decoupled_ppo, dr_grpo, grpo"),
        ("san", {"cap": 2.0}, "'san' has no parameter 'cap'; its parameters: none"),
        ("tis_reinforce", {"clip_low": 0.2}, "no parameter 'clip_low'; its parameters: cap, aggregation, norm_tokens"),
        ("tis_reinforce", {"cap": 0.0}, "cap is 0.0"),
        ("tis_ppo", {"cap": -1.0}, "cap is -1.0"),
        ("tis_ppo", {"cap": "two"}, "'tis_ppo'"),
        ("ppo_clip", {"clip_low": 1.0}, "clip_low is 1.0"),
        ("asympo_reading", {"floor": 0.0}, "floor is 0.0"),
        ("grpo", {"clip_high": -0.1}, "clip_high is -0.1"),
        ("grpo", {"clip_high": float("nan")}, "clip_high is nan"),
        ("ppo_clip", {"dual_clip": 1.0}, "dual_clip is 1.0"),
        ("ppo_clip", {"aggregation": "token-mean"}, "token-mean"),
        ("tis_reinforce", {"aggregation": "sum"}, "sum"),
        *((n, {"aggregation": "seq_mean_token_sum_norm"}, "norm_tokens is None") for n in ("grpo", "tis_ppo", "tis_reinforce")),
    ],
)
def test_impossible_requests_are_named(name: str, parameters: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as error:
        get_loss(name, **parameters)
    assert message in str(error.value)


def test_a_loss_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scalar is all that an author writes; the coefficient and the treatment of padding come with the registry."""
    monkeypatch.setattr(registry_module, "_ENTRIES", dict(registry_module._ENTRIES))

    @register("mine")
    def mine(batch: TokenBatch, *, power: int = 2) -> tuple[Tensor, dict[str, Tensor]]:
        assert batch.sampler_logp is not None
        value = (batch.advantage[:, None] * (-batch.logp) ** power).sum() + batch.advantage.sum()
        return value, {"mine/sampler": batch.sampler_logp.sum()}

    nan = float("nan")
    batch = TokenBatch(  # an author's function sees no NaN of padding, an empty response's advantage included, and one dtype
        logp=torch.tensor([[-1.0, -3.0, nan], [nan, nan, nan]], requires_grad=True),
        advantage=torch.tensor([2.0, nan], dtype=torch.float64),
        mask=torch.tensor([[True, True, False], [False, False, False]]),
        sampler_logp=torch.tensor([[-1.0, -3.0, nan], [nan, nan, nan]], dtype=torch.float64),
    )
    out = get_loss("mine", power=3)(batch)
    assert out.loss.item() == pytest.approx(2 * (1 + 27) + 2)
    assert out.loss.dtype == torch.float32
    torch.testing.assert_close(out.token_coef, torch.tensor([[2 * 3 * 1.0, 2 * 3 * 9.0, 0.0], [0.0, 0.0, 0.0]]))
    assert out.metrics == {"mine/sampler": pytest.approx(-4.0)}

    with pytest.raises(ValueError, match="'mine' is registered already"):
        register("mine")(mine)

    def nameless(batch: TokenBatch, *, power: int) -> tuple[Tensor, dict[str, Tensor]]:
        return batch.logp.sum(), {}

    with pytest.raises(ValueError, match="'power' has no default"):
        register("nameless")(nameless)


def part_of(tokens: int, responses: int) -> TokenBatch:
    """A part with two responses and three tokens of a batch with so many."""
    logp = torch.full((2, 2), -1.0, requires_grad=True)
    mask = torch.tensor([[True, False], [True, True]])
    return TokenBatch(logp, torch.ones(2), mask, totals=Totals(tokens, responses))


def test_a_loss_that_needs_the_whole_batch_refuses_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "_ENTRIES", dict(registry_module._ENTRIES))

    @register("sorts", splittable=False)
    def sorts(batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        return batch.logp.sum(), {}

    loss = get_loss("sorts")
    assert not loss.splittable
    loss(dataclasses.replace(part_of(3, 2), totals=None))
    with pytest.raises(ValueError, match=r"'sorts' .* needs the whole batch"):
        loss(part_of(3, 2))
    assert get_loss("san").splittable


@pytest.mark.parametrize("totals", [(2, 2), (3, 1)])
def test_totals_below_the_part_s_own_counts_are_refused(totals: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="below the counts of this part"):
        get_loss("san")(part_of(*totals))
