"""verl's vLLM server with answers from inside vLLM: which weights it holds, and a way to put them aside and back."""

from __future__ import annotations

from typing import Any, NamedTuple

import ray
from verl.workers.rollout.replica import RolloutReplicaRegistry
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica


class Sampling(NamedTuple):
    """What decides the distribution of a request's tokens, as vLLM's own object holds it."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    max_tokens: int
    seeded: bool

    @classmethod
    def of(cls, params: Any) -> Sampling:
        return cls(**{name: getattr(params, name) for name in cls._fields[:-1]}, seeded=params.seed is not None)


class Server(vLLMHttpServer):
    async def run_server(self, args: Any) -> None:
        await super().run_server(args)
        generate, self._sampling = self.engine.generate, set[Sampling]()

        def heard(*arguments: Any, sampling_params: Any, **more: Any) -> Any:
            self._sampling.add(Sampling.of(sampling_params))
            return generate(*arguments, sampling_params=sampling_params, **more)

        self.engine.generate = heard

    async def sampling(self) -> list[Sampling]:
        """How vLLM was told to sample, each way once, over all requests so far."""
        return sorted(self._sampling)

    async def on_workers(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of `pth_exp.verl_stack.vllm_weights.Weights` in each vLLM worker; verl's own call drops the answers."""
        answers: list[Any] = await self.engine.collective_rpc(method=method, args=arguments)
        return answers

    async def clear_kv_cache(self) -> None:
        """After every change of the weights. vLLM keeps its prefix cache while a request is running, and verl does not ask."""
        if self.node_rank == 0 and not await self.engine.reset_prefix_cache():
            raise RuntimeError("vLLM's weights changed while requests were running: its prefix cache would outlive its weights")
        await super().clear_kv_cache()

    def _get_worker_extension_cls(self) -> str:
        return "pth_exp.verl_stack.vllm_weights.Weights"


class Replica(vLLMReplica):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(Server)


def use() -> None:
    """Have verl start this server where it would start its own; in this process only, which is the one that starts servers."""
    RolloutReplicaRegistry.register("vllm", lambda: Replica)
