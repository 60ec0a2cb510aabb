"""The losses that verl has too, against verl's own functions: largest relative differences over 200 random batches.

    python benchmarks/verl_losses.py        (in an environment that has verl)

verl 0.9.1, float64, 8 responses of up to 64 tokens, log-ratios to old policy and sampler of 1e-4 to 2 nats:

| arm | in verl | value | gradient |
|---|---|---|---|
| grpo | vanilla | 1e-15 | 0 |
| tis_ppo | vanilla, rollout_is=token | 7e-15 | 0 |
| tis_seq | vanilla, rollout_is=sequence | 3e-15 | 0 |
| mis, two-sided, rejected tokens removed | the same, with rollout_rs=token_k1, 0.5_2.0 | 7e-15 | 0 |
| mis_geo | vanilla, rollout_rs=seq_mean_k1, 0.999_1.001 | 7e-16 | 0 |
| icepop with a dual clip of 3 | vanilla, rollout_is=token, 0.5_5.0, seq-mean-token-mean | 2e-8 | 1e-8 |
| gspo | gspo, seq-mean-token-mean | 1e-7 | 1e-8 |
| cispo | cispo, no lower bound | 1e-15 | 0 |

Where it is more than rounding it is the 1e-8 that verl adds to a response's number of tokens.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from pth_exp.losses import TokenBatch, get_loss


def main() -> None:
    from verl.trainer.ppo import core_algos, rollout_corr_helper  # type: ignore[import-not-found,unused-ignore]
    from verl.workers.config import FSDPActorConfig  # type: ignore[import-not-found,unused-ignore]

    def settings(low: float, high: float) -> Any:
        given = {"clip_ratio_low": low, "clip_ratio_high": high, "clip_ratio_c": 3.0}
        return FSDPActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **given)

    torch.manual_seed(0)
    worst: dict[str, tuple[float, float]] = {}
    for trial in range(200):
        spread = (1e-4, 0.02, 0.3, 2.0)[trial % 4]
        mask = torch.arange(64) < torch.randint(1, 65, (8, 1))
        logp = -3 * torch.rand(8, 64, dtype=torch.float64)
        old = logp + spread * torch.randn_like(logp)
        sampler = old + spread * torch.randn_like(logp)
        advantage = torch.randn(8, dtype=torch.float64) + 0.3
        counted, log_w = mask.double(), old - sampler

        def compare(
            arm: str,
            loss: str,
            mode: str,
            *,
            low: float = 0.2,
            high: float = 0.2,
            weights: str | None = None,
            threshold: str | float = 2.0,
            reject: tuple[str, str] | None = None,
            batch: TokenBatch = TokenBatch(logp, advantage, mask, sampler, old),  # noqa: B008  bound for this trial
            counted: Tensor = counted,
            log_w: Tensor = log_w,
            **parameters: Any,
        ) -> None:
            ours = get_loss(arm, **parameters)(batch)
            weight = None
            if weights is not None:
                weight, _ = rollout_corr_helper.compute_rollout_correction_weights(log_w, counted, weights, threshold)
            if reject is not None:
                counted, _ = rollout_corr_helper.compute_rollout_rejection_mask(log_w, counted, *reject)
            if not bool(counted.any()):
                return  # verl divides by zero
            leaf = batch.logp.clone().requires_grad_()
            function = getattr(core_algos, f"compute_policy_loss_{loss}")
            spread_advantage = batch.advantage[:, None].expand_as(leaf)
            theirs, _ = function(batch.old_logp, leaf, spread_advantage, counted, mode, settings(low, high), weight)
            (gradient,) = torch.autograd.grad(theirs, leaf)
            value = abs(ours.loss.item() - theirs.item()) / abs(theirs.item())
            slope = float((-ours.token_coef - gradient).norm() / gradient.norm().clamp(min=1e-300))
            before = worst.get(arm, (0.0, 0.0))
            worst[arm] = (max(before[0], value), max(before[1], slope))

        compare("grpo", "vanilla", "token-mean")
        compare("tis_ppo", "vanilla", "token-mean", weights="token")
        compare("tis_seq", "vanilla", "token-mean", weights="sequence")
        removed = {"upper": 2.0, "lower": 0.5, "count_rejected": False}
        compare("mis", "vanilla", "token-mean", weights="token", reject=("token_k1", "0.5_2.0"), **removed)
        compare("mis_geo", "vanilla", "token-mean", reject=("seq_mean_k1", "0.999_1.001"))
        compare("icepop", "vanilla", "seq-mean-token-mean", weights="token", threshold="0.5_5.0", dual_clip=3.0)
        compare("gspo", "gspo", "seq-mean-token-mean", low=3e-4, high=4e-4)
        compare("cispo", "cispo", "token-mean", low=1e9)
    print("| arm | value | gradient |\n|---|---|---|")
    for arm, (value, gradient) in worst.items():
        print(f"| {arm} | {value:.0e} | {gradient:.0e} |")


if __name__ == "__main__":
    if importlib.util.find_spec("verl") is None:
        print("verl is not installed here: nothing to compare with")
    else:
        main()
