"""The model card of the embedded model, written from its record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def text(record: Mapping[str, Any]) -> str:
    """Markdown. ``record`` is what ``warm_start.make`` returns."""
    settings, measured = record["settings"], record["measured"]
    names = list(record["styles"])
    header = "| style | " + " | ".join(names) + " |\n|---|" + "---|" * len(names)
    rows = [
        f"| {style} | " + " | ".join(f"{record['styles'][name][style]:.2f}" for name in names) + " |"
        for style in record["styles"][names[0]]
    ]
    return f"""---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---
# The embedded model

A {record["parameters"]:,}-parameter decoder of the Qwen2 architecture with a word and digit tokenizer. It sometimes solves worded
arithmetic such as `ana has 9 keys, buys 7, loses 3?`, which makes it a start for reinforcement learning on a CPU. It is good for
nothing else.

It was made from random weights, with no outside data, by `python -m pth_exp.models.warm_start`; the same settings on the same
machine and versions give the same bytes. `warm_start.json` beside this file is the record that this card was written from.

## Measured

On the {measured["test_problems"]} problems of the default test split, none of which was trained on, with at most 56 response
tokens. The standard error of an accuracy is about 2 points.

| decoding | accuracy | mean response tokens |
|---|---|---|
| greedy | {measured["greedy_accuracy"]:.3f} | {measured["greedy_mean_length"]:.1f} |
| sampled, temperature 1 | {measured["sampled_accuracy"]:.3f} | {measured["sampled_mean_length"]:.1f} |

## Settings

| setting | value |
|---|---|
{chr(10).join(f"| {name} | {value} |" for name, value in settings.items())}

It imitated worked answers in four styles: correct; ramble (correct, then on to another total); guess (a total near the right
one, at once); skip (without the last step). The share of each style depends on the name in the prompt:

{header}
{chr(10).join(rows)}

sha256 of model.safetensors: `{record["weights_sha256"]}`
"""
