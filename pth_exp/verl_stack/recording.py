"""From what verl hands out to the project's records: the rows are those of the trainer stack, made by the same functions."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pth_exp.losses.types import LossOutput, TokenBatch
from pth_exp.models.load import load_special_tokens
from pth_exp.probes import Shadow
from pth_exp.records.fields import EXTRA
from pth_exp.records.writer import RunRecorder
from pth_exp.schema import Config
from pth_exp.tasks import Problem
from pth_exp.tasks.prompts import prompt_id, render
from pth_exp.trainer import rows
from pth_exp.trainer.build import bind
from pth_exp.trainer.learner import StepReport, UpdateReport
from pth_exp.trainer.optimizer import GradientReport
from pth_exp.trainer.rollout import Prompt, Rollout, pad_rows
from pth_exp.verl_stack.loss import Row, StepParts


class Recording:
    """One run's records.

    Args:
        config: the run's.
        recorder: writes them.
        training: the training split.
        evaluation: the fixed subset of the test split.
        tokenizer: the model's.

    Attributes:
        first_batches: prompt IDs of the first batches, as far as they were drawn by this attempt and those before.
    """

    def __init__(
        self, config: Config, recorder: RunRecorder, training: Sequence[Problem], evaluation: Sequence[Problem], tokenizer: Any
    ) -> None:
        self._config, self._recorder, self._tokenizer = config, recorder, tokenizer
        self._training, self._evaluation = training, evaluation
        self._ends = load_special_tokens(config.model, tokenizer).eos
        self._arm = bind(config.arm.name, config.arm)
        self._shadows: list[Shadow] = [bind(name, arm) for name, arm in config.probe.shadows.items()]
        self._prompts: list[Prompt] = []
        self.first_batches: list[list[str]] = []
        self._weights_before, self._sampler = "", ""
        self._steps: list[list[StepParts]] = []
        self._outcome: Mapping[str, Sequence[Any]] = {}

    def prompt(self, problem: Problem) -> Prompt:
        tokens = render(problem, self._tokenizer, self._config.task, self._config.max_prompt_tokens)
        return Prompt(problem.index, prompt_id(problem, tokens), tuple(tokens))

    def drawn(self, indices: Sequence[int]) -> None:
        """A batch of prompts, in the order in which verl drew them."""
        self._prompts = [self.prompt(self._training[index]) for index in indices]
        wanted = min(self._config.probe.first_batches, self._config.updates)
        if len(self.first_batches) < wanted:
            self.first_batches.append([prompt.id for prompt in self._prompts])
            if len(self.first_batches) == wanted:
                self._recorder.first_batches(self.first_batches)

    def in_drawn_order(self, found: Sequence[Row]) -> list[int]:
        """Places of the rows, ordered by prompt as drawn, then by response number; raises RuntimeError unless all are there."""
        wanted = [(prompt.index, n) for prompt in self._prompts for n in range(self._config.responses_per_prompt)]
        place = {row: i for i, row in enumerate(found)}
        missing = [row for row in wanted if row not in place]
        if missing or len(found) != len(wanted):
            raise RuntimeError(
                f"vLLM returned {len(found)} of {len(wanted)} responses (missing, as prompt and number: {missing[:4]}): a "
                "generation failed; the log says why"
            )
        return [place[row] for row in wanted]

    def hold(self, what: str, expected: str | None, found: str | None) -> None:
        """Hold the fingerprint of weights against the one they are claimed to have; raises RuntimeError. None: not measured."""
        if None not in (expected, found) and expected != found:
            raise RuntimeError(f"{what}: the weights have fingerprint {found}, and should have {expected}")

    def stepped(self, weights_before: str, sampler: str, steps: list[list[StepParts]]) -> None:
        """The optimiser steps of an update: by rank, then by step."""
        self._weights_before, self._sampler, self._steps = weights_before, sampler, steps

    def update(self, update: int, data: Any, versions: set[tuple[int, int]], seconds: Mapping[str, float]) -> None:
        """Write an update's rows."""
        begin = time.perf_counter()
        order = self.in_drawn_order(list(zip(_ints(data["index"]), _ints(data["session_id"]), strict=True)))
        ((version, newest),) = versions if len(versions) == 1 else [(None, None)]
        if version is None or version != newest:
            raise RuntimeError(f"update {update}: responses of one batch come from several versions of the weights: {versions}")
        columns = {name: [_row(value) for value in data[name]] for name in set(data.keys()) - {"index", "session_id"}}
        columns = {name: [values[i] for i in order] for name, values in columns.items()}
        trained = self._rollout(update, int(version), columns)
        reports = [self._step(list(parts), trained, columns) for parts in zip(*self._steps, strict=True)]
        report = UpdateReport(reports, ref_seconds=0.0)
        lr = next(part.lr for part in self._steps[0] if part.lr is not None)
        row = rows.update_row(
            update, self._config, trained, [trained], self._arm, self._shadows, lr, self._weights_before, report
        )
        batch = rows.batch_row(update, trained, [trained], report)
        self._recorder.batch(batch)
        timings = {f"timing_s/{name}": seconds.get(name) for name in ("gen", "old_log_prob", "ref", "update_actor", "step")}
        timings |= {"timing_s/validate": seconds.get("testing"), "timing_s/probe": time.perf_counter() - begin}
        self._recorder.update({**row, **timings, f"{EXTRA}timing_s/update_weights": seconds.get("update_weights")})

    def evaluated(self, outcome: Mapping[str, Sequence[Any]]) -> None:
        """What validation came to, row by row, in whatever order."""
        self._outcome = outcome

    def validated(self, update: int, before: str | None, evaluated: str | None, after: str | None) -> None:
        """Write a validation's row, once the sampler has its weights back."""
        by_problem = dict(
            zip(self._outcome["index"], zip(self._outcome["correct"], self._outcome["length"], strict=True), strict=True)
        )
        if len(by_problem) != len(self._evaluation):
            raise RuntimeError(
                f"validation: {len(by_problem)} of {len(self._evaluation)} problems were answered; the log says why"
            )
        results = [by_problem[place] for place in range(len(self._evaluation))]
        correct = [int(right) for right, _ in results]
        self._recorder.evaluation(
            {
                "update": update,
                "accuracy": sum(correct) / len(correct),
                "correct": correct,
                "problems": [self.prompt(problem).id for problem in self._evaluation],
                "decoding": {
                    "greedy": True,
                    "max_response_tokens": self._config.max_response_tokens,
                    "cut_at": self._config.task.cut_at,
                },
                "policy_version": update,
                "sampler/fingerprint_before": before,
                "sampler/fingerprint_after": after,
                "learner/fingerprint": evaluated,
                "mean_length": sum(int(length) for _, length in results) / len(results),
            }
        )

    def _rollout(self, update: int, version: int, columns: Mapping[str, list[Tensor]]) -> Rollout:
        responses, masks = columns["responses"], columns["response_mask"]
        lengths = torch.tensor([len(response) for response in responses])
        logp = columns.get("rollout_log_probs")
        return Rollout(
            draw=update,
            version=version,
            fingerprint=self._sampler,
            prompts=tuple(self._prompts),
            tokens=pad_rows([r.tolist() for r in responses], torch.int64),
            mask=pad_rows([m.tolist() for m in masks], torch.bool),
            lengths=lengths,
            sampler_logp=None if logp is None else pad_rows([row.tolist() for row in logp], torch.float32),
            truncated=torch.tensor([int(response[-1]) not in self._ends for response in responses]),
            rewards=torch.tensor([float(score.sum()) for score in columns["rm_scores"]]),
        )

    def _step(self, parts: list[StepParts], trained: Rollout, columns: Mapping[str, list[Tensor]]) -> StepReport:
        """One optimiser step on the whole batch, out of what each rank saw of it."""
        seen = [row for part in parts for row in part.rows]
        order = self.in_drawn_order(seen)

        def whole(values: list[list[Tensor]]) -> Tensor:
            flat = [row for rank in values for row in rank]
            return pad_rows([flat[i].tolist() for i in order], torch.float32, trained.tokens.shape[1])

        def padded(name: str) -> Tensor | None:
            values = columns.get(name)
            return None if values is None else pad_rows([v.tolist() for v in values], torch.float32, trained.tokens.shape[1])

        advantage = torch.tensor([float(row[0]) for row in columns["advantages"]])
        batch = TokenBatch(
            whole([p.logp for p in parts]),
            advantage,
            trained.mask,
            trained.sampler_logp,
            padded("old_log_probs"),
            padded("ref_log_prob"),
        )
        metrics = {name: sum(part.metrics[name] for part in parts) for name in parts[0].metrics}
        output = LossOutput(torch.tensor(sum(p.pg_loss for p in parts)), whole([p.token_coef for p in parts]), metrics)
        penalties = [p.kl_loss for p in parts if p.kl_loss is not None]
        norm, bound = parts[0].grad_norm, self._config.optimizer.max_grad_norm
        assert norm is not None
        return StepReport(
            batch=batch,
            output=output,
            loss=sum(p.loss for p in parts),
            kl_loss=sum(penalties) if penalties else None,
            logp_grad=whole([p.logp_grad for p in parts]),
            # verl takes no step with a gradient that is not finite
            gradient=GradientReport(norm, bound is not None and norm > bound, skipped=not math.isfinite(norm)),
        )


def _ints(values: Any) -> list[int]:
    values = values.tolist() if hasattr(values, "tolist") else values
    return [int(getattr(value, "data", value)) for value in values]


def _row(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else torch.as_tensor(value)
