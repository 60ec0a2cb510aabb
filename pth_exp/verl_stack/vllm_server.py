"""verl's vLLM server with answers from inside vLLM: which weights it holds, and a way to put them aside and back."""

from __future__ import annotations

from typing import Any

import ray
from verl.workers.rollout.replica import RolloutReplicaRegistry
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica


class Server(vLLMHttpServer):
    async def on_workers(self, method: str) -> list[Any]:
        """Call a method of `pth_exp.verl_stack.vllm_weights.Weights` in each vLLM worker; verl's own call drops the answers."""
        answers: list[Any] = await self.engine.collective_rpc(method=method)
        return answers

    def _get_worker_extension_cls(self) -> str:
        return "pth_exp.verl_stack.vllm_weights.Weights"


class Replica(vLLMReplica):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(Server)


def use() -> None:
    """Have verl start this server where it would start its own; in this process only, which is the one that starts servers."""
    RolloutReplicaRegistry.register("vllm", lambda: Replica)
