"""vLLM on a CPU, loaded by every vLLM process through the entry point ``vllm.general_plugins``; does nothing unless asked for."""

from __future__ import annotations

from typing import Any

from pth_exp.verl_stack.switch import on_cpu


def register() -> None:
    """Keep linear weights as they are loaded.

    vLLM's CPU build packs each weight for its kernels and throws the original away, so that a later transfer of weights finds no
    parameter to load into, and the job hangs.
    """
    if not on_cpu():
        return
    import torch.nn.functional as F
    from vllm.model_executor.layers import utils

    def keep(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = F.linear

    utils.dispatch_cpu_unquantized_gemm = keep
