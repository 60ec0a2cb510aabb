"""CPU time of each arm's loss, forward and backward, on 64 responses of 512 tokens, against plain GRPO.

    python benchmarks/loss_time.py [ROUNDS]

One thread, float32. What is timed is what a stack calls: the registered loss with its token coefficients, then the backward
pass to ``logp``. The arms take turns within each round, and the ratio of medians to ``grpo`` is what counts.
"""

from __future__ import annotations

import os
import sys
import time
from statistics import median

os.environ["OMP_NUM_THREADS"] = "1"

import torch

from pth_exp.losses import BoundLoss, TokenBatch, get_loss, loss_names

RESPONSES, TOKENS = 64, 512


def batch() -> TokenBatch:
    """Responses of 128 to 512 tokens with the surprisals of a sharp policy; sampler and reference a few tenths of a nat away."""
    generator = torch.Generator().manual_seed(0)

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(RESPONSES, TOKENS, generator=generator)

    logp = -torch.rand(RESPONSES, TOKENS, generator=generator).pow(4) * 8
    lengths = torch.randint(TOKENS // 4, TOKENS + 1, (RESPONSES,), generator=generator)
    lengths[0] = TOKENS
    return TokenBatch(
        logp=logp.requires_grad_(),
        advantage=torch.randn(RESPONSES, generator=generator),
        mask=torch.arange(TOKENS) < lengths[:, None],
        sampler_logp=(logp.detach() + noise(0.3)).clamp(max=0),
        old_logp=(logp.detach() + noise(0.05)).clamp(max=0),
        ref_logp=(logp.detach() + noise(0.5)).clamp(max=0),
    )


def once(loss: BoundLoss, inputs: TokenBatch) -> float:
    """CPU-milliseconds of one evaluation and its backward pass."""
    inputs.logp.grad = None
    start = time.process_time()
    torch.autograd.backward(loss(inputs).loss)
    return 1e3 * (time.process_time() - start)


def bound(name: str) -> BoundLoss:
    """The loss with its default parameters; Dr. GRPO's constant has none, and is the width."""
    return get_loss(name, **({"norm_tokens": float(TOKENS)} if name == "dr_grpo" else {}))


def main(rounds: int) -> None:
    torch.set_num_threads(1)
    inputs = batch()
    losses = {name: bound(name) for name in loss_names()}
    times: dict[str, list[float]] = {name: [] for name in losses}
    for turn in range(rounds + 2):
        for name, loss in losses.items():
            spent = once(loss, inputs)
            if turn >= 2:  # the first two warm the allocator up
                times[name].append(spent)
    base = median(times["grpo"])
    print(f"{RESPONSES} x {TOKENS} tokens, forward and backward, medians of {rounds} rounds\n")
    print("| arm | CPU-ms | x grpo |\n|---|---|---|")
    for name in sorted(times, key=lambda n: median(times[n])):
        print(f"| {name} | {median(times[name]):.2f} | {median(times[name]) / base:.2f} |")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 30)
