"""One response as verl asks for it, with a server that gives what it is told. Runs in verl's environment."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl", reason="not verl's environment: make verl")

import numpy as np
from verl.utils.tensordict_utils import get_tensordict, list_of_dict_to_tensordict

from pth_exp.models.load import load_tokenizer
from pth_exp.schema import ArithmeticTask, ModelConfig
from pth_exp.verl_stack import data, rollout
from pth_exp.verl_stack.loss import _numbers

TASK = ArithmeticTask(name="arithmetic", train_problems=16, test_problems=16)
CONFIG = SimpleNamespace(
    task=TASK,
    model=ModelConfig(name="embedded", path="embedded"),
    max_prompt_tokens=64,
    max_response_tokens=24,
    seeds=SimpleNamespace(sampling=5, eval=0),
    validation=SimpleNamespace(problems=8),
)


@pytest.fixture(autouse=True)
def _config(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (data, rollout):
        monkeypatch.setattr(module, "frozen_config", lambda: CONFIG)
    for cached in (rollout._task, rollout._problems, rollout._special):
        cached.cache_clear()


class Server:
    def __init__(self, text: str) -> None:
        self.asked: dict[str, Any] = {}
        self.tokens = load_tokenizer(CONFIG.model)(text).input_ids

    async def generate(self, **asked: Any) -> Any:
        self.asked = asked
        logp = [-0.5] * len(self.tokens)
        versions = {"min_global_steps": 4, "max_global_steps": 4}
        return SimpleNamespace(token_ids=self.tokens, log_probs=logp, extra_fields=versions)


def respond(server: Server, greedy: bool = False, **row: Any) -> Any:
    loop = rollout.OneResponse(server_manager=server, tokenizer=load_tokenizer(CONFIG.model), trainer_config=None)
    given = data.ProblemDataset("test" if greedy else "train", loop.tokenizer, None, None)[row["index"]]
    return asyncio.run(loop.run({"temperature": 0 if greedy else 1.0, "logprobs": True}, **given | row)), given


def test_the_prompt_is_the_projects_and_the_reward_the_tasks() -> None:
    problem = data.problems_of("train")[3]
    for answer, reward in ((problem.gold, 1.0), (problem.gold + 1, 0.0)):
        server = Server(f" = {answer}<|end|>")
        output, given = respond(server, index=3, session_id=1, global_steps=2)
        assert server.asked["prompt_ids"] == given["prompt_tokens"] == output.prompt_ids
        assert output.reward_score == reward and output.response_mask == [1] * len(server.tokens)
        assert output.extra_fields["reward_extra_info"] == {"index": 3, "correct": int(reward), "length": len(server.tokens)}
        sampling = server.asked["sampling_params"]
        assert (sampling["stop_token_ids"], sampling["max_tokens"], sampling["logit_bias"]) == ([10], 24, {11: -100.0})


def test_every_response_has_a_seed_of_its_own_and_the_same_one_again() -> None:
    seeds = set()
    for index, number, step in [(i, j, s) for i in range(2) for j in range(2) for s in (1, 2)]:
        server = Server(" = 1")
        respond(server, index=index, session_id=number, global_steps=step)
        seeds.add(server.asked["sampling_params"]["seed"])
    assert len(seeds) == 8 and seeds == {rollout.request_seed(5, d, i, j) for i in range(2) for j in range(2) for d in range(2)}
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_validation_is_greedy_and_scores_the_fixed_subset() -> None:
    problem = data.problems_of("test")[5]
    server = Server(f" = {problem.gold}")
    output, _ = respond(server, greedy=True, index=5, session_id=0, global_steps=0)
    assert output.reward_score == 1.0 and "seed" not in server.asked["sampling_params"]


def test_the_rows_survive_verls_containers() -> None:
    """A batch of the data set, as its loader collates it, and responses as its queue keeps them."""
    from verl.utils.dataset.rl_dataset import collate_fn

    rows = [data.ProblemDataset("train", load_tokenizer(CONFIG.model), None, None)[i] for i in (2, 0)]
    batch = get_tensordict(collate_fn(rows) | {"uid": np.array(["a", "b"], dtype=object)})
    assert _numbers(batch["index"]) == [2, 0]
    given = {key: batch[i].get(key) for i in (0,) for key in ("prompt_tokens",)}
    assert list(getattr(given["prompt_tokens"], "data", given["prompt_tokens"])) == rows[0]["prompt_tokens"]
    output, row = respond(Server(" = 1"), index=2, session_id=1, global_steps=1)
    kept = list_of_dict_to_tensordict([output.as_dict() | row | {"session_id": 1}] * 2)
    assert _numbers(kept["index"]) == [2, 2] and _numbers(kept["session_id"]) == [1, 1]


def test_a_split_is_a_file_order_and_the_evaluation_subset_is_fixed() -> None:
    assert [p.index for p in data.problems_of("train")] == list(range(16))
    assert [p.index for p in data.problems_of("test")] == [p.index for p in data.problems_of("test")]
    assert len(data.problems_of("test")) == 8 and Path(rollout.__file__).with_name("agent_loop.yaml").is_file()
