"""The prompt order against torchdata's own loader over the sampler that verl builds."""

from __future__ import annotations

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler

from pth_exp.tasks.order import PromptOrder


def verl_batches(n: int, size: int, seed: int | None, epochs: int) -> list[list[int]]:
    """What verl's trainer draws: a stateful loader over a stateful sampler whose generator is seeded only if there is a seed."""
    generator = torch.Generator()
    if seed is not None:
        generator.manual_seed(seed)
    rows = list(range(n))
    sampler = RandomSampler(data_source=rows, generator=generator)
    loader = StatefulDataLoader(dataset=rows, batch_size=size, num_workers=0, drop_last=True, collate_fn=list, sampler=sampler)
    return [batch for _ in range(epochs) for batch in loader]


@pytest.mark.parametrize("seed", [None, 0, 43])
@pytest.mark.parametrize(("n", "size"), [(37, 8), (24, 8), (8, 8), (5, 1)])
def test_same_batches_as_verl_over_two_epochs(seed: int | None, n: int, size: int) -> None:
    expected = verl_batches(n, size, seed, epochs=2)
    order = PromptOrder(n, size, seed)
    assert [order.batch(i) for i in range(len(expected))] == expected
    assert order.batches_per_epoch == len(expected) // 2


def test_any_draw_is_reachable_in_any_order() -> None:
    expected = verl_batches(20, 6, 43, epochs=4)
    for i in (11, 0, 5, 10, 3):
        assert PromptOrder(20, 6, 43).batch(i) == expected[i]
    order = PromptOrder(20, 6, 43)
    assert [order.batch(i) for i in (11, 0, 5, 10, 3)] == [expected[i] for i in (11, 0, 5, 10, 3)]


def test_no_seed_is_a_fixed_shuffle() -> None:
    first, second = PromptOrder(100, 100, None), PromptOrder(100, 100, None)
    assert first.batch(0) == second.batch(0) != list(range(100))
    assert first.generator_seed == torch.Generator().initial_seed()


def test_the_global_generator_is_neither_read_nor_moved() -> None:
    torch.manual_seed(1)
    first = PromptOrder(50, 5, None).batch(12)
    state = torch.get_rng_state()
    torch.manual_seed(2)
    assert PromptOrder(50, 5, None).batch(12) == first
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("size", [0, 11])
def test_impossible_batch_size_is_named(size: int) -> None:
    with pytest.raises(ValueError, match=r"prompts_per_update: .*from 1 to 10"):
        PromptOrder(10, size, 0)
