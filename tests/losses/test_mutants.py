"""Check 4 on losses with one small fault each."""

import pytest
from mutants import arms, error_of, inputs, survivors, why_equivalent

from pth_exp.losses import get_loss
from pth_exp.schema import Arm

ARMS = arms()
INPUTS = inputs()


@pytest.mark.slow
@pytest.mark.parametrize("name", ARMS)
def test_every_fault_in_a_loss_is_seen_but_those_that_change_nothing(name: str) -> None:
    made, survived = survivors(name, ARMS[name], INPUTS)
    assert [str(m) for m in survived if why_equivalent(name, m) is None] == []
    # the mutants are there at all: each loss has a sign, a reduction and a normaliser to get wrong
    assert {"sign", "reduction", "normaliser"} <= {m.operator for m in made}
    assert len(made) - len(survived) >= 9


@pytest.mark.parametrize(("name", "arm"), ARMS.items())
def test_without_a_fault_there_is_nothing_to_see(name: str, arm: Arm) -> None:
    assert error_of(get_loss(arm.loss, **arm.parameters()), arm, INPUTS) < 1e-11
