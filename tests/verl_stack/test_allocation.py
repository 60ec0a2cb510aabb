"""A verl run in a SLURM job of two nodes. Preemption, cancelling, one node, and others: tests/slurm/verl_jobs.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from allocation import Allocation, until
from running import pth

from pth_exp.lifecycle import State, state
from pth_exp.machine import carrying
from pth_exp.records.reader import RunRecords

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]


def test_over_two_nodes_and_told_to_stop_all_over(allocation: Allocation, verl_python: Path) -> None:
    """SLURM's signals reach all processes of a job: they end none of Ray's, verl's or vLLM's, which the worker still needs."""
    run = allocation.run
    assert allocation.engines == {"n0", "n1"}
    assert state(run)[0] is State.COMPLETED
    records = RunRecords.load(run)
    assert [row["update"] for row in records.updates] == list(range(5)) and not records.problems
    assert {row["attempt"] for row in records.updates} == {1}
    assert records.received is not None
    objects = records.received["objects"]
    assert (objects["ranks"], objects["sampler_servers"]) == (2, 2)
    assert (objects["places"]["trainer.nnodes"], objects["places"]["trainer.n_gpus_per_node"]) == (2, 1)
    checked = pth(allocation.sweep, verl_python, "check", str(allocation.sweep))
    assert checked.returncode == 0, checked.stdout

    until(lambda: not carrying("RAY_AUTH_TOKEN", allocation.token))
    assert len(allocation.places) == 2 and not any(Path(place).exists() for place in allocation.places)
    assert not [*run.glob(".ray-*")]
