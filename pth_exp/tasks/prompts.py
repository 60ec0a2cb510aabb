"""From a problem to the tokens that the policy sees, and the identity that follows from them."""

from __future__ import annotations

import hashlib
import struct
import unicodedata
from collections.abc import Sequence
from typing import Any

from pth_exp import schema
from pth_exp.tasks.base import Problem, TaskError


def render(problem: Problem, tokenizer: Any, config: schema.TaskConfig, max_prompt_tokens: int) -> list[int]:
    """The prompt's tokens: its raw text, or one user turn of the tokenizer's chat template with the assistant's turn opened.

    Raises ``TaskError`` for a prompt longer than ``max_prompt_tokens``, a tokenizer without a chat template where one is asked
    for, and text that the tokenizer cannot represent (it would drop it in silence).
    """
    if config.chat_template == schema.ChatTemplate.always:
        tokens = _chat_tokens(problem, tokenizer)
    else:
        tokens = list(tokenizer(problem.prompt).input_ids)
        if _letters(tokenizer.decode(tokens, skip_special_tokens=True)) != _letters(problem.prompt):
            raise TaskError(
                f"model.path: this model's tokenizer cannot represent the {problem.split} prompt {problem.index} of "
                f"task.name={config.name} ({problem.prompt[:60]!r}); take a model whose tokenizer covers the task's text"
            )
    if not tokens:
        raise TaskError(f"task.prompt: the {problem.split} prompt {problem.index} is empty")
    if len(tokens) > max_prompt_tokens:
        raise TaskError(
            f"max_prompt_tokens: {max_prompt_tokens} is too few, the {problem.split} prompt {problem.index} has {len(tokens)}; "
            f"raise it to that at least"
        )
    return tokens


def prompt_id(problem: Problem, tokens: Sequence[int]) -> str:
    """Split, index, and the first 12 hex digits of the sha256 of the rendered tokens as little-endian int64."""
    digest = hashlib.sha256(struct.pack(f"<{len(tokens)}q", *tokens)).hexdigest()
    return f"{problem.split}:{problem.index}:{digest[:12]}"


def _chat_tokens(problem: Problem, tokenizer: Any) -> list[int]:
    if not tokenizer.chat_template:
        raise TaskError("task.chat_template: always is not possible, the tokenizer has no chat template; set it to never")
    turns = [{"role": "user", "content": problem.prompt}]
    return list(tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=True, return_dict=False))


def _letters(text: str) -> str:
    """What must survive a tokenizer: everything but white space and the choice among equivalent characters."""
    return "".join(unicodedata.normalize("NFKC", text).split())
