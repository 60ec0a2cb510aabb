"""What vLLM records, against the trainer's policy on the same weights; and what a prefix cache does that outlives its weights.

A real vLLM in this process, as the stack starts it. Runs in verl's environment.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm", reason="not verl's environment: make verl")

import torch
from torch import nn

from pth_exp.models.load import load_policy, special_tokens
from pth_exp.models.resolve import resolve
from pth_exp.probes.weights import fingerprint
from pth_exp.schema import ModelConfig
from pth_exp.trainer.policy import Policy
from pth_exp.verl_stack.forbidden import VLLM_LOWEST

MODEL = ModelConfig("embedded", "embedded")
BLOCK = 32  # the least that its attention on a CPU takes
TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "PTH_VERL_CPU": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
        }.items():
            patch.setenv(name, value)
        from vllm import LLM

        yield LLM(
            model=str(resolve(MODEL)),
            dtype="float32",
            enforce_eager=True,
            enable_prefix_caching=True,
            block_size=BLOCK,
            max_model_len=128,
            logprobs_mode="processed_logprobs",
            generation_config="vllm",
            worker_extension_cls="pth_exp.verl_stack.vllm_weights.Weights",
        )


class Sampler:
    """The engine, with the embedded model's tokenizer and special tokens."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.model, tokenizer = load_policy(MODEL, "cpu")
        special = special_tokens(self.model.config, tokenizer)
        self.forbidden = special.forbidden
        self.policy = Policy(self.model, TEMPERATURE, special.forbidden)
        self.prompt = tokenizer("ana has 9 keys, buys 7? " * 20).input_ids[: 3 * BLOCK + 1]

    def take(self, model: nn.Module) -> None:
        """Put weights into vLLM, as a transfer does, and nothing else."""
        weights = [(name, value.detach().clone()) for name, value in model.named_parameters()]
        self.engine.apply_model(lambda held: held.load_weights(iter(weights)) and None)

    def sample(self) -> tuple[list[int], list[float], int]:
        """Tokens, log q of each, and how many of the prompt's tokens were not read again."""
        from vllm import SamplingParams

        parameters = SamplingParams(
            max_tokens=12,
            temperature=TEMPERATURE,
            seed=4,
            logprobs=0,
            ignore_eos=True,
            logit_bias=dict.fromkeys(self.forbidden, VLLM_LOWEST),
        )
        (answer,) = self.engine.generate([{"prompt_token_ids": self.prompt}], parameters, use_tqdm=False)
        output = answer.outputs[0]
        tokens = list(output.token_ids)
        return (
            tokens,
            [held[token].logprob for held, token in zip(output.logprobs, tokens, strict=True)],
            answer.num_cached_tokens,
        )

    @torch.no_grad()
    def expected(self, tokens: list[int]) -> list[float]:
        """Log-probabilities of the tokens under the trainer's policy."""
        read = self.policy.read([self.prompt])
        given = torch.tensor([tokens])
        after = self.policy.continue_with(read, given[:, :-1])
        logits = torch.cat([read.logits[:, None], after], dim=1)
        found: list[float] = self.policy.log_probs(logits).gather(2, given[:, :, None]).flatten().tolist()
        return found


def farthest(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def test_recorded_q_and_a_cache_that_outlives_its_weights(engine: Any) -> None:
    """q is the policy's, padding token left out; a stale cache makes it another's, by far more than rounding."""
    sampler = Sampler(engine)
    with torch.no_grad():
        sampler.model.lm_head.weight[sampler.forbidden[0]] += 0.3  # which is the embedding too
    sampler.take(sampler.model)
    engine.reset_prefix_cache()
    assert engine.collective_rpc("pth_fingerprint") == [fingerprint(sampler.model)]
    tokens, q, cached = sampler.sample()
    assert cached == 0 and farthest(q, sampler.expected(tokens)) < 1e-5

    noise = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in sampler.model.parameters():
            weight += 0.02 * weight.std() * torch.randn(weight.shape, generator=noise)
    sampler.take(sampler.model)
    assert engine.collective_rpc("pth_fingerprint") == [fingerprint(sampler.model)], "the weights have arrived"
    tokens, q, cached = sampler.sample()
    assert cached == 3 * BLOCK and farthest(q, sampler.expected(tokens)) > 1e-3, "and what is sampled is not theirs"

    assert engine.reset_prefix_cache()
    tokens, q, cached = sampler.sample()
    assert cached == 0 and farthest(q, sampler.expected(tokens)) < 1e-5
