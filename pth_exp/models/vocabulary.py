"""The embedded model's words and its tokenizer: one token a word or digit."""

from __future__ import annotations

from typing import Any

import tokenizers
import transformers

from pth_exp.tasks.arithmetic import GAINS, LOSSES, NAMES, THINGS

CONNECTORS = ("so", "then", "now")
END, PAD = "<|end|>", "<|pad|>"


def build_tokenizer() -> Any:
    """A Qwen2Tokenizer over the task's words.

    AutoTokenizer rebuilds *every* tokenizer beside a Qwen2 model as a Qwen2Tokenizer, a byte-pair encoding with its own splitting
    pattern; a word-level tokenizer would lose its words in silence. So this is one: digits are its base vocabulary, words are
    added tokens, which every loader keeps. A word takes along the spaces around it, so that text reads naturally and digits of
    a number stand together: ``so 9 + 7 = 16`` is the tokens ``| so |9| + |7| = |1|6|``.
    """
    special: Any = {"unk_token": None, "eos_token": END, "pad_token": PAD}
    tokenizer = transformers.Qwen2Tokenizer(vocab={str(digit): digit for digit in range(10)}, merges=[], **special)
    before_numbers = ("has", *GAINS, *LOSSES, "total", *CONNECTORS, "+", "-", "=")
    words = [*NAMES, *(f" {word} " for word in before_numbers), *(f" {thing}" for thing in THINGS), ",", ".", "?"]
    tokenizer.add_tokens([tokenizers.AddedToken(word, normalized=False) for word in words])
    return tokenizer
