"""Inside vLLM's worker: the weights under the names that the learner gives them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from pth_exp.probes.weights import fingerprint_of
from pth_exp.verl_stack.environment import environment


class Weights(vLLMColocateWorkerExtension):
    """Methods that vLLM adds to its worker."""

    def pth_fingerprint(self) -> str | None:
        """Of the weights as they are now; None where this worker holds only a part of each."""
        if self.vllm_config.parallel_config.world_size > 1:
            return None
        return fingerprint_of(separate(self.model_runner.model))

    def pth_received(self) -> dict[str, Any]:
        """What vLLM's own config objects hold, under the names that verl has for it; and this process's environment."""
        config = self.vllm_config
        model, scheduler, cache = config.model_config, config.scheduler_config, config.cache_config
        held = {
            "dtype": str(model.dtype).removeprefix("torch."),
            "max_model_len": model.max_model_len,
            "seed": model.seed,
            "logprobs_mode": str(model.logprobs_mode),
            "enforce_eager": model.enforce_eager,
            "enable_sleep_mode": model.enable_sleep_mode,
            "engine_kwargs.vllm.generation_config": model.generation_config,
            "max_num_seqs": scheduler.max_num_seqs,
            "enable_prefix_caching": cache.enable_prefix_caching,
            "gpu_memory_utilization": cache.gpu_memory_utilization,
            "tensor_model_parallel_size": config.parallel_config.tensor_parallel_size,
        }
        return {
            "held": {f"actor_rollout_ref.rollout.{name}": value for name, value in held.items()},
            "environment": environment(),
        }

    def pth_stash(self) -> None:
        """Keep a copy of the weights, as vLLM holds them, in host memory."""
        self._pth_stashed = self._pth_held()

    def pth_restore(self) -> None:
        """Put the copy back, to the last bit, and drop it."""
        self._pth_take(self._pth_stashed)
        del self._pth_stashed

    def pth_save(self, folder: str) -> str:
        """Write the weights, as vLLM holds them, to this worker's own file of a folder; the fingerprint of what it holds."""
        torch.save(self._pth_held(), self._pth_file(folder))
        return fingerprint_of(self.model_runner.model.named_parameters())

    def pth_load(self, folder: str) -> str:
        """Take the weights from this worker's own file; the fingerprint of what it holds then."""
        self._pth_take(torch.load(self._pth_file(folder), map_location="cpu", weights_only=True))
        return fingerprint_of(self.model_runner.model.named_parameters())

    def _pth_held(self) -> dict[str, Tensor]:
        return {name: value.detach().cpu().clone() for name, value in self.model_runner.model.named_parameters()}

    @torch.no_grad()
    def _pth_take(self, weights: dict[str, Tensor]) -> None:
        for name, parameter in self.model_runner.model.named_parameters():
            parameter.copy_(weights[name])

    def _pth_file(self, folder: str) -> Path:
        return Path(folder) / f"worker_{self.rank}.pt"


def separate(model: Any) -> Iterator[tuple[str, Tensor]]:
    """A vLLM model's parameters under their Hugging Face names: fused ones taken apart, padded vocabularies cut.

    vLLM keeps the projections of a layer in one matrix (``packed_modules_mapping``) and pads a vocabulary to a multiple of 64.
    """
    packed = getattr(model, "packed_modules_mapping", {})
    modules = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        prefix, _, leaf = name.rpartition(".")
        outer, _, own = prefix.rpartition(".")
        module = modules[prefix]
        if hasattr(module, "org_vocab_size"):
            yield name, parameter[: module.org_vocab_size]
        elif own in packed and hasattr(module, "output_sizes"):
            for part, rows in zip(packed[own], parameter.split(list(module.output_sizes)), strict=True):
                yield f"{outer}.{part}.{leaf}", rows
        else:
            yield name, parameter
