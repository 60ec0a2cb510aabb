"""The single-GPU trainer's loop: sample, score, identify, weigh, step, record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pth_exp.checkpoint import CheckpointStore, is_due
from pth_exp.probes import probe_equation
from pth_exp.probes.weights import fingerprint
from pth_exp.records.writer import RunRecorder
from pth_exp.schema import Config
from pth_exp.staleness.queue import ReplayQueue
from pth_exp.staleness.schedule import refreshes_at
from pth_exp.tasks.cut import cut_response
from pth_exp.trainer import rows
from pth_exp.trainer.build import Run, build, received
from pth_exp.trainer.learner import Clock
from pth_exp.trainer.rollout import Rollout, pad_rows
from pth_exp.trainer.sampler import greedy

STATE = "state.pt"
"""The one file of a checkpoint: plain values and tensors."""


class Outcome(StrEnum):
    completed = "completed"
    preempted = "preempted"


def run(config: Config, recorder: RunRecorder, checkpoints: Path, should_stop: Callable[[], bool]) -> Outcome:
    """Trains as ``config`` says, from the newest checkpoint if there is one; a resumed run equals an uninterrupted one.

    ``should_stop`` is asked before every update; when it says yes, a checkpoint is written and the run ends there.
    Raises ValueError, naming the field and the remedy, for a config that this stack cannot run.
    """
    parts = build(config)
    learner, sampler = parts.learner, parts.sampler
    queue: ReplayQueue[Rollout] = ReplayQueue(config.queue, config.replay_age)
    store = CheckpointStore(checkpoints, parts.stack.keep_checkpoints, recorder.settle)
    first_batches: list[list[str]] = []
    recorder.received(received(parts))

    start = 0
    if (newest := store.newest()) is not None:
        start = _restore(newest, parts, queue, first_batches)
    elif config.validation.every is not None:
        _validate(parts, recorder, 0)
    # Section 4.4: the loss that trains against the equation that its arm writes down, in this process.
    recorder.equation({"update": start, **probe_equation(config.arm, parts.loss)})

    for update in range(start, config.updates):
        if should_stop():
            _save(store, update, parts, queue, first_batches)
            return Outcome.preempted
        clock = Clock(learner.policy.device)

        # Sample and score. The sampler takes the learner's weights only every so often, and records log q as it draws a token.
        if refreshes_at(update, config.refresh_interval):
            sampler.refresh(learner.policy.model, update)
        drawn = [_sample(parts, draw) for draw in queue.draws(update)]
        # Paper, section 4.2: these prompt IDs, in drawn order, show which data seed reached this run.
        _note_first_batches(recorder, first_batches, drawn, config, update)
        clock.lap("gen")

        # Identify. Section 4.3: the queue decides on which batch this update trains; a warm-up repeats the first one.
        for rollout in drawn:
            queue.put(rollout.draw, rollout)
        trained = queue.take(update)
        weights_before = fingerprint(learner.policy.model)
        clock.lap("probe")

        # Weigh and step. Section 4.1: old_logp is what the sampler recorded, or the learner's own (``arm.old_policy``).
        # Section 4.4: the loss turns advantages and log-probabilities into the weight of each token.
        advantage = parts.advantages(trained.rewards, trained.group)
        report = learner.update(trained, advantage)
        clock.lap("update_actor")

        done = update + 1
        if is_due(done, config.validation.every, config.updates):
            _validate(parts, recorder, done)
            clock.lap("validate")

        # Record.
        lr = learner.optimizer.lr
        row = rows.update_row(update, config, trained, drawn, parts.arm, parts.shadows, lr, weights_before, report)
        batch_row = rows.batch_row(update, trained, drawn, report)
        clock.lap("probe")
        recorder.batch(batch_row)
        clock.lap("records")
        recorder.update({**row, **rows.timings(clock.seconds, report.ref_seconds)})

        if is_due(done, parts.stack.checkpoint_every, config.updates):
            _save(store, done, parts, queue, first_batches)
    return Outcome.completed


def _sample(parts: Run, draw: int) -> Rollout:
    """Draws batch ``draw`` from the sampler and scores it."""
    config = parts.config
    problems = [parts.problems[index] for index in parts.order.batch(draw)]
    prompts = [parts.prompt(problem) for problem in problems]
    weights = parts.sampler.fingerprint()
    responses = parts.sampler.generate(prompts, config.responses_per_prompt, draw)
    cuts = [cut_response(r.tokens, parts.text, config.task.cut_at) for r in responses]
    rewards = [parts.task.score(cut.text, problems[row // config.responses_per_prompt]) for row, cut in enumerate(cuts)]
    lengths = torch.tensor([len(r.tokens) for r in responses])
    trains = lengths if config.task.train_after_cut else torch.tensor([cut.kept for cut in cuts])
    tokens = pad_rows([r.tokens for r in responses], torch.int64)
    return Rollout(
        draw=draw,
        version=parts.sampler.version,
        fingerprint=weights,
        prompts=tuple(prompts),
        tokens=tokens,
        mask=torch.arange(tokens.shape[1]) < trains[:, None],
        lengths=lengths,
        sampler_logp=pad_rows([r.logp for r in responses], torch.float32) if parts.stack.record_sampler_logp else None,
        truncated=torch.tensor([r.truncated for r in responses]),
        rewards=torch.tensor(rewards, dtype=torch.float32),
    )


def _validate(parts: Run, recorder: RunRecorder, update: int) -> None:
    """Greedy decoding of the fixed test problems by the learner's weights; touches no sampler, stream or order."""
    config, sampler, learner = parts.config, parts.sampler, parts.learner
    before = sampler.fingerprint()
    prompts = [parts.prompt(problem) for problem in parts.evaluation]
    responses = greedy(learner.policy, prompts, sampler.ends, sampler.limit, sampler.rows)
    texts = [cut_response(r.tokens, parts.text, config.task.cut_at).text for r in responses]
    correct = [int(parts.task.score(text, problem) == 1) for text, problem in zip(texts, parts.evaluation, strict=True)]
    recorder.evaluation(
        {
            "update": update,
            "accuracy": sum(correct) / len(correct),
            "correct": correct,
            "problems": [prompt.id for prompt in prompts],
            "decoding": {"greedy": True, "max_response_tokens": sampler.limit, "cut_at": config.task.cut_at},
            "policy_version": update,
            "sampler/fingerprint_before": before,
            "sampler/fingerprint_after": sampler.fingerprint(),
            "learner/fingerprint": fingerprint(learner.policy.model),
            "mean_length": sum(len(r.tokens) for r in responses) / len(responses),
        }
    )


def _note_first_batches(
    recorder: RunRecorder, noted: list[list[str]], drawn: Sequence[Rollout], config: Config, update: int
) -> None:
    """Writes the prompt IDs of the first batches once all of them have been drawn, or no more will be."""
    wanted = config.probe.first_batches
    if len(noted) >= wanted:
        return
    noted += [[prompt.id for prompt in rollout.prompts] for rollout in drawn][: wanted - len(noted)]
    if len(noted) == wanted or update == config.updates - 1:
        recorder.first_batches(noted)


def _save(store: CheckpointStore, update: int, parts: Run, queue: ReplayQueue[Rollout], first_batches: list[list[str]]) -> None:
    """All that the rest of the run depends on. Streams and data order are keyed by draw, so the queue's position is theirs."""
    held = queue.state()
    state = {
        "update": update,
        "learner": _weights(parts.learner.policy.model),
        "optimizer": parts.learner.optimizer.state(),
        "sampler": _weights(parts.sampler.policy.model),
        "sampler_version": parts.sampler.version,
        "queue": {**held, "batches": {draw: rollout.state() for draw, rollout in held["batches"].items()}},
        "first_batches": first_batches,
    }
    with store.writing(update) as folder:
        torch.save(state, folder / STATE)


def _restore(newest: Path, parts: Run, queue: ReplayQueue[Rollout], first_batches: list[list[str]]) -> int:
    """Puts back what ``_save`` wrote; returns the number of updates done."""
    state: dict[str, Any] = torch.load(newest / STATE, map_location="cpu", weights_only=True)
    _load_weights(parts.learner.policy.model, state["learner"])
    parts.learner.optimizer.load_state(state["optimizer"])
    _load_weights(parts.sampler.policy.model, state["sampler"])
    parts.sampler.version = state["sampler_version"]
    held = state["queue"]
    queue.load_state({**held, "batches": {draw: Rollout.from_state(saved) for draw, saved in held["batches"].items()}})
    first_batches[:] = state["first_batches"]
    return int(state["update"])


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@torch.no_grad()
def _load_weights(model: nn.Module, saved: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.copy_(saved[name])
