"""The trainer's answers to the contract's cases. Run in the base interpreter: ``contract_trainer.py INPUTS [ANSWERS]``.

Without a folder for answers it makes the inputs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from contract_cases import BATCHES, PROMPTS, RESPONSES, SEEDS, Answer, Case, Inputs, cases, drawing
from safetensors.torch import load_file
from torch import Tensor

from pth_exp.probes.weights import fingerprint
from pth_exp.trainer import rows
from pth_exp.trainer.build import Run, build
from pth_exp.trainer.learner import UpdateReport
from pth_exp.trainer.rollout import Rollout


def prepare(inputs: Inputs) -> None:
    """Weights some way from the initial ones, and what they sample: responses of unequal length, some of them cut at the limit.

    The recorded q is that of a sampler which is not the learner, as under lag. One group's rewards are all 1, another's all 0.
    """
    run = build(Case("grpo").config("trainer"))
    model = run.learner.policy.model
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.05 * weight.std() * torch.randn(weight.shape, generator=noise)
    model.save_pretrained(inputs.learner)  # type: ignore[operator]
    run.tokenizer.save_pretrained(inputs.learner)
    run.sampler.refresh(model, 0)
    indices = run.order.batch(0)
    responses = run.sampler.generate([run.prompt(run.problems[i]) for i in indices], RESPONSES, 0)
    lengths = [len(r.tokens) for r in responses]
    tokens, logp = np.zeros((len(lengths), max(lengths)), np.int64), np.zeros((len(lengths), max(lengths)), np.float32)
    for row, response in enumerate(responses):
        tokens[row, : lengths[row]] = response.tokens
        logp[row, : lengths[row]] = np.minimum(response.logp + np.random.default_rng(row).normal(0, 0.3, lengths[row]), -1e-4)
    truncated = np.array([r.truncated for r in responses])
    ends_at_the_limit = int(np.flatnonzero(truncated)[0])  # as long as a truncated response, and whole
    tokens[ends_at_the_limit, -1], truncated[ends_at_the_limit] = run.sampler.ends[0], False
    rewards = np.array([[1.0, 1, 1, 1], [0, 0, 0, 0], [1, 0, 0, 1], [0, 0, 1, 0]], np.float32).reshape(-1)
    values = {"tokens": tokens, "lengths": lengths, "truncated": truncated, "rewards": rewards, "sampler_logp": logp}
    np.savez(inputs.folder / "batch.npz", prompts=indices, **values)


def rollout(run: Run, inputs: Inputs) -> Rollout:
    given = {name: torch.from_numpy(values) for name, values in inputs.batch().items()}
    return Rollout(
        draw=0,
        version=0,
        fingerprint="",
        prompts=tuple(run.prompt(run.problems[i]) for i in given["prompts"].tolist()),
        tokens=given["tokens"],
        mask=torch.arange(given["tokens"].shape[1]) < given["lengths"][:, None],
        lengths=given["lengths"],
        sampler_logp=given["sampler_logp"],
        truncated=given["truncated"],
        rewards=given["rewards"],
    )


def answer(case: Case, inputs: Inputs) -> Answer:
    config = case.config("trainer")
    run = build(config)
    model = run.learner.policy.model
    missing = model.load_state_dict(load_file(inputs.learner / "model.safetensors"), strict=False)
    assert set(missing.missing_keys) <= {"lm_head.weight"} and not missing.unexpected_keys
    gradients: dict[str, Tensor] = {}

    def keep(*_: Any) -> None:
        if not gradients:
            gradients.update({name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None})

    run.learner.optimizer.optimizer.register_step_pre_hook(keep)
    trained, before = rollout(run, inputs), fingerprint(model)
    advantage = run.advantages(trained.rewards, trained.group)
    report = run.learner.update(trained, advantage)
    row = rows.update_row(0, config, trained, [trained], run.arm, [], run.learner.optimizer.lr, before, report)
    arrays = {f"gradient/{name}": value for name, value in gradients.items()}
    arrays |= {f"weights/{name}": value.detach() for name, value in model.named_parameters()}
    return Answer(row, {name: value.numpy() for name, value in {**tensors(report), **arrays}.items()})


def tensors(report: UpdateReport) -> dict[str, Tensor]:
    """Of the first step on the batch, by response and token; zero where no token is."""
    first = report.steps[0]
    values = {
        **{name: getattr(first.batch, name) for name in ("logp", "old_logp", "ref_logp")},
        "token_coef": first.output.token_coef,
        "logp_grad": first.logp_grad,
    }
    masked = {name: value.masked_fill(~first.batch.mask, 0.0) for name, value in values.items() if value is not None}
    return {**masked, "advantage": first.batch.advantage}


def prompts(seed: int | None) -> list[list[str]]:
    """Prompt IDs, batch by batch."""
    run = build(drawing("trainer", seed))
    return [[run.prompt(run.problems[index]).id for index in run.order.batch(draw)] for draw in range(BATCHES)]


def main(inputs: Inputs, answers: Path | None) -> None:
    torch.set_num_threads(1)
    if answers is None:
        prepare(inputs)
        return
    assert len(inputs.batch()["prompts"]) == PROMPTS
    for case in {case.alone.name: case.alone for case in cases()}.values():
        answer(case, inputs).save(answers, case.name)
    (answers / "prompts.json").write_text(json.dumps([prompts(seed) for seed in SEEDS]))


if __name__ == "__main__":
    main(Inputs(Path(sys.argv[1])), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
