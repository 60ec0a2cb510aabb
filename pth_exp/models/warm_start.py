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
from pth_exp.models import solutions, vocabulary
from pth_exp.models.resolve import EMBEDDED_FOLDER
from pth_exp.tasks import Problem, Split
from pth_exp.tasks.arithmetic import Arithmetic

RECORD_FILE = "warm_start.json"
MAX_RESPONSE_TOKENS = 56


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


@torch.inference_mode()
def respond(model: Any, tokenizer: Any, prompts: Sequence[str], generator: torch.Generator | None) -> list[list[int]]:
    """One response to each prompt, end token included: sampled with ``generator``, greedy without. Padding is never chosen."""
    encoded = [tokenizer(prompt).input_ids for prompt in prompts]
    responses: list[list[int]] = [[] for _ in prompts]
    for length in sorted(set(map(len, encoded))):  # prompts of one length need no padding
        members = [i for i, row in enumerate(encoded) if len(row) == length]
        tokens, cache = torch.tensor([encoded[i] for i in members]), None
        open_rows = torch.ones(len(members), dtype=torch.bool)
        for _ in range(MAX_RESPONSE_TOKENS):
            output = model(input_ids=tokens, past_key_values=cache, use_cache=True)
            logits, cache = output.logits[:, -1], output.past_key_values
            logits[:, tokenizer.pad_token_id] = -torch.inf
            if generator is None:
                chosen = logits.argmax(-1)
            else:
                chosen = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
            for row in open_rows.nonzero()[:, 0].tolist():
                responses[members[row]].append(int(chosen[row]))
            open_rows &= chosen != tokenizer.eos_token_id
            if not open_rows.any():
                break
            tokens = chosen[:, None]
    return responses


def measure(model: Any, tokenizer: Any) -> dict[str, float]:
    """Accuracy and mean length on the default test split, greedy and sampled (temperature 1, 4 responses a problem)."""
    task = Arithmetic(schema.ArithmeticTask("arithmetic"))
    problems = task.problems(Split.test)
    generator = torch.Generator().manual_seed(0)
    greedy = _score(task, problems, tokenizer, respond(model, tokenizer, [p.prompt for p in problems], None))
    four = [p for p in problems for _ in range(4)]
    sampled = _score(task, four, tokenizer, respond(model, tokenizer, [p.prompt for p in four], generator))
    return {
        "test_problems": len(problems),
        "greedy_accuracy": greedy[0],
        "greedy_mean_length": greedy[1],
        "sampled_accuracy": sampled[0],
        "sampled_mean_length": sampled[1],
    }


def _score(task: Arithmetic, problems: Sequence[Problem], tokenizer: Any, responses: Sequence[list[int]]) -> tuple[float, float]:
    texts = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in responses]
    rewards = [task.score(text, problem) for text, problem in zip(texts, problems, strict=True)]
    return round(sum(rewards) / len(rewards), 4), round(sum(map(len, responses)) / len(responses), 2)


def make(settings: Settings, out: Path) -> dict[str, Any]:
    """Train, measure and write the model, its tokenizer, its record and its card to ``out``; returns the record."""
    torch.set_num_threads(1)  # sums in another order would give other bytes
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(settings.seed)
    tokenizer = vocabulary.build_tokenizer()
    model = build_model(settings, tokenizer)
    train(settings, model, tokenizer)
    model.eval()
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    (out / "generation_config.json").unlink(missing_ok=True)  # a run never reads one
    (out / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(out)
    record = {
        "settings": dataclasses.asdict(settings),
        "mixtures": [dict(zip(solutions.Style, shares, strict=True)) for shares in solutions.MIXTURES],
        "mixture_of_name": solutions.MIXTURE_OF_NAME,
        "parameters": sum(p.numel() for p in model.parameters()),
        "measured": measure(model, tokenizer),
        "weights_sha256": hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest(),
    }
    (out / RECORD_FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
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
