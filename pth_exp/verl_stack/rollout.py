"""One sampled response, as verl asks for it: the project's prompt tokens, a seed of its own, the task's reward."""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

from pth_exp.models.load import SpecialTokens, load_special_tokens
from pth_exp.tasks import Problem, Split, Task, load_task
from pth_exp.tasks.cut import cut_response
from pth_exp.verl_stack.data import problems_of
from pth_exp.verl_stack.forbidden import VLLM_LOWEST
from pth_exp.verl_stack.frozen import frozen_config


class OneResponse(AgentLoopBase):
    """verl makes one of these for each response and runs it once."""

    def __init__(self, server_manager: Any, tokenizer: Any, **_: Any) -> None:
        """Not the base class's, which builds what chats need and refuses a tokenizer that has no chat template."""
        self.server_manager, self.tokenizer = server_manager, tokenizer

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
        config = frozen_config()
        greedy = sampling_params["temperature"] == 0
        task, problem = _task(), _problems(Split.test if greedy else Split.train)[int(row["index"])]
        special = _special(self.tokenizer)
        sampling = {**sampling_params, "max_tokens": config.max_response_tokens, "stop_token_ids": list(special.eos)}
        if special.forbidden:
            sampling["logit_bias"] = dict.fromkeys(special.forbidden, VLLM_LOWEST)
        if not greedy:
            draw = int(row["global_steps"]) - 1
            sampling["seed"] = request_seed(config.seeds.sampling, draw, problem.index, int(row["session_id"]))
        output = await self.server_manager.generate(
            request_id=uuid4().hex, prompt_ids=list(row["prompt_tokens"]), sampling_params=sampling
        )
        tokens = list(output.token_ids)
        cut = cut_response(tokens, self._text, config.task.cut_at)
        reward = task.score(cut.text, problem)
        measured = {"index": int(row["index"]), "correct": int(reward == 1), "length": len(tokens)}
        return AgentLoopOutput(
            prompt_ids=list(row["prompt_tokens"]),
            response_ids=tokens,
            response_mask=[1] * len(tokens),
            response_logprobs=list(output.log_probs) if output.log_probs else None,
            reward_score=reward,
            num_turns=2,
            metrics=AgentLoopMetrics(),
            extra_fields={**output.extra_fields, "reward_extra_info": measured},
        )

    def _text(self, tokens: Any) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))


def request_seed(seed: int, draw: int, prompt: int, response: int) -> int:
    """The seed of one response's random stream; it depends on no other request, nor on their order."""
    name = f"{seed} {draw} {prompt} {response}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 1  # vLLM takes a signed 64-bit integer


@cache
def _task() -> Task:
    return load_task(frozen_config().task)


@cache
def _problems(split: Split) -> list[Problem]:
    return problems_of(split)


@cache
def _special(tokenizer: Any) -> SpecialTokens:
    return load_special_tokens(frozen_config().model, tokenizer)
