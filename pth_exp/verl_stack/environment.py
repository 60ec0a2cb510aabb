"""What a process of a verl job has in its environment, by a written list: nothing that is not named here is ever recorded."""

from __future__ import annotations

import os

ALLOWED = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TOKENIZERS_PARALLELISM", "PYTHONHASHSEED", "HF_HUB_OFFLINE"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS", "CUBLAS_WORKSPACE_CONFIG", "PYTORCH_CUDA_ALLOC_CONF"),
    *("NCCL_DEBUG", "NCCL_CUMEM_ENABLE", "NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "TORCHDYNAMO_DISABLE"),
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "TRANSFER_QUEUE_ENABLE"),
    *("PTH_FROZEN", "PTH_FROZEN_SHA256", "PTH_PLACE", "PTH_JOB_ID", "PTH_VERL_CPU", "PTH_RAY_ADDRESS"),
    *("RAY_DEDUP_LOGS", "RAY_USAGE_STATS_ENABLED", "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"),
    *("VERL_PLATFORM", "VERL_ENGINE_DEVICE", "VERL_FULL_DETERMINISM", "VERL_LOGGING_LEVEL"),
    *("VLLM_USE_V1", "VLLM_ATTENTION_BACKEND", "VLLM_BATCH_INVARIANT", "VLLM_LOGGING_LEVEL", "VLLM_NO_USAGE_STATS"),
    *("VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_WORKER_MULTIPROC_METHOD", "VLLM_ENABLE_V1_MULTIPROCESSING"),
)  # fmt: skip
"""Names, not patterns: RAY_AUTH_TOKEN and VLLM_API_KEY begin as others do."""


def environment() -> dict[str, str]:
    """This process's, as far as the list goes."""
    return {name: os.environ[name] for name in ALLOWED if name in os.environ}
