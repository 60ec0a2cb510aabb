"""The sampler: its own copy of the weights, and generation from it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from pth_exp.probes.weights import fingerprint
from pth_exp.trainer.policy import Policy
from pth_exp.trainer.rollout import Prompt, Response

Choose = Callable[[Tensor, Tensor, int], Tensor]
"""Log-probabilities [R, V], the rows that are still running [R], the token's number -> chosen tokens [R]."""

_WORD = (1 << 64) - 1


class Sampler:
    """Generates from a snapshot of the learner's weights.

    Args:
        policy: the initial policy; its weights are copied.
        ends: tokens that end a response.
        limit: tokens after which a response is truncated.
        rows: responses generated at a time.
        seed: of the random stream.
    """

    def __init__(self, policy: Policy, ends: Sequence[int], limit: int, rows: int, seed: int) -> None:
        model = copy.deepcopy(policy.model).requires_grad_(False)
        self.policy = Policy(model, policy.temperature, policy.forbidden)
        self.version = 0
        self.ends, self.limit, self.rows, self.seed = tuple(ends), limit, rows, seed

    @torch.no_grad()
    def refresh(self, weights: nn.Module, version: int) -> None:
        """Copies ``weights``, which have seen ``version`` updates."""
        torch._foreach_copy_(list(self.policy.model.parameters()), list(weights.parameters()))
        self.version = version

    def fingerprint(self) -> str:
        """Of the weights as they are now, so that weights changed behind the sampler's back show."""
        return fingerprint(self.policy.model)

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Prompt], responses: int, draw: int) -> list[Response]:
        """``responses`` sampled responses to each prompt, ordered by prompt, then by number.

        Token t of response j to prompt i of draw d is the inverse CDF at the t-th number of a Philox stream keyed by
        (seed, d, i, j): it depends on no other row, nor on how rows are batched.
        """
        uniforms = torch.from_numpy(
            np.stack([uniform_stream(self.seed, draw, p.index, j, self.limit) for p in prompts for j in range(responses)])
        ).to(self.policy.device)
        owner = torch.arange(len(prompts)).repeat_interleave(responses)
        result: list[Response] = []
        for start in range(0, len(owner), self.rows):

            def choose(logp: Tensor, running: Tensor, number: int, first: int = start) -> Tensor:
                return inverse_cdf(logp, uniforms[running + first, number])

            result += decode(
                self.policy, [prompts[i].tokens for i in owner[start : start + self.rows]], self.ends, self.limit, choose
            )
        return result


def greedy(policy: Policy, prompts: Sequence[Prompt], ends: Sequence[int], limit: int, rows: int) -> list[Response]:
    """The most probable token at each step, from the weights given; uses no random numbers."""
    with torch.inference_mode():
        chunks = (prompts[start : start + rows] for start in range(0, len(prompts), rows))
        return [
            response
            for chunk in chunks
            for response in decode(policy, [p.tokens for p in chunk], ends, limit, lambda logp, _, __: logp.argmax(dim=-1))
        ]


def uniform_stream(seed: int, draw: int, prompt: int, response: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """[count] numbers in [0, 1) of the stream that belongs to one response."""
    # Philox counts upwards in the lowest word of its counter, so the two highest words name disjoint streams.
    key, counter = (np.array(words, dtype=np.uint64) for words in ([seed & _WORD, draw], [0, 0, prompt, response]))
    stream = np.random.Philox(key=key, counter=counter)
    return np.random.Generator(stream).random(count)


def inverse_cdf(logp: Tensor, uniform: Tensor) -> Tensor:
    """[R] the first token whose cumulative probability exceeds ``uniform`` [R]; a token of probability 0 is never chosen."""
    # In float64, as the float32 sum over a large vocabulary would sample from a distribution other than the recorded one.
    cumulative = logp.double().exp().cumsum(dim=-1)
    target = uniform[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True).squeeze(1).clamp(max=logp.shape[-1] - 1)


def decode(policy: Policy, prompts: Sequence[Sequence[int]], ends: Sequence[int], limit: int, choose: Choose) -> list[Response]:
    """One response a row. A prompt that is named many times is read once; finished rows leave the batch.

    Whether a row has ended is kept by position: one of ``ends`` ends the row and counts as one of its tokens.
    """
    names = list(dict.fromkeys(tuple(prompt) for prompt in prompts))
    place = {name: i for i, name in enumerate(names)}
    device = policy.device
    prefix = policy.read(names).select(torch.tensor([place[tuple(prompt)] for prompt in prompts], device=device))
    tokens = torch.zeros(len(prompts), limit, dtype=torch.int64, device=device)
    logps = torch.zeros(len(prompts), limit, device=device)
    lengths = torch.full((len(prompts),), limit, device=device)
    ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)

    end_tokens = torch.tensor(list(ends), device=device)
    running = torch.arange(len(prompts), device=device)
    for number in range(limit):
        logp = policy.log_probs(prefix.logits)
        chosen = choose(logp, running, number)
        tokens[running, number] = chosen
        logps[running, number] = logp.gather(1, chosen[:, None]).squeeze(1)
        end = torch.isin(chosen, end_tokens)
        lengths[running[end]] = number + 1
        ended[running[end]] = True
        keep = (~end).nonzero().squeeze(1)
        if len(keep) == 0 or number + 1 == limit:
            break
        if len(keep) < len(running):
            running, chosen, prefix = running[keep], chosen[keep], prefix.select(keep)
        prefix = policy.step(prefix, chosen, number)
    return list(_responses(tokens, logps, lengths, ended))


def _responses(tokens: Tensor, logps: Tensor, lengths: Tensor, ended: Tensor) -> Iterator[Response]:
    for row, logp, length, end in zip(tokens.tolist(), logps.tolist(), lengths.tolist(), ended.tolist(), strict=True):
        yield Response(tuple(row[:length]), tuple(logp[:length]), truncated=not end)
