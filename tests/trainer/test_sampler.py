from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pth_exp import schema
from pth_exp.models.load import load_policy
from pth_exp.trainer.policy import Policy
from pth_exp.trainer.rollout import Prompt, Response
from pth_exp.trainer.sampler import Sampler, greedy, inverse_cdf, uniform_stream

PAD, ENDS, VOCABULARY = 0, (1, 2, 3, 4), 40
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


def model_of(kind: str) -> Any:
    torch.manual_seed(1)
    match kind:
        case "qwen2":
            config: Any = transformers.Qwen2Config(**SIZES, intermediate_size=64, num_key_value_heads=1, initializer_range=0.3)
        case "llama":
            config = transformers.LlamaConfig(**SIZES, intermediate_size=64, initializer_range=0.3, tie_word_embeddings=True)
        case "mistral with a sliding window":
            config = transformers.MistralConfig(
                **SIZES, intermediate_size=64, num_key_value_heads=2, sliding_window=6, initializer_range=0.3
            )
        case "gpt2":
            config = transformers.GPT2Config(
                vocab_size=VOCABULARY,
                n_embd=32,
                n_layer=2,
                n_head=2,
                n_positions=64,
                initializer_range=0.3,
                eos_token_id=1,
                bos_token_id=2,
            )
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def ragged_prompts(count: int = 5) -> list[Prompt]:
    generator = torch.Generator().manual_seed(2)
    return [
        Prompt(i + 10, f"p{i}", tuple(torch.randint(5, VOCABULARY, (3 + 4 * i,), generator=generator).tolist()))
        for i in range(count)
    ]


def sampler_of(model: Any, temperature: float = 1.0, rows: int = 256, seed: int = 3, limit: int = 12) -> Sampler:
    return Sampler(Policy(model, temperature, [PAD]), ends=ENDS, limit=limit, rows=rows, seed=seed)


def teacher_forced(model: Any, prompt: Sequence[int], response: Sequence[int], temperature: float) -> Tensor:
    """Log-probabilities of a response by one plain, unpadded, uncached pass."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1].double() / temperature
    logits[:, PAD] = -torch.inf
    return logits.log_softmax(-1)[torch.arange(len(response)), torch.tensor(response)]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("kind", ["qwen2", "llama", "mistral with a sliding window", "gpt2"])
def test_recorded_log_q_equals_a_teacher_forced_pass(kind: str, temperature: float) -> None:
    model = model_of(kind)
    prompts = ragged_prompts()
    responses = sampler_of(model, temperature).generate(prompts, 6, draw=0)
    assert len({len(r.tokens) for r in responses}) > 3, "rows end at different steps"
    for row, response in enumerate(responses):
        expected = teacher_forced(model, prompts[row // 6].tokens, response.tokens, temperature)
        assert (torch.tensor(response.logp) - expected).abs().max() < 1e-5


def test_end_token_counts_and_truncation_is_flagged() -> None:
    responses = sampler_of(model_of("qwen2")).generate(ragged_prompts(), 8, draw=1)
    assert {r.truncated for r in responses} == {True, False}
    for r in responses:
        assert PAD not in r.tokens
        assert len(r.tokens) == len(r.logp) <= 12
        if r.truncated:
            assert len(r.tokens) == 12
            assert not set(ENDS) & set(r.tokens)
        else:
            assert [token in ENDS for token in r.tokens] == [False] * (len(r.tokens) - 1) + [True]


def by_row(prompts: Sequence[Prompt], responses: Sequence[Response], n: int) -> dict[tuple[int, int], tuple[int, ...]]:
    return {(prompts[i // n].index, i % n): r.tokens for i, r in enumerate(responses)}


def test_a_response_depends_neither_on_the_batch_nor_on_its_place() -> None:
    model, prompts = model_of("qwen2"), ragged_prompts()
    whole = by_row(prompts, sampler_of(model).generate(prompts, 6, draw=4), 6)
    in_threes = by_row(prompts, sampler_of(model, rows=3).generate(prompts, 6, draw=4), 6)
    turned = prompts[::-1]
    assert whole == in_threes == by_row(turned, sampler_of(model).generate(turned, 6, draw=4), 6)
    fewer = by_row(prompts[:2], sampler_of(model).generate(prompts[:2], 3, draw=4), 3)
    assert fewer == {key: whole[key] for key in fewer}


def test_draw_prompt_response_and_seed_key_the_stream() -> None:
    keys = [(3, 0, 10, 0), (4, 0, 10, 0), (3, 1, 10, 0), (3, 0, 11, 0), (3, 0, 10, 1), (-3, 0, 10, 0)]
    streams = {tuple(uniform_stream(*key, count=5)) for key in keys}
    assert len(streams) == len(keys)
    many = np.concatenate([uniform_stream(0, 0, prompt, 0, 64) for prompt in range(200)])
    assert abs(many.mean() - 0.5) < 4 / np.sqrt(12 * many.size)


def test_sampled_tokens_follow_the_distribution() -> None:
    """Chi-square of the first token of 4,000 responses against the model's own probabilities."""
    model = model_of("qwen2")
    prompt = ragged_prompts(1)[0]
    first = [r.tokens[0] for r in sampler_of(model, limit=1, rows=4000).generate([prompt], 4000, draw=0)]
    with torch.no_grad():
        logits = model(torch.tensor([prompt.tokens])).logits[0, -1]
    logits[PAD] = -torch.inf
    expected = 4000 * logits.softmax(-1).numpy()
    seen = np.bincount(first, minlength=VOCABULARY)
    common = expected > 5
    statistic = ((seen - expected)[common] ** 2 / expected[common]).sum()
    degrees = common.sum() - 1
    assert statistic < degrees + 4 * np.sqrt(2 * degrees)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=9).filter(lambda p: sum(p) > 1e-3), st.floats(0, 1, exclude_max=True))
def test_inverse_cdf_picks_the_interval_that_holds_the_number(weights: list[float], uniform: float) -> None:
    p = np.array(weights) / sum(weights)
    chosen = int(inverse_cdf(torch.tensor(p).log()[None], torch.tensor([uniform], dtype=torch.float64)))
    upper = np.cumsum(p)
    assert p[chosen] > 0
    assert upper[chosen] - p[chosen] - 1e-9 <= uniform <= upper[chosen] + 1e-9


def test_inverse_cdf_by_hand() -> None:
    logp = torch.tensor([[0.5, 0.0, 0.25, 0.25]]).log().expand(6, 4)
    uniform = torch.tensor([0.0, 0.4999, 0.5001, 0.7499, 0.7501, 0.9999], dtype=torch.float64)
    assert inverse_cdf(logp, uniform).tolist() == [0, 0, 2, 2, 3, 3]


@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
def test_greedy_equals_the_library_s_own(kind: str) -> None:
    model, prompts = model_of(kind), ragged_prompts()
    ours = greedy(Policy(model, 1.0, [PAD]), prompts, ENDS, 12, rows=2)
    for prompt, response in zip(prompts, ours, strict=True):
        ids = torch.tensor([prompt.tokens])
        theirs = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=12,
            eos_token_id=list(ENDS),
            pad_token_id=PAD,
            suppress_tokens=[PAD],
        )
        assert theirs[0, len(prompt.tokens) :].tolist() == list(response.tokens)


def test_greedy_uses_no_random_numbers() -> None:
    model, prompts = model_of("qwen2"), ragged_prompts()
    sampler = sampler_of(model)
    before, numpy_before = torch.random.get_rng_state(), np.random.get_state()[1]
    expected = sampler.generate(prompts, 2, draw=0)
    greedy(sampler.policy, prompts, ENDS, 12, rows=4)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert np.array_equal(np.random.get_state()[1], numpy_before)
    assert sampler.generate(prompts, 2, draw=0) == expected


def test_refresh_copies() -> None:
    model = model_of("qwen2")
    sampler = sampler_of(model)
    start = sampler.fingerprint()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    assert sampler.fingerprint() == start, "the initial snapshot is a copy"
    sampler.refresh(model, 5)
    refreshed = sampler.fingerprint()
    assert (sampler.version, refreshed != start) == (5, True)
    with torch.no_grad():
        next(model.parameters()).add_(0.1)
    assert sampler.fingerprint() == refreshed


def test_a_planted_generation_config_never_leaks(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "planted"
    shutil.copytree(tiny_model, folder)
    planted = {"do_sample": True, "top_p": 0.1, "top_k": 2, "repetition_penalty": 3.0, "temperature": 0.2, "max_new_tokens": 2}
    (folder / "generation_config.json").write_text(json.dumps(planted))
    prompts = ragged_prompts()
    responses = []
    for path in (tiny_model, folder):
        model, _ = load_policy(schema.ModelConfig("m", str(path)), torch.device("cpu"))
        model.generation_config = transformers.GenerationConfig(**planted)  # even if the loader had kept it
        responses.append(sampler_of(model).generate(prompts, 4, draw=0))
    assert responses[0] == responses[1]
    assert len({token for r in responses[1] for token in r.tokens}) > 20
