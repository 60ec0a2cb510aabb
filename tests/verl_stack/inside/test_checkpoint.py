"""What a checkpoint of a verl run holds, and that a wrong restore ends the run. In verl's environment, without Ray and vLLM."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl", reason="not verl's environment: make verl")

import torch
from omegaconf import OmegaConf
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.trainer.ppo.utils import create_rl_sampler
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from pth_exp.checkpoint import CheckpointStore, update_of
from pth_exp.probes.weights import fingerprint, fingerprint_of
from pth_exp.tasks.order import PromptOrder
from pth_exp.verl_stack import trainer
from pth_exp.verl_stack.checkpoint import State
from pth_exp.verl_stack.recording import Recording
from pth_exp.verl_stack.trainer import LaggedTrainer, Preempted
from pth_exp.verl_stack.vllm_weights import Weights

INTERVAL, UPDATES, PROBLEMS, PROMPTS = 4, 12, 11, 3


class Remote:
    """A method as Ray's handles have it; `here` makes its reference the answer itself."""

    def __init__(self, method: Any) -> None:
        self.remote = method


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer.ray, "get", lambda answer: answer)


class Worker(Weights):
    """A vLLM worker that holds a model, which has no fused weights."""

    def __new__(cls, rank: int, model: nn.Module) -> Worker:
        """Not verl's, which prepares a process for vLLM."""
        return object.__new__(cls)

    def __init__(self, rank: int, model: nn.Module) -> None:
        self.rank, self.model_runner = rank, SimpleNamespace(model=model)
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=1))


class Server:
    def __init__(self, worker: Worker) -> None:
        self.worker, self.version, self.cleared = worker, -1, 0
        self.on_workers = Remote(lambda method, *arguments: [getattr(worker, method)(*arguments)])
        self.set_global_steps = Remote(lambda version: setattr(self, "version", version))
        self.clear_kv_cache = Remote(lambda: setattr(self, "cleared", self.cleared + 1))


class Learner:
    """verl's worker group, of one rank."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def weights_fingerprint(self) -> list[str]:
        return [fingerprint(self.model)]

    def save_checkpoint(self, folder: str, remote: None, step: int) -> None:
        Path(folder).mkdir()
        torch.save(self.model.state_dict(), Path(folder) / "model.pt")

    def load_checkpoint(self, folder: str) -> None:
        self.model.load_state_dict(torch.load(Path(folder) / "model.pt", weights_only=True))


def loader(seed: int | None) -> Any:
    """As verl makes it."""
    data = list(range(PROBLEMS))
    sampler = create_rl_sampler(OmegaConf.create({"shuffle": True, "seed": seed}), data)  # type: ignore[arg-type]
    return StatefulDataLoader(data, batch_size=PROMPTS, drop_last=True, collate_fn=_columns, sampler=sampler)  # type: ignore[arg-type]


def _columns(indices: list[int]) -> dict[str, Any]:
    return {"index": torch.tensor(indices), "raw_prompt": list(map(str, indices))}


class Job:
    """A lagged trainer between verl's objects, which are made of two linear layers and three servers."""

    def __init__(self, folder: Path, stop_before: int | None = None) -> None:
        torch.manual_seed(0)
        self.servers = [Server(Worker(0, nn.Linear(3, 2))) for _ in range(3)]
        self.learner = Learner(nn.Linear(3, 2))

        def before_update(update: int) -> None:
            if update == stop_before:
                raise Preempted

        made = LaggedTrainer.__new__(LaggedTrainer)
        made.config = OmegaConf.create({"trainer": {"val_before_train": True}})
        made._run = SimpleNamespace(  # type: ignore[assignment]
            updates=UPDATES,
            refresh_interval=INTERVAL,
            prompts_per_update=PROMPTS,
            seeds=SimpleNamespace(data=5),
            stack=SimpleNamespace(checkpoint_every=5),
        )
        made._recording = Recording.__new__(Recording)
        made._recording.first_batches = [["a", "b"]]
        made._before_update = before_update
        made._store = CheckpointStore(folder, keep=1)
        made._resumed, made._saved = made._store.newest(), None
        made._order = PromptOrder(PROBLEMS, PROMPTS, 5)
        made.actor_rollout_wg = self.learner
        made.llm_server_manager = SimpleNamespace(server_handles=self.servers)
        made.checkpoint_manager = SimpleNamespace(update_weights=self.transfer)
        made.train_dataloader, made.train_dataloader_it = loader(5), None
        self.trainer, self.drawn = made, list[list[int]]()

    def transfer(self, version: int) -> None:
        for server in self.servers:
            server.worker.model_runner.model.load_state_dict(self.learner.model.state_dict())
            server.version = version

    def start(self) -> int:
        self.trainer._load_checkpoint()
        self.trainer.on_init_end()
        return int(self.trainer.global_steps)

    @torch.no_grad()
    def update(self) -> None:
        """As verl's loop calls it; a step adds 1 to each weight."""
        self.trainer.global_steps += 1
        self.trainer.on_step_begin()
        batch = PPOTrainer._fetch_one_gen_batch(self.trainer)
        self.drawn.append(batch["index"].tolist())
        for weight in self.learner.model.parameters():
            weight += 1
        self.trainer.on_step_end()

    def held(self) -> tuple[str, set[tuple[str, int]], list[list[str]]]:
        """The learner's fingerprint, those inside vLLM with their versions, and the first batches."""
        inside = {(server.worker.pth_fingerprint() or "", server.version) for server in self.servers}
        return self.learner.weights_fingerprint()[0], inside, self.trainer._recording.first_batches


@pytest.mark.parametrize("stop", range(UPDATES))
def test_a_resumed_job_holds_what_the_stopped_one_held(tmp_path: Path, stop: int) -> None:
    """At every update: before the first, in mid-interval, on a refresh, at an end of the data (3 batches of 3 of 11 problems)."""
    whole = Job(tmp_path / "whole")
    whole.start()
    for _ in range(UPDATES):
        whole.update()

    stopped = Job(tmp_path / "stopped", stop_before=stop)
    stopped.start()
    with pytest.raises(Preempted):
        while True:
            stopped.update()
    assert [update_of(path) for path in (tmp_path / "stopped").iterdir()] == [stop]
    version = stop // INTERVAL * INTERVAL

    resumed = Job(tmp_path / "stopped")
    assert resumed.held() != stopped.held()
    assert resumed.start() == stop
    assert resumed.held() == stopped.held()
    assert {server.version for server in resumed.servers} == {version} and all(server.cleared for server in resumed.servers)
    for _ in range(stop, UPDATES):
        resumed.update()
    assert stopped.drawn + resumed.drawn == whole.drawn == [PromptOrder(PROBLEMS, PROMPTS, 5).batch(i) for i in range(UPDATES)]
    assert resumed.held() == whole.held()


@pytest.fixture
def stopped(tmp_path: Path) -> Job:
    """Stopped in mid-interval: the learner has seen 6 updates, the sampler's weights 4."""
    job = Job(tmp_path, stop_before=6)
    job.start()
    with pytest.raises(Preempted):
        while True:
            job.update()
    return job


def test_a_sampler_that_takes_no_weights_ends_the_run(stopped: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Worker, "_pth_take", lambda self, weights: None)
    with pytest.raises(RuntimeError, match=r"vLLM's worker 0 restored from .*update-00000006.* fingerprint \w+, and should have"):
        Job(tmp_path).start()


def test_a_sampler_that_takes_the_learner_s_weights_ends_the_run(
    stopped: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What verl does by itself: the lag would start anew."""
    monkeypatch.setattr(LaggedTrainer, "_restore_sampler", lambda self, checkpoint: self._refresh(int(self.global_steps)))
    job = Job(tmp_path)
    job.start()
    with pytest.raises(RuntimeError, match=r"update 6: the sampler has version 6 of the weights; .*=4 it must have version 4"):
        job.update()


def test_a_learner_that_is_not_restored_ends_the_run(stopped: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Learner, "load_checkpoint", lambda self, folder: None)
    with pytest.raises(RuntimeError, match=r"the learner restored from .*update-00000006.* should have"):
        Job(tmp_path).start()


def test_a_sampler_that_is_not_what_it_should_be_is_not_saved(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.start()
    with torch.no_grad():
        for server in job.servers:
            server.worker.model_runner.model.weight += 1
    with pytest.raises(RuntimeError, match="the sampler, about to be saved"):
        job.trainer._save(1)
    assert list(tmp_path.iterdir()) == []


def test_a_place_in_the_data_that_is_lost_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(tmp_path)
    drawn = iter([[3, 1, 2], job.trainer._order.batch(1)])
    monkeypatch.setattr(PPOTrainer, "_next_train_batch", lambda self, count: {"index": next(drawn)})
    monkeypatch.setattr(Recording, "drawn", lambda self, indices: None)
    job.trainer.global_steps = 1
    with pytest.raises(RuntimeError, match=r"draw 0: verl drew the problems \[3, 1, 2\]; with seeds.data=5 it must draw \["):
        job.trainer._next_train_batch()
    job.trainer.global_steps = 2
    job.trainer._next_train_batch()


@pytest.mark.parametrize("seed", [None, 0, 5])
def test_verls_order_is_the_project_s(seed: int | None) -> None:
    fake = SimpleNamespace(train_dataloader=loader(seed), train_dataloader_it=None)
    order = PromptOrder(PROBLEMS, PROMPTS, seed)
    for draw in range(9):
        assert PPOTrainer._fetch_one_gen_batch(fake)["index"].tolist() == order.batch(draw)  # type: ignore[arg-type]


def test_a_resumed_job_validates_nothing_before_it_trains(stopped: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(PPOTrainer, "fit", lambda self, manager: asked.append(self.config.trainer.val_before_train))
    for folder in (tmp_path, tmp_path / "another"):
        job = Job(folder)
        job.start()
        job.trainer.fit(None)
    assert asked == [False, True]


def test_the_state_is_read_as_it_was_written(tmp_path: Path) -> None:
    state = State(7, 4, None, ["x", "y"], "z", [["train:1:a"], []])
    state.write(tmp_path)
    assert State.read(tmp_path) == state


def test_each_worker_of_a_server_has_a_file_of_its_own(tmp_path: Path) -> None:
    """As tensor parallelism needs; what a worker holds is restored to the last bit, also where nothing equals itself."""
    torch.manual_seed(1)
    saved = [Worker(rank, nn.Linear(3, 2).to(torch.bfloat16)) for rank in range(2)]
    with torch.no_grad():
        saved[1].model_runner.model.weight[0, 0] = torch.nan
    parts = [worker.pth_save(str(tmp_path)) for worker in saved]
    assert parts[0] != parts[1]
    assert parts == [fingerprint_of(worker.model_runner.model.named_parameters()) for worker in saved]
    loaded = [Worker(rank, nn.Linear(3, 2).to(torch.bfloat16)) for rank in range(2)]
    assert [worker.pth_load(str(tmp_path)) for worker in loaded] == parts
