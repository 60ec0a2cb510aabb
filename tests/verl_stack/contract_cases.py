"""What both stacks are asked in the contract suite, and the form in which they answer.

Imported by the tests and by each stack's driver, in that stack's own interpreter. A case is one optimiser step on one batch: the
config of a run, and how the batch is divided. Both drivers start from the weights and the responses in the inputs' folder.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pth_exp import schema
from pth_exp.armfiles import CONF, arm_paths, read_arm
from pth_exp.schema import Aggregation, KlConfig, KlEstimator

PROMPTS, RESPONSES, TOKENS = 4, 4, 48
SEEDS = (None, 0, 5, 43)
BATCHES = 9
"""Of prompts, drawn from 16 problems by 3: an epoch has 5 and leaves one problem out."""
ARMS = list(arm_paths(CONF))
KL = KlConfig(coef=0.1, estimator=KlEstimator.k3, clamp=10.0, aggregation=Aggregation.token_mean)


@dataclass(frozen=True)
class Case:
    """One step.

    Attributes:
        arm: the arm's option.
        fields: what differs from the common config; ``a__b`` is field ``a.b``.
        micro: responses of one forward pass of a rank; None: all it has.
        ranks: of verl's learner. The trainer has one, and its answer is the one expected of any number.
    """

    arm: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    micro: int | None = None
    ranks: int = 1

    @property
    def alone(self) -> Case:
        """The same step on one rank."""
        return dataclasses.replace(self, ranks=1)

    @property
    def name(self) -> str:
        changed = [f"{path.replace('__', '.')}={value}" for path, value in self.fields.items()]
        parts = [f"micro={self.micro}"] * (self.micro is not None) + [f"ranks={self.ranks}"] * (self.ranks > 1)
        return " ".join([self.arm, *changed, *parts])

    def config(self, stack: str, **more: Any) -> schema.Config:
        """The run's config, with ``more`` fields changed; on both stacks the same but for the stack."""
        arm = read_arm(self.arm, CONF).arm
        if isinstance(getattr(arm, "norm_tokens", None), str):
            arm = dataclasses.replace(arm, norm_tokens=float(TOKENS))
        config = schema.Config(
            arm=arm,
            stack=self._stack(stack),
            task=schema.ArithmeticTask("arithmetic", train_problems=16, test_problems=16),
            model=schema.ModelConfig("embedded", "embedded"),
            kl=dataclasses.replace(KL),
            seeds=schema.Seeds(data=5, sampling=5, init=5),
            validation=schema.ValidationConfig(every=None, problems=4),
            optimizer=schema.OptimizerConfig(eps=1e-3),  # a step is then no larger than the difference of gradients that it shows
            lr=1e-3,
            updates=1,
            prompts_per_update=PROMPTS,
            responses_per_prompt=RESPONSES,
            max_response_tokens=TOKENS,
        )
        for path, value in {**self.fields, **more}.items():
            *parents, leaf = path.split("__")
            node: Any = config
            for parent in parents:
                node = getattr(node, parent)
            assert hasattr(node, leaf), path
            setattr(node, leaf, value)
        return schema.build(dataclasses.asdict(config))  # what stands as text in an arm's file becomes a member of its enum

    def _stack(self, name: str) -> schema.StackConfig:
        if name == "verl":
            return schema.VerlStack("verl", checkpoint_every=None, device="cpu", ranks=self.ranks, micro_batch_rows=self.micro)
        if self.micro is None:
            return schema.TrainerStack("trainer", device="cpu", micro_batch_tokens=10_000)
        # parts of at most so many padded tokens, and a backward pass of their own
        return schema.TrainerStack(
            "trainer", device="cpu", micro_batch_tokens=self.micro * TOKENS, activations=schema.Activations.micro_batch
        )


def cases() -> list[Case]:
    """The table. Every arm, in parts and on two ranks where its loss is a sum over responses, and what else a step depends on."""
    from pth_exp.losses import get_loss

    def splittable(case: Case) -> bool:
        arm = case.config("verl").arm
        return get_loss(arm.loss, **arm.parameters()).splittable

    whole = [Case(name) for name in ARMS]
    whole += [
        Case("mis_geo", {"arm__count_rejected": True, "arm__lower": 0.9, "arm__upper": 1.1}),
        Case("mis_geo", {"arm__lower": 0.9, "arm__upper": 1.1, "arm__weighted": True}),
        *(Case(name, {"arm__count_rejected": False}) for name in ("mis", "mis_seq", "icepop")),
        *(Case("ppo_clip", {"arm__aggregation": how, "arm__norm_tokens": 40.0}) for how in Aggregation),
    ]
    parts = [dataclasses.replace(case, micro=4) for case in whole if splittable(case)]
    ranks = [dataclasses.replace(case, ranks=2) for case in parts]
    step = [
        *(Case("san", {"kl__estimator": how, "kl__clamp": None}) for how in KlEstimator),
        *(Case("san", {"kl__aggregation": how}, 4, ranks) for how in list(Aggregation)[:3] for ranks in (1, 2)),
        Case("ppo_clip", {"kl__clamp": 0.01}),
        Case("grpo", {"kl__coef": 0.0}),
        Case("tis_ppo", {"temperature": 0.7}),
        Case("grpo", {"optimizer__steps_per_batch": 3}),
        *(Case("ppo_clip", {"optimizer__steps_per_batch": 3}, 4, ranks) for ranks in (1, 2)),
        Case("grpo", {"optimizer__max_grad_norm": None}),
        Case("grpo", {"optimizer__max_grad_norm": 1e-2}),
        Case("tis_reinforce", {"optimizer__weight_decay": 0.3, "optimizer__beta1": 0.5}),
        *(Case("tis_reinforce", {"optimizer__beta2": 0.9}, 2, ranks) for ranks in (1, 2)),
    ]
    return list({case.name: case for case in (*whole, *parts, *ranks, *step)}.values())


def drawing(stack: str, seed: int | None) -> schema.Config:
    """The config of a run of which only the prompts are asked."""
    return Case("grpo").config(stack, seeds__data=seed, prompts_per_update=3, updates=BATCHES, probe__first_batches=BATCHES)


@dataclass(frozen=True)
class Inputs:
    """The folder of what both stacks are given.

    ``learner/`` holds weights some way from the initial model's, which is the reference. ``batch.npz`` holds, by response in the
    order of prompts and numbers: ``tokens`` [B, T], ``lengths``, ``truncated`` and ``rewards`` [B], ``sampler_logp`` [B, T];
    and ``prompts`` [P], places in the training split.
    """

    folder: Path

    @property
    def learner(self) -> Path:
        return self.folder / "learner"

    def batch(self) -> dict[str, np.ndarray[Any, Any]]:
        with np.load(self.folder / "batch.npz") as held:
            return dict(held)


@dataclass(frozen=True)
class Answer:
    """What a step came to.

    Attributes:
        row: the update's row, without timings.
        arrays: by response and token ``logp``, ``old_logp``, ``ref_logp``, ``token_coef``, ``logp_grad``, and ``advantage``, of
            the first step on the batch; ``gradient/NAME`` as that step took it; ``weights/NAME`` after the last.
    """

    row: dict[str, Any]
    arrays: dict[str, np.ndarray[Any, Any]]

    def save(self, folder: Path, case: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        np.savez(folder / f"{case}.npz", row=json.dumps(self.row), **self.arrays)

    @classmethod
    def load(cls, folder: Path, case: str) -> Answer:
        with np.load(folder / f"{case}.npz") as held:
            arrays = dict(held)
        return cls(json.loads(str(arrays.pop("row"))), arrays)
