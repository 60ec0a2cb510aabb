"""The first batches of a run, drawn once more from its config alone, to hold against what the run wrote while it drew them."""

from __future__ import annotations

import json
from pathlib import Path

from pth_exp import schema


class RedrawError(Exception):
    """The recorded first batches are missing or are not what the frozen config draws; the message says where they part."""


def verify_first_batches(run_dir: Path, config: schema.Config) -> int:
    """Hold ``first_batches.json`` of a completed run against the frozen config; the number of batches that agree.

    Raises ``RedrawError`` for a missing file, another number of batches, or the first prompt that differs.
    """
    path = run_dir / "first_batches.json"
    expected = first_batches(config)
    if not expected:
        return 0
    if not path.is_file():
        raise RedrawError(f"{path} is missing: the stack did not write the prompt IDs that it drew")
    written = json.loads(path.read_text())
    for number, (drawn, again) in enumerate(zip(written, expected, strict=False)):
        if drawn != again:
            place = next((i for i, (a, b) in enumerate(zip(drawn, again, strict=False)) if a != b), min(len(drawn), len(again)))
            was, now = (batch[place] if place < len(batch) else "nothing" for batch in (drawn, again))
            raise RedrawError(
                f"{path}: batch {number}, prompt {place}: the run drew {was}, its frozen config (seeds.data) draws {now}"
            )
    if len(written) != len(expected):
        raise RedrawError(f"{path} holds {len(written)} batches; by probe.first_batches and updates it must hold {len(expected)}")
    return len(expected)


def first_batches(config: schema.Config) -> list[list[str]]:
    """Prompt IDs of the first batches in drawn order, as the frozen config draws them."""
    from pth_exp.models.load import load_tokenizer
    from pth_exp.staleness.queue import ReplayQueue
    from pth_exp.tasks import Split, load_task
    from pth_exp.tasks.order import PromptOrder
    from pth_exp.tasks.prompts import prompt_id, render

    if config.updates == 0:
        return []
    drawn = ReplayQueue[None](config.queue, config.replay_age).draws(config.updates - 1).stop
    problems = load_task(config.task).problems(Split.train)
    order = PromptOrder(len(problems), config.prompts_per_update, config.seeds.data)
    tokenizer = load_tokenizer(config.model)
    return [
        [prompt_id(problems[i], render(problems[i], tokenizer, config.task, config.max_prompt_tokens)) for i in order.batch(draw)]
        for draw in range(min(config.probe.first_batches, drawn))
    ]
