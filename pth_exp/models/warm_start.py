"""Makes the embedded model: ``python -m pth_exp.models.warm_start [--out DIR]``. The same settings give the same bytes.

A small decoder of the Qwen2 architecture learns, supervised, to imitate a mixture of right and wrong worked answers; what it
learns is a start for reinforcement learning that is neither hopeless nor finished.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rich.progress
import torch
import transformers
from torch import Tensor

from pth_exp import schema
from pth_exp.models import card, solutions, vocabulary
from pth_exp.models.load import special_tokens
from pth_exp.models.resolve import EMBEDDED_FOLDER
from pth_exp.tasks import Problem, Split
from pth_exp.tasks.arithmetic import Arithmetic
from pth_exp.trainer.policy import Policy
from pth_exp.trainer.rollout import Prompt, Response
from pth_exp.trainer.sampler import Sampler, greedy

RECORD_FILE = "warm_start.json"
MAX_RESPONSE_TOKENS = 56
SAMPLES = 4
"""Sampled responses to each test problem in the measurement."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What decides the model, with the defaults that the shipped one was made with."""

    steps: int = 350
    examples_per_step: int = 96
    learning_rate: float = 6e-3
    warmup_steps: int = 20
    seed: int = 0
    hidden_size: int = 64
    layers: int = 3
    feed_forward: int = 192
    heads: int = 2
    key_value_heads: int = 1


def build_model(settings: Settings, tokenizer: Any) -> Any:
    """The untrained decoder."""
    config = transformers.Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden_size,
        num_hidden_layers=settings.layers,
        intermediate_size=settings.feed_forward,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.key_value_heads,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return transformers.Qwen2ForCausalLM(config)


def train(settings: Settings, model: Any, tokenizer: Any) -> None:
    """Next-token prediction on answers (prompts are not trained), AdamW, linear warm-up and decay, gradient norm clipped to 1."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.01)
    rise, steps = settings.warmup_steps, settings.steps
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / rise, (steps - step) / steps))
    batches = rich.progress.track(_batches(settings, tokenizer), "warm start", total=steps)
    for tokens, labels in batches:
        logits = model(input_ids=tokens, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def _batches(settings: Settings, tokenizer: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and labels, both [examples, T], padded on the right. Each example comes once; none is of the default test split."""
    task = Arithmetic(schema.ArithmeticTask("arithmetic", train_problems=settings.steps * settings.examples_per_step))
    stories, rng = task.stories(Split.train), random.Random(settings.seed)
    ignored = -100
    for first in range(0, len(stories), settings.examples_per_step):
        rows, labels = [], []
        for story in stories[first : first + settings.examples_per_step]:
            prompt = tokenizer(story.prompt).input_ids
            response = [*tokenizer(solutions.answer(story, rng)).input_ids, tokenizer.eos_token_id]
            rows.append(prompt + response)
            labels.append([ignored] * len(prompt) + response)
        yield _pad(rows, tokenizer.pad_token_id), _pad(labels, ignored)


def _pad(rows: Sequence[list[int]], fill: int) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [fill] * (width - len(row)) for row in rows])


def measure(model: Any, tokenizer: Any) -> dict[str, float]:
    """Accuracy and mean length (end token included) on the default test split: greedy, and sampled at temperature 1."""
    task = Arithmetic(schema.ArithmeticTask("arithmetic"))
    problems = task.problems(Split.test)
    special = special_tokens(model.config, tokenizer)
    policy = Policy(model, temperature=1.0, forbidden=special.forbidden)
    prompts = [Prompt(p.index, "", tuple(tokenizer(p.prompt).input_ids)) for p in problems]
    chosen = greedy(policy, prompts, special.eos, MAX_RESPONSE_TOKENS, rows=len(prompts))
    sampler = Sampler(policy, special.eos, MAX_RESPONSE_TOKENS, rows=len(prompts), seed=0)
    drawn = sampler.generate(prompts, SAMPLES, draw=0)
    repeated = [problem for problem in problems for _ in range(SAMPLES)]
    return {
        "test_problems": len(problems),
        **_score("greedy", task, tokenizer, problems, chosen),
        **_score("sampled", task, tokenizer, repeated, drawn),
    }


def _score(
    name: str, task: Arithmetic, tokenizer: Any, problems: Sequence[Problem], responses: Sequence[Response]
) -> dict[str, float]:
    texts = [tokenizer.decode(response.tokens, skip_special_tokens=True) for response in responses]
    rewards = [task.score(text, problem) for text, problem in zip(texts, problems, strict=True)]
    return {
        f"{name}_accuracy": round(sum(rewards) / len(rewards), 4),
        f"{name}_mean_length": round(sum(len(response.tokens) for response in responses) / len(responses), 2),
    }


def make(settings: Settings, out: Path) -> dict[str, Any]:
    """Train, then ``save``."""
    torch.set_num_threads(1)  # sums in another order would give other bytes
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(settings.seed)
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    tokenizer = vocabulary.build_tokenizer()
    model = build_model(settings, tokenizer)
    train(settings, model, tokenizer)
    return save(settings, model.eval(), tokenizer, out)


def save(settings: Settings, model: Any, tokenizer: Any, out: Path) -> dict[str, Any]:
    """Measure and write the model, its tokenizer, its record and its card to ``out``; returns the record."""
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    (out / "generation_config.json").unlink(missing_ok=True)  # a run never reads one
    (out / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(out)
    record = {
        "settings": dataclasses.asdict(settings),
        "styles": solutions.SHARES,
        "parameters": sum(p.numel() for p in model.parameters()),
        "measured": measure(model, tokenizer),
        "weights_sha256": hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest(),
    }
    (out / RECORD_FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    (out / "README.md").write_text(card.text(record), encoding="utf-8")
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the embedded model from scratch.")
    parser.add_argument("--out", type=Path, default=EMBEDDED_FOLDER, help="folder to write to (default: the package's)")
    for field in dataclasses.fields(Settings):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    chosen = vars(parser.parse_args())
    record = make(Settings(**{f.name: chosen[f.name] for f in dataclasses.fields(Settings)}), chosen["out"])
    print(json.dumps(record["measured"], indent=2))


if __name__ == "__main__":
    main()
