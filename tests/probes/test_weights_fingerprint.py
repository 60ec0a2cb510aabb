from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pth_exp.probes.weights import fingerprint, fingerprint_of


def module(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)).to(dtype)


@given(st.integers(0, 34), st.integers(0, 31))
def test_any_one_bit_changes_it(element: int, bit: int) -> None:
    model = module()
    before = fingerprint(model)
    flat = next(model.parameters()).detach().view(-1).view(torch.int32)
    mask = 1 << bit if bit < 31 else -(1 << 31)
    flat[element] ^= mask
    assert fingerprint(model) != before
    flat[element] ^= mask
    assert fingerprint(model) == before


@given(st.permutations(range(35)))
def test_places_count(order: list[int]) -> None:
    model = module()
    before = fingerprint(model)
    weight = next(model.parameters()).detach().view(-1)
    weight.copy_(weight[torch.tensor(order)].clone())
    assert (fingerprint(model) == before) == (order == list(range(35)))


def test_zeros_of_either_sign_and_opposite_changes_differ() -> None:
    model = module()
    weight = next(model.parameters()).detach().view(-1)
    weight[:2] = torch.tensor([0.0, 1.0])
    one = fingerprint(model)
    weight[:2] = torch.tensor([-0.0, 1.0])
    two = fingerprint(model)
    weight[:2] = torch.tensor([1.0, 0.0])
    assert len({one, two, fingerprint(model)}) == 3


def test_names_shapes_and_types_count() -> None:
    prints = [fingerprint(module()), fingerprint(module(torch.bfloat16)), fingerprint(nn.Sequential(*reversed([*module()])))]  # type: ignore[misc]
    assert len(set(prints)) == 3


def test_blocks_do_not_show(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    whole = fingerprint(module())
    monkeypatch.setattr("pth_exp.probes.weights._BLOCK", 4)
    assert fingerprint(module()) == whole


def test_order_of_parameters_is_free_and_names_are_not() -> None:
    named = list(module().named_parameters())
    assert fingerprint_of(reversed(named)) == fingerprint_of(named) == fingerprint(module())
    first, *rest = named
    assert fingerprint_of([("other", first[1]), *rest]) != fingerprint_of(named)
