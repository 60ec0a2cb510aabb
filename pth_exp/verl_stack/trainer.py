"""verl's v1 trainer with a lagged sampler, and with the project's records in place of its metrics."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import ray
import ray.exceptions
import torch
import transfer_queue
from omegaconf import DictConfig
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from pth_exp.checkpoint import CheckpointStore, is_due
from pth_exp.schema import Config
from pth_exp.staleness.schedule import refreshes_at, sampler_version
from pth_exp.tasks.order import PromptOrder
from pth_exp.verl_stack.checkpoint import DATA, LEARNER, SAMPLER, State
from pth_exp.verl_stack.recording import Recording
from pth_exp.verl_stack.workers import Actor


class Preempted(Exception):
    """The run was asked to stop, and has, before an update; a checkpoint is written."""


class LaggedTrainer(PPOTrainer):
    """vLLM takes the learner's weights on every N-th update only; validation borrows it and gives the weights back.

    Args:
        verl: verl's config.
        config: the run's.
        recording: writes the records.
        before_update: called with the number of each update before it starts; may raise ``Preempted``.
        store: the run's checkpoints; training goes on from the newest.
    """

    def __init__(
        self,
        verl: DictConfig,
        config: Config,
        recording: Recording,
        before_update: Callable[[int], None],
        store: CheckpointStore,
    ) -> None:
        super().__init__(verl)
        self.replay_buffer.poll_interval = 0.05  # seconds; verl's own 2 are longer than a small update
        self._run, self._recording, self._before_update = config, recording, before_update
        self._sampler_version = 0
        self._sampler_fingerprint: str | None = None
        self._before_validation: str | None = None
        self._store, self._resumed = store, store.newest()
        self._saved: int | None = None

    def _init_dataloader(self) -> None:
        super()._init_dataloader()
        self._order = PromptOrder(len(self.train_dataset), self._run.prompts_per_update, self._run.seeds.data)

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        for role in (Role.ActorRollout, Role.ActorRolloutRef):
            if role in self.role_worker_mapping:
                self.role_worker_mapping[role] = ray.remote(Actor)

    # ---------------------------------------------------------------------------------------------- the sampler's weights

    def on_init_end(self) -> None:
        if self._resumed is None:
            self._refresh(0)
        else:
            self._restore_sampler(self._resumed)

    def on_step_begin(self) -> None:
        done = int(self.global_steps) - 1
        try:
            self._before_update(done)
        except Preempted:
            self._save(done)
            raise
        expected = sampler_version(done, 0, self._run.refresh_interval)
        if self._sampler_version != expected:
            raise RuntimeError(
                f"update {done}: the sampler has version {self._sampler_version} of the weights; with refresh_interval="
                f"{self._run.refresh_interval} it must have version {expected}"
            )
        self._declare(expected)

    def on_sample_end(self) -> None: ...

    def on_step_end(self) -> None:
        """After this update's step; ``global_steps`` counts from 1, so it is the number of the next update."""
        done = int(self.global_steps)
        if done < self._run.updates and refreshes_at(done, self._run.refresh_interval):
            self._refresh(done)

    def on_validate_begin(self) -> None:
        """Validation uses the learner's weights; the sampler's are put aside inside vLLM."""
        self._before_validation = self._inside("pth_fingerprint")
        self._inside("pth_stash")
        self.checkpoint_manager.update_weights(int(self.global_steps))
        learner = self.actor_rollout_wg.weights_fingerprint()[0]
        self._recording.hold("the transfer to vLLM for validation", learner, self._inside("pth_fingerprint"))

    def on_validate_end(self) -> None:
        evaluated = self._inside("pth_fingerprint")
        self._inside("pth_restore")
        self._declare(self._sampler_version)
        after = self._inside("pth_fingerprint")
        self._recording.hold("the sampler, back from validation", self._before_validation, after)
        self._recording.validated(int(self.global_steps), self._before_validation, evaluated, after)

    def _refresh(self, version: int) -> None:
        """Send the learner's weights, which have seen ``version`` updates, and see which have arrived."""
        self.checkpoint_manager.update_weights(version)
        self._sampler_version = version
        self._sampler_fingerprint = self._inside("pth_fingerprint")

    def _declare(self, version: int) -> None:
        """Tell vLLM which weights are in it, and have it forget what it cached: a draw depends on weights and seeds alone."""
        for server in self.llm_server_manager.server_handles:
            ray.get([server.clear_kv_cache.remote(), server.set_global_steps.remote(version)])

    def _inside(self, method: str) -> Any:
        """What all of vLLM's workers agree on; raises RuntimeError when they do not."""
        servers = self.llm_server_manager.server_handles
        answers = [answer for worker in ray.get([s.on_workers.remote(method) for s in servers]) for answer in worker]
        if any(answer != answers[0] for answer in answers):
            raise RuntimeError(f"vLLM's workers do not hold the same weights: {method} gives {answers}")
        return answers[0]

    # -------------------------------------------------------------------------------------------------------- checkpoints

    def fit(self, agent_loop_manager: Any) -> None:
        if self._resumed is not None:
            self.config.trainer.val_before_train = False  # an earlier attempt has
        try:
            super().fit(agent_loop_manager)
        except RuntimeError:
            self._ask_vllm()
            raise

    def _ask_vllm(self) -> None:
        """Raise vLLM's own error if it has one: verl tells of samples that are missing, not why."""
        with contextlib.suppress(ray.exceptions.GetTimeoutError):
            ray.get([s.on_workers.remote("pth_fingerprint") for s in self.llm_server_manager.server_handles], timeout=30)

    def _save(self, done: int) -> None:
        """Write what `pth_exp.verl_stack.checkpoint` lists, unless it has been written."""
        if self._saved == done:
            return
        sampler, servers = self._inside("pth_fingerprint"), self.llm_server_manager.server_handles
        self._recording.hold("the sampler, about to be saved", self._sampler_fingerprint, sampler)
        with self._store.writing(done) as folder:
            (folder / SAMPLER).mkdir()
            self.actor_rollout_wg.save_checkpoint(str(folder / LEARNER), None, done)
            torch.save(self.train_dataloader.state_dict(), folder / DATA)
            state = State(
                update=done,
                sampler_version=self._sampler_version,
                sampler_fingerprint=sampler,
                sampler_parts=ray.get(servers[0].on_workers.remote("pth_save", str(folder / SAMPLER))),
                learner_fingerprint=self.actor_rollout_wg.weights_fingerprint()[0],
                first_batches=self._recording.first_batches,
            )
            state.write(folder)
        self._saved = done

    def _load_checkpoint(self) -> None:
        """The learner and the position in the data. verl's own believes a file beside the checkpoints, and verifies nothing."""
        self.global_steps = 0
        if self._resumed is None:
            return
        saved = State.read(self._resumed)
        self._saved = self.global_steps = saved.update
        self.actor_rollout_wg.load_checkpoint(str(self._resumed / LEARNER))
        self.train_dataloader.load_state_dict(torch.load(self._resumed / DATA, weights_only=False))
        self._recording.first_batches = saved.first_batches
        learner = self.actor_rollout_wg.weights_fingerprint()[0]
        self._recording.hold(f"the learner restored from {self._resumed}", saved.learner_fingerprint, learner)

    def _restore_sampler(self, checkpoint: Path) -> None:
        """The weights that vLLM held, which a transfer of the learner's could not give back."""
        saved = State.read(checkpoint)
        for server in self.llm_server_manager.server_handles:
            parts = ray.get(server.on_workers.remote("pth_load", str(checkpoint / SAMPLER)))
            for number, (expected, found) in enumerate(zip(saved.sampler_parts, parts, strict=True)):
                self._recording.hold(f"vLLM's worker {number} restored from {checkpoint}", expected, found)
        self._declare(saved.sampler_version)
        self._sampler_version = saved.sampler_version
        self._sampler_fingerprint = self._inside("pth_fingerprint")
        self._recording.hold(f"the sampler restored from {checkpoint}", saved.sampler_fingerprint, self._sampler_fingerprint)

    # ----------------------------------------------------------------------------------------------- what goes on record

    def _next_train_batch(self, num_prompts: int | None = None) -> Any:
        batch = super()._next_train_batch(num_prompts)
        drawn, expected = [int(index) for index in _plain(batch["index"])], self._order.batch(int(self.global_steps) - 1)
        if drawn != expected:
            raise RuntimeError(
                f"draw {self.global_steps - 1}: verl drew the problems {drawn}; with seeds.data={self._run.seeds.data} it must "
                f"draw {expected}: its place in the data is not where the run is"
            )
        self._recording.drawn(drawn)
        return batch

    def _balance_batch(self, batch: Any, metrics: Any, *args: Any, **kwargs: Any) -> Any:
        """Rows come in the order in which their generation ended, which differs between identical runs: sort them first."""
        data = transfer_queue.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=["index", "session_id"]
        )
        rows = list(zip(map(int, _plain(data["index"])), map(int, _plain(data["session_id"])), strict=True))
        batch.reorder(self._recording.in_drawn_order(rows))
        return super()._balance_batch(batch, metrics, *args, **kwargs)

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        before = self.actor_rollout_wg.weights_fingerprint()[0]
        if self._sampler_version == self.global_steps - 1:
            self._recording.hold("the transfer to vLLM", before, self._sampler_fingerprint)
        sampler = self._inside("pth_fingerprint")
        self._recording.hold("the frozen sampler", self._sampler_fingerprint, sampler)
        batch = super()._update_actor(batch, metrics)
        self._recording.stepped(before, sampler, self.actor_rollout_wg.take_steps())
        return batch

    def _compute_metrics(self, batch: Any, metrics: Any, timing_raw: Any, global_steps: int, epoch: int) -> None:
        """Instead of verl's own metrics, which nothing reads."""
        fields = ["index", "session_id", "responses", "response_mask", "rm_scores", "advantages", "old_log_probs"]
        optional = ["rollout_log_probs"] * self._run.stack.record_sampler_logp + ["ref_log_prob"] * self.use_reference_policy
        data = transfer_queue.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=[*fields, *optional])
        versions = {(tag["min_global_steps"], tag["max_global_steps"]) for tag in batch.tags}
        done = int(global_steps)
        self._recording.update(done - 1, data, versions, timing_raw)
        if is_due(done, self._run.stack.checkpoint_every, self._run.updates):
            self._save(done)  # not where verl saves: a kill in between would leave an update without its row

    def _val_metrics_update(
        self, data_sources: Any, sample_uids: Any, reward_extra_infos_dict: Any, *args: Any, **kwargs: Any
    ) -> Any:
        self._recording.evaluated(reward_extra_infos_dict)
        return {"recorded": len(sample_uids)}


def _plain(values: Iterable[Any]) -> list[Any]:
    values = values.tolist() if hasattr(values, "tolist") else values
    return [getattr(value, "data", value) for value in values]
