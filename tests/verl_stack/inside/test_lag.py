"""The lagged sampler with faults put into it. Runs in verl's environment.

The trainer's own hooks, in verl's order, with a vLLM that is two numbers: its weights, and an answer cached for each prompt. The
methods inside vLLM are the stack's own, on a module of torch's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl", reason="not verl's environment: make verl")

import torch
from torch import nn
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

from pth_exp.probes.weights import fingerprint
from pth_exp.verl_stack import trainer as hooks
from pth_exp.verl_stack.recording import Recording
from pth_exp.verl_stack.trainer import LaggedTrainer
from pth_exp.verl_stack.vllm_server import Server
from pth_exp.verl_stack.vllm_weights import Weights

INTERVAL, UPDATES = 4, 10


class Method:
    """One that is called on another process."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.remote = function


class FakeServer:
    """What a server handle offers."""

    def __init__(self) -> None:
        self.model = nn.Linear(1, 1, bias=False)
        self.worker = object.__new__(Weights)
        self.worker.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=1))
        self.worker.model_runner = SimpleNamespace(model=self.model)
        self.cache: dict[str, float] = {}
        self.version = -1
        self.on_workers = Method(lambda method: [getattr(self.worker, method)()])
        self.clear_kv_cache = Method(self.cache.clear)
        self.set_global_steps = Method(lambda version: setattr(self, "version", version))

    def answer(self, prompt: str) -> float:
        return self.cache.setdefault(prompt, float(self.model.weight.detach()))


class Job:
    """A run whose learner's weight is the number of updates it has seen."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, servers: int = 1) -> None:
        monkeypatch.setattr(hooks.ray, "get", lambda value: value)
        monkeypatch.setattr(hooks.PPOTrainer, "_update_actor", lambda trainer, batch, metrics: self._learn())
        self.learner = nn.Linear(1, 1, bias=False)
        self._set(0)
        self.servers = [FakeServer() for _ in range(servers)]
        self.sampled: list[float] = []
        self.evaluated: list[float] = []
        self.rows: list[tuple[Any, ...]] = []
        recording = object.__new__(Recording)
        monkeypatch.setattr(recording, "stepped", lambda *_: None, raising=False)
        monkeypatch.setattr(recording, "validated", lambda *row: self.rows.append(row), raising=False)
        self.trainer = trainer = object.__new__(LaggedTrainer)
        trainer._run = SimpleNamespace(updates=UPDATES, refresh_interval=INTERVAL)
        trainer._recording, trainer._before_update = recording, lambda update: None
        trainer._sampler_version, trainer._sampler_fingerprint, trainer._before_validation = 0, None, None
        trainer._resumed = None
        trainer.llm_server_manager = SimpleNamespace(server_handles=self.servers)
        trainer.checkpoint_manager = SimpleNamespace(update_weights=self.transfer)
        trainer.actor_rollout_wg = SimpleNamespace(weights_fingerprint=lambda: [fingerprint(self.learner)], take_steps=lambda: [])

    def _set(self, value: float) -> None:
        with torch.no_grad():
            self.learner.weight.fill_(value)

    def _learn(self) -> None:
        self._set(float(self.learner.weight.detach()) + 1)

    def transfer(self, version: int) -> None:
        """As verl's: the weights, then an empty cache."""
        for server in self.servers:
            server.model.load_state_dict(self.learner.state_dict())
            server.clear_kv_cache.remote()
            server.set_global_steps.remote(version)

    def run(self, validate_every: int | None = 2) -> None:
        """As ``PPOTrainer.fit`` goes through it."""
        trainer = self.trainer
        trainer.global_steps = 0
        trainer.on_init_end()
        if validate_every:
            self._validate()
        for trainer.global_steps in range(1, UPDATES + 1):
            trainer.on_step_begin()
            self.sampled.append(self.servers[0].answer("a prompt"))
            trainer._update_actor(None, {})
            trainer.on_step_end()
            if validate_every and trainer.global_steps % validate_every == 0:
                self._validate()

    def _validate(self) -> None:
        self.trainer.on_validate_begin()
        self.evaluated.append(self.servers[0].answer("a prompt"))
        self.trainer.on_validate_end()


@pytest.mark.parametrize("every", [None, 1, 2, 3, INTERVAL])
def test_it_samples_from_the_version_that_the_schedule_says(monkeypatch: pytest.MonkeyPatch, every: int | None) -> None:
    """However often the learner is evaluated in between: on a refresh, beside one, or never."""
    job = Job(monkeypatch)
    job.run(every)
    assert job.sampled == [0] * 4 + [4] * 4 + [8] * 2
    assert job.evaluated == ([] if every is None else list(range(0, UPDATES + 1, every)))
    assert job.servers[0].version == 8
    assert all(before == after and len({before, evaluated}) <= 2 for _, before, evaluated, after in job.rows)


def losing(job: Job, *lost: int) -> Callable[[int], None]:
    """Transfers of which some, counted from 0, do not arrive."""
    count, transfer = iter(range(1000)), job.transfer

    def send(version: int) -> None:
        if next(count) not in lost:
            transfer(version)

    return send


def test_a_refresh_that_does_not_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch)
    job.trainer.checkpoint_manager.update_weights = losing(job, 1)
    with pytest.raises(RuntimeError, match=r"the transfer to vLLM: the weights have fingerprint .*, and should have"):
        job.run(None)
    assert job.trainer.global_steps == 5, "before the first step on what it sampled"


def test_a_sampler_that_stays_at_version_0(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch)
    job.trainer.checkpoint_manager.update_weights = losing(job, *range(1, 1000))
    with pytest.raises(RuntimeError, match="the transfer to vLLM"):
        job.run(None)
    assert job.trainer.global_steps == 5 and job.sampled == [0] * 5


def test_a_transfer_to_one_of_two_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, servers=2)

    def send(version: int) -> None:
        job.transfer(version)
        if version:
            job.servers[1].model.weight.data.fill_(-1)

    job.trainer.checkpoint_manager.update_weights = send
    with pytest.raises(RuntimeError, match="vLLM's workers do not hold the same weights"):
        job.run(None)
    assert job.trainer.global_steps == 4


def test_a_validation_of_weights_that_did_not_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the row would claim the accuracy of weights that it does not have."""
    job = Job(monkeypatch)
    job.trainer.checkpoint_manager.update_weights = losing(job, 2)
    with pytest.raises(RuntimeError, match="the transfer to vLLM for validation"):
        job.run(2)
    assert job.evaluated == [0] and job.trainer.global_steps == 2


def test_weights_that_do_not_come_back_from_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch)
    job.servers[0].worker.pth_restore = lambda: None
    with pytest.raises(RuntimeError, match="the sampler, back from validation"):
        job.run(2)
    assert job.trainer.global_steps == 2


def test_weights_that_move_while_they_should_be_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch)
    learn = job._learn

    def and_leak() -> None:
        learn()
        job.servers[0].model.load_state_dict(job.learner.state_dict())

    monkeypatch.setattr(hooks.PPOTrainer, "_update_actor", lambda trainer, batch, metrics: and_leak())
    with pytest.raises(RuntimeError, match="the frozen sampler"):
        job.run(None)
    assert job.trainer.global_steps == 2


def test_what_validation_cached_would_be_sampled_from_if_it_stayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fingerprints do not see it: the weights are right. So a cache that stays is an error of the server itself, below."""
    job = Job(monkeypatch)
    job.servers[0].clear_kv_cache = Method(lambda: None)
    job.transfer = lambda version: job.servers[0].model.load_state_dict(job.learner.state_dict())  # type: ignore[method-assign]
    job.trainer.checkpoint_manager.update_weights = job.transfer
    job.run(2)
    assert job.sampled == [0] * UPDATES, "the answers of update 0 all along"


@pytest.mark.parametrize("kept", [True, False])
def test_a_prefix_cache_that_vllm_keeps_is_an_error(monkeypatch: pytest.MonkeyPatch, kept: bool) -> None:
    """vLLM says whether it has emptied its cache, which it does not while requests are running."""
    cleared: list[str] = []

    async def reset_prefix_cache() -> bool:
        return not kept

    async def clear(self: Any) -> None:
        cleared.append("cleared")

    monkeypatch.setattr(vLLMHttpServer, "clear_kv_cache", clear)
    server = object.__new__(Server)
    server.node_rank, server.engine = 0, SimpleNamespace(reset_prefix_cache=reset_prefix_cache)
    if kept:
        with pytest.raises(RuntimeError, match="prefix cache would outlive its weights"):
            asyncio.run(server.clear_kv_cache())
    else:
        asyncio.run(server.clear_kv_cache())
    assert cleared == ([] if kept else ["cleared"])
