"""verl on a CPU: a platform, registered through verl's entry point ``verl.plugins`` and only when asked for.

verl loads this module whenever it is imported itself. Without ``PTH_VERL_CPU=1`` that does nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from pth_exp.verl_stack.switch import on_cpu


def _register() -> None:
    from verl.plugin.platform import PlatformBase, PlatformRegistry

    @PlatformRegistry.register(platform="cpu")
    class CpuPlatform(PlatformBase):
        """One logical GPU of Ray's stands for the CPU, so that verl's placement works unchanged."""

        device_name = "cpu"
        vendor_name = "cpu"
        device_module: ModuleType = _DeviceModule("torch.cpu")

        def is_available(self) -> bool:
            return True

        def current_device(self) -> Any:
            return "cpu"  # an index would mean cuda:N to torch

        def device_count(self) -> int:
            return 1

        def set_device(self, device_index: int) -> None: ...

        def synchronize(self, device_index: int | None = None) -> None: ...

        def manual_seed(self, seed: int) -> None:
            torch.manual_seed(seed)

        def manual_seed_all(self, seed: int) -> None:
            torch.manual_seed(seed)

        def set_allocator_settings(self, settings: str) -> None: ...

        def empty_cache(self) -> None: ...

        def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
            return None, None

        def communication_backend_name(self) -> str:
            return "gloo"

        def visible_devices_envvar(self) -> str:
            return "CUDA_VISIBLE_DEVICES"

        @contextmanager
        def nvtx_range(self, msg: str) -> Iterator[None]:
            yield

        def profiler_start(self) -> None: ...

        def profiler_stop(self) -> None: ...

        def ray_resource_name(self) -> str:
            return "GPU"

        def ray_noset_envvars(self) -> list[str]:
            return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

        def is_ipc_supported(self) -> bool:
            return False

        def cudart(self) -> Any:
            return None


class _DeviceModule(ModuleType):
    """``torch.cpu`` with the functions of ``torch.cuda`` that verl calls; a CPU has no memory of its own to report."""

    def __getattr__(self, name: str) -> Any:
        if name in ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved"):
            return lambda *_: 0
        if name in ("empty_cache", "ipc_collect", "reset_peak_memory_stats", "manual_seed", "manual_seed_all", "set_device"):
            return lambda *_: None
        if name == "mem_get_info":
            return lambda *_: (0, 0)
        if name == "get_device_name":
            return lambda *_: "CPU"
        if name == "current_device":
            return lambda: "cpu"
        if name in ("get_rng_state", "set_rng_state"):
            return getattr(torch, name)
        return getattr(torch.cpu, name)


if on_cpu():
    _register()
