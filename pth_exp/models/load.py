"""Models and tokenizers for a run: no remote code, safetensors only, and nothing of the model's own generation settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError

from pth_exp import schema
from pth_exp.models.resolve import ModelError, resolve

_UNLOADABLE = (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError)


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Tokens with a meaning for sampling.

    Attributes:
        eos: tokens that end a response.
        pad: fills slots that masks exclude; may coincide with an end token.
        forbidden: tokens that no policy may give probability to: the padding token, unless it also ends a response.
    """

    eos: tuple[int, ...]
    pad: int
    forbidden: tuple[int, ...]


def load_policy(config: schema.ModelConfig, device: torch.device | str) -> tuple[Any, Any]:
    """The causal language model, in evaluation mode on ``device``, and its tokenizer.

    The files' generation_config.json (top-p, top-k, repetition penalty, ...) is replaced by an empty one: how to sample is the
    sampler's business alone. Raises ``ModelError``.
    """
    folder = resolve(config)
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model: Any
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=getattr(torch, config.dtype),
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
        )
    except _UNLOADABLE as error:
        raise _cannot_load(config, folder, error) from error
    model.generation_config = transformers.GenerationConfig()  # type: ignore[no-untyped-call]
    return model.to(device).eval(), load_tokenizer(config)


def load_tokenizer(config: schema.ModelConfig) -> Any:
    """The model's tokenizer, without its weights. Raises ``ModelError``."""
    folder = resolve(config)
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except _UNLOADABLE as error:
        raise _cannot_load(config, folder, error) from error


def _cannot_load(config: schema.ModelConfig, folder: Path, error: Exception) -> ModelError:
    reason = str(error).strip().splitlines()[0]
    return ModelError(
        f"model.path: {config.path!r} cannot be loaded from {folder}: {reason}; give a causal language model of an architecture "
        "that this version of transformers knows, with its tokenizer"
    )


def load_special_tokens(config: schema.ModelConfig, tokenizer: Any) -> SpecialTokens:
    """The model's special tokens, without its weights. Raises ``ModelError``."""
    model = transformers.AutoConfig.from_pretrained(resolve(config), trust_remote_code=False, local_files_only=True)
    return special_tokens(model, tokenizer)


def special_tokens(config: Any, tokenizer: Any) -> SpecialTokens:
    """End and padding tokens, from the tokenizer and the model's config.json.

    Raises ``ModelError`` if no token ends a response.
    """
    eos = end_tokens(config, tokenizer)
    pad = eos[0] if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)
    return SpecialTokens(eos, pad, () if pad in eos else (pad,))


def end_tokens(config: Any, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end a response, by the model's config.json or the tokenizer. Raises ``ModelError`` if there is none."""
    configured = config.eos_token_id
    ends = set(configured if isinstance(configured, list) else [configured]) | {tokenizer.eos_token_id}
    eos = tuple(sorted(end for end in ends if end is not None))
    if not eos:
        raise ModelError(
            f"model.path: {config.name_or_path!r} has no end-of-sequence token; set eos_token in its tokenizer_config.json"
        )
    return eos
