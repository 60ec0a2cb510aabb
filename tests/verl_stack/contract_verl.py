"""verl's answers to the contract's cases. Run in verl's interpreter: ``contract_verl.py INPUTS ANSWERS RANK RANKS``.

verl's own trainer goes through its own steps, with the stack's hooks, workers, loss and recorder in it. What is not there: Ray,
whose place a worker in this process takes; vLLM, whose responses are the given ones; and the queue between them, which is a dict.
Every rank goes through all of it; a worker is given its rank's share of the rows.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import transfer_queue
from contract_cases import BATCHES, SEEDS, Answer, Case, Inputs, cases, drawing
from contract_trainer import tensors
from omegaconf import DictConfig, open_dict
from tensordict import TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta
from verl.utils import tensordict_utils
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.workers.engine_workers import ActorRolloutRefWorker

from pth_exp.checkpoint import CheckpointStore
from pth_exp.models.load import load_tokenizer
from pth_exp.schema import Config
from pth_exp.trainer import rows
from pth_exp.trainer.learner import UpdateReport
from pth_exp.verl_stack import data, frozen, workers
from pth_exp.verl_stack.loss import Row, StepParts
from pth_exp.verl_stack.mapping import verl_config
from pth_exp.verl_stack.places import places, put
from pth_exp.verl_stack.recording import Recording
from pth_exp.verl_stack.trainer import LaggedTrainer
from pth_exp.verl_stack.workers import Actor, Training


class Queue:
    """verl's queue within one process: the fields of each row by its key."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}
        self.tags: dict[str, dict[str, Any]] = {}

    def kv_batch_put(
        self, keys: Sequence[str], partition_id: str, fields: TensorDict | None = None, tags: Sequence[Any] | None = None
    ) -> KVBatchMeta:
        for i, key in enumerate(keys):
            if fields is not None:
                self.rows.setdefault(key, {}).update({name: column[i] for name, column in fields.items()})
            if tags is not None:
                self.tags[key] = tags[i]
        return KVBatchMeta(keys=list(keys), tags=[self.tags[key] for key in keys], partition_id=partition_id)

    def kv_batch_get(self, keys: Sequence[str], partition_id: str, select_fields: Sequence[str] | None = None) -> TensorDict:
        wanted = [name for name in self.rows[keys[0]] if select_fields is None or name in select_fields]
        found = list_of_dict_to_tensordict([{name: self.rows[key][name] for name in wanted} for key in keys])
        for name in wanted:  # as verl's does, whether or not the rows are of one length
            column = [self.rows[key][name] for key in keys]
            if isinstance(column[0], Tensor) and column[0].dim():
                found[name] = torch.nested.as_nested_tensor(column, layout=torch.jagged)
        return found


class Group:
    """A worker group whose workers are in this process and its peers."""

    def __init__(self, actor: Any, reference: Any, queue: Queue) -> None:
        self.actor, self.reference, self.queue = actor, reference, queue
        self._dispatch_info = {"actor": list(range(dist.get_world_size()))}

    def compute_log_prob(self, batch: KVBatchMeta) -> KVBatchMeta:
        return self._on_shares(self.actor.compute_log_prob, batch)

    def compute_ref_log_prob(self, batch: KVBatchMeta) -> KVBatchMeta:
        return self._on_shares(self.reference.compute_ref_log_prob, batch)

    def update_actor(self, batch: KVBatchMeta) -> TensorDict:
        output: TensorDict = self.actor.update_actor(self._share(batch))
        return output

    def weights_fingerprint(self) -> list[str]:
        return [self.actor.weights_fingerprint()]

    def take_steps(self) -> list[list[StepParts]]:
        return _gathered(self.actor.take_steps())

    def _share(self, batch: KVBatchMeta) -> TensorDict:
        """This rank's rows, as verl's dispatch cuts a batch: rank after rank, in equal parts."""
        size = len(batch) // dist.get_world_size()
        keys = batch.keys[dist.get_rank() * size :][:size]
        share = self.queue.kv_batch_get(keys, batch.partition_id)
        tensordict_utils.assign_non_tensor(share, **copy.deepcopy(batch.extra_info))
        return share

    def _on_shares(self, method: Any, batch: KVBatchMeta) -> KVBatchMeta:
        output = method(self._share(batch))
        names = [name for name, column in output.items() if isinstance(column, Tensor)]
        whole = [dict(zip(names, row, strict=True)) for part in _gathered(_columns(output, names)) for row in part]
        return self.queue.kv_batch_put(batch.keys, batch.partition_id, list_of_dict_to_tensordict(whole))


def _columns(output: TensorDict, names: Sequence[str]) -> list[tuple[Tensor, ...]]:
    return list(zip(*(list(output[name].unbind()) for name in names), strict=True))


def _gathered(own: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return everyone


class Local(LaggedTrainer):
    """The stack's trainer on a group in this process."""

    def _inside(self, method: str) -> Any:
        return None  # there is no vLLM to ask


class Reference(ActorRolloutRefWorker):
    ref_worker_cls = Training


class Kept:
    """A recorder that keeps what it is told in memory."""

    def __init__(self) -> None:
        self.row: dict[str, Any] = {}
        self.batches: list[list[str]] = []

    def update(self, row: dict[str, Any]) -> None:
        self.row = {name: value for name, value in row.items() if "timing_s/" not in name}

    def batch(self, row: dict[str, Any]) -> None: ...

    def first_batches(self, batches: list[list[str]]) -> None:
        self.batches = batches


def answer(case: Case, inputs: Inputs, references: dict[int | None, Reference]) -> Answer:
    config = case.config("verl")
    _belong_to(config)
    verl = _verl(config)
    with open_dict(verl):
        verl.actor_rollout_ref.actor.optim.total_training_steps = 1
    learner = copy.deepcopy(verl.actor_rollout_ref)
    learner.model.path = str(inputs.learner)
    actor = Actor(config=learner, role="actor")
    actor.init_model()
    if case.micro not in references:
        references[case.micro] = Reference(config=copy.deepcopy(verl.actor_rollout_ref), role="ref")
        references[case.micro].init_model()
    gradients: dict[str, Tensor] = {}
    module = actor.actor.engine.module

    def keep(*_: Any) -> None:
        if not gradients:
            gradients.update({name: _full(weight.grad) for name, weight in module.named_parameters() if weight.grad is not None})

    actor.actor.engine.optimizer.register_step_pre_hook(keep)

    queue, kept = Queue(), Kept()
    trainer, recording = _trainer(config, verl, kept)
    trainer.actor_rollout_wg = trainer.ref_policy_wg = Group(actor, references[case.micro], queue)
    trainer.ref_in_actor, trainer.global_steps = False, 1
    trainer.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=[])
    batch = _given(inputs, recording, queue)
    trainer.replay_buffer = SimpleNamespace(sample=lambda **_: (batch, {}))
    for name in ("kv_batch_get", "kv_batch_put"):
        setattr(transfer_queue, name, getattr(queue, name))

    reports: list[UpdateReport] = []
    made = rows.update_row
    rows.update_row = lambda *arguments: reports.append(arguments[-1]) or made(*arguments)  # type: ignore[assignment,func-returns-value]
    try:
        trained = trainer._step_once({}, {}, config.prompts_per_update)
        trainer._compute_metrics(trained, {}, {}, global_steps=1, epoch=0)
    finally:
        rows.update_row = made

    arrays = {f"gradient/{name}": value for name, value in gradients.items()}
    arrays |= {f"weights/{name}": _full(value.detach()) for name, value in module.named_parameters()}
    return Answer(kept.row, {name: value.numpy() for name, value in {**tensors(reports[0]), **arrays}.items()})


def prompts(seed: int | None) -> list[list[str]]:
    """Prompt IDs, batch by batch, out of verl's own loader and sampler."""
    config = drawing("verl", seed)
    _belong_to(config)
    kept = Kept()
    trainer, _ = _trainer(config, _verl(config), kept)
    trainer.processor = None
    trainer._init_dataloader()
    for trainer.global_steps in range(1, BATCHES + 1):
        trainer._next_train_batch()
    return kept.batches


def _verl(config: Config) -> DictConfig:
    verl = verl_config(config)
    put(verl, places(config, Path("checkpoint"), (1, config.stack.ranks)))
    return verl


def _belong_to(config: Config) -> None:
    """Have this process be one of the run's."""
    for module in (data, workers, frozen):
        module.frozen_config = lambda: config  # type: ignore[assignment]


def _trainer(config: Config, verl: DictConfig, kept: Kept) -> tuple[Local, Recording]:
    tokenizer = load_tokenizer(config.model)
    recording = Recording(config, kept, data.problems_of("train"), data.problems_of("test"), tokenizer)  # type: ignore[arg-type]
    never = CheckpointStore(Path("no-such-folder"), keep=0)
    trainer = Local(verl, config, recording, lambda update: None, never)
    trainer.tokenizer = tokenizer
    return trainer, recording


def _given(inputs: Inputs, recording: Recording, queue: Queue) -> KVBatchMeta:
    """The given responses in the queue, as verl's agent loops leave them; in another order than they were drawn."""
    given = inputs.batch()
    recording.drawn(given["prompts"].tolist())
    count = len(given["lengths"]) // len(given["prompts"])
    found: list[tuple[Row, dict[str, Any]]] = []
    for row, length in enumerate(given["lengths"]):
        prompt = torch.tensor(recording._prompts[row // count].tokens)
        response = torch.from_numpy(given["tokens"][row, :length])
        score = torch.zeros(length)
        score[-1] = float(given["rewards"][row])
        mask = torch.ones(length, dtype=torch.int64)
        key = (int(given["prompts"][row // count]), row % count)
        fields = {
            "index": key[0],
            "session_id": key[1],
            "uid": f"prompt{key[0]}",
            "prompts": prompt,
            "responses": response,
            "input_ids": torch.cat([prompt, response]),
            "position_ids": torch.arange(len(prompt) + length),
            "response_mask": mask,
            "loss_mask": mask,
            "rollout_log_probs": torch.from_numpy(given["sampler_logp"][row, :length]),
            "rm_scores": score,
        }
        found.append((key, fields))
    found = found[1::2] + found[::2][::-1]
    keys = [f"prompt{prompt}_{number}_0" for (prompt, number), _ in found]
    tags = [{"min_global_steps": 0, "max_global_steps": 0, "seq_len": len(fields["input_ids"])} for _, fields in found]
    return queue.kv_batch_put(keys, "train", list_of_dict_to_tensordict([fields for _, fields in found]), tags)


def _full(value: Tensor) -> Tensor:
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()


def main(folder: Path, answers: Path, rank: int, ranks: int) -> None:
    """Answers the cases of so many ranks, as one of them."""
    meeting = answers / f"meeting-{ranks}"
    answers.mkdir(parents=True, exist_ok=True)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ |= {"DIST_INIT_METHOD": f"file://{meeting}", "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    references: dict[int | None, Reference] = {}
    for case in cases():
        if case.ranks == ranks:
            found = answer(case, Inputs(folder), references)
            if rank == 0:
                found.save(answers, case.name)
    if ranks == 1:
        (answers / "prompts.json").write_text(json.dumps([prompts(seed) for seed in SEEDS]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
