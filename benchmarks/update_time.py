"""CPU time of one update of the trainer on the embedded model: 8 prompts, 8 responses each, with a reference, one thread.

    python benchmarks/update_time.py [ROUNDS]

Absolute times depend on the machine and on who shares it, so alternatives are measured in turn within each round, and the
ratio of medians to what ships is what counts. The `generate` of transformers on the same prompts is a yardstick elsewhere.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from pth_exp import schema
from pth_exp.losses import group_advantages
from pth_exp.records.writer import RunRecorder
from pth_exp.trainer import learner as learner_module
from pth_exp.trainer import loop, policy
from pth_exp.trainer.build import Run, build
from pth_exp.trainer.rollout import Rollout

MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}


def config(updates: int = 1) -> schema.Config:
    arm = schema.PpoClipArm("grpo", "grpo", "", "", schema.OldPolicy.recomputed, schema.Correction.none)
    return schema.Config(
        arm=arm,
        stack=schema.TrainerStack("trainer", device="cpu", checkpoint_every=None),
        task=schema.ArithmeticTask("arithmetic"),
        model=schema.ModelConfig("embedded", "embedded"),
        seeds=schema.Seeds(0, 0, 0),
        validation=schema.ValidationConfig(every=None),
        refresh_interval=96,
        updates=updates,
    )


def cpu_ms(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return 1e3 * (time.process_time() - start)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)


class PreallocatedLayer(DynamicLayer):
    """A cache layer that writes into a buffer with room for the whole response, instead of growing by concatenation."""

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
            self.keys, self.values = keys, values
            return keys, values
        length, room = self.keys.shape[2], getattr(self, "room", None)
        if room is None or room[0].shape[0] != len(self.keys):
            shape = (*self.keys.shape[:2], 128, self.keys.shape[3])
            room = self.room = (keys.new_empty(shape), values.new_empty(shape))
            room[0][:, :, :length], room[1][:, :, :length] = self.keys, self.values
        room[0][:, :, length : length + 1], room[1][:, :, length : length + 1] = keys, values
        self.keys, self.values = room[0][:, :, : length + 1], room[1][:, :, : length + 1]
        return self.keys, self.values


def preallocated_cache(config: Any) -> Any:
    cache = DynamicCache(config=config)
    cache.layers = [PreallocatedLayer() for _ in cache.layers]
    return cache


def whole_sequences(policy_: policy.Policy, rollout: Rollout, rows: torch.Tensor, shared: object) -> torch.Tensor:
    """Log-probabilities without sharing: every row carries its prompt through the model."""
    width = int(rollout.lengths[rows].max())
    prompts = [rollout.prompts[i].tokens for i in rollout.group[rows]]
    longest = max(map(len, prompts))
    left = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts])
    tokens = torch.cat([left, rollout.tokens[rows, :width]], dim=1)
    start = torch.tensor([longest - len(p) for p in prompts])[:, None]
    positions = torch.arange(tokens.shape[1]) - start
    output = policy_.model(
        input_ids=tokens,
        attention_mask=(positions >= 0).long(),
        position_ids=positions.clamp(min=0),
        use_cache=False,
        logits_to_keep=width + 1,
    )
    return policy_.log_probs(output.logits[:, :-1]).gather(2, rollout.tokens[rows, :width, None]).squeeze(2)


def alternatives(run: Run, rounds: int) -> None:
    prompts = [run.prompt(run.problems[i]) for i in run.order.batch(0)]
    rollout = loop._sample(run, 0)
    advantage = group_advantages(rollout.rewards, rollout.group)
    longest = max(len(p.tokens) for p in prompts)
    ids = torch.tensor([[0] * (longest - len(p.tokens)) + list(p.tokens) for p in prompts]).repeat_interleave(8, 0)
    mask = torch.tensor([[0] * (longest - len(p.tokens)) + [1] * len(p.tokens) for p in prompts]).repeat_interleave(8, 0)

    def generate() -> None:
        run.sampler.generate(prompts, 8, 0)

    def transformers_generate() -> None:
        run.sampler.policy.model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            max_new_tokens=run.sampler.limit,
            eos_token_id=list(run.sampler.ends),
            pad_token_id=0,
        )

    def update() -> None:
        run.learner.update(rollout, advantage)

    def with_(owner: Any, name: str, value: Any, work: Callable[[], None]) -> Callable[[], None]:
        def go() -> None:
            with replaced(owner, name, value):
                work()

        return go

    table: dict[str, dict[str, Callable[[], None]]] = {
        "generate": {
            "as shipped": generate,
            "transformers' generate": transformers_generate,
            "preallocated cache": with_(policy, "DynamicCache", preallocated_cache, generate),
        },
        "update with reference": {
            "as shipped": update,
            "prompts not shared": with_(learner_module, "_rows_log_probs", whole_sequences, update),
            **{f"micro_batch_tokens={n}": with_(run.learner, "micro_batch_tokens", n, update) for n in (512, 2048, 10**6)},
            "activations=micro_batch": with_(run.learner, "activations", schema.Activations.micro_batch, update),
            "AdamW foreach": with_(run.learner.optimizer, "optimizer", foreach(run), update),
        },
    }
    for part, variants in table.items():
        times: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(rounds):
            for name, work in variants.items():
                times[name].append(cpu_ms(work))
        base = median(times["as shipped"])
        for name, values in times.items():
            print(f"{part:<22} {name:<32} {median(values):7.1f} CPU-ms  {median(values) / base:5.2f} x")


def foreach(run: Run) -> torch.optim.Optimizer:
    return torch.optim.AdamW(run.learner.optimizer.masters, lr=1e-5, foreach=True)


def whole_updates(updates: int) -> None:
    """One run through the loop; the first updates are warm-up."""
    with tempfile.TemporaryDirectory() as folder, RunRecorder(Path(folder), 1, lambda: None) as recorder:
        start = time.process_time()
        loop.run(config(updates), recorder, Path(folder) / "checkpoint", lambda: False)
        total = time.process_time() - start
        rows = [json.loads(line) for line in (Path(folder) / "updates.0001.jsonl").read_text().splitlines()][2:]
    seconds = {
        part: median(row[f"timing_s/{part}"] for row in rows)
        for part in ("gen", "ref", "update_actor", "probe", "records", "step")
    }
    tokens = sum(row["tokens/trained"] for row in rows) / sum(row["timing_s/step"] for row in rows)
    print("wall ms: " + ", ".join(f"{part} {1e3 * value:.1f}" for part, value in seconds.items()), end="; ")
    share = (seconds["probe"] + seconds["records"]) / seconds["step"]
    print(f"{tokens:.0f} trained tokens/s; records and probes {share:.1%} of an update; {total:.1f} CPU-s in all")


def malloc(rounds: int) -> None:
    """The same loop in child processes, with and without glibc's raised thresholds, in turn."""
    for _ in range(rounds):
        for name, extra in (("default malloc", {}), ("raised thresholds", MALLOC)):
            environment = {k: v for k, v in os.environ.items() if k not in MALLOC} | extra
            print(f"{name:<18} ", end="", flush=True)
            subprocess.run([sys.executable, __file__, "loop"], env=environment, check=True)


def main(arguments: Sequence[str]) -> None:
    if list(arguments) == ["loop"]:
        return whole_updates(12)
    rounds = int(arguments[0]) if arguments else 7
    alternatives(build(config()), rounds)
    malloc(max(1, rounds // 3))


if __name__ == "__main__":
    main(sys.argv[1:])
