"""How large a model is, from its config alone: no weights are read, and nothing is fetched."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pth_exp import schema
from pth_exp.models.resolve import EMBEDDED, EMBEDDED_FOLDER


class NoShape(Exception):
    """A model whose size cannot be told here; the message says why, and the remedy."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder of the Llama or Qwen2 kind: gated MLP, grouped key-value heads, RMS norms.

    Attributes:
        hidden: width of the residual stream.
        intermediate: width of the MLP.
        layers, heads, kv_heads, head_dim, vocabulary: as they say.
        tied: the output layer is the embedding.
        bias: queries, keys and values have one (Qwen2).
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    bias: bool

    @property
    def layer(self) -> int:
        """Parameters of one layer."""
        queries, keys = self.heads * self.head_dim, 2 * self.kv_heads * self.head_dim
        attention = self.hidden * (2 * queries + keys) + self.bias * (queries + keys)
        return attention + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def ends(self) -> int:
        """Parameters outside the layers: embedding, last norm, output layer."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer + self.ends

    @classmethod
    def of(cls, config: dict[str, Any]) -> Shape:
        """Out of a ``config.json``. Raises ``NoShape`` for another architecture."""
        kind = config.get("model_type")
        if kind not in ("qwen2", "llama"):
            raise NoShape(f"model_type {kind!r} is not one whose parameters are counted here (qwen2, llama)")
        heads = config["num_attention_heads"]
        return cls(
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocabulary=config["vocab_size"],
            tied=config.get("tie_word_embeddings", False),
            bias=kind == "qwen2",
        )


KNOWN = {
    "Qwen/Qwen2.5-0.5B": Shape(896, 4864, 24, 14, 2, 64, 151_936, tied=True, bias=True),
    "Qwen/Qwen2.5-Math-1.5B": Shape(1536, 8960, 28, 12, 2, 128, 151_936, tied=True, bias=True),
    "Qwen/Qwen2.5-3B-Instruct": Shape(2048, 11_008, 36, 16, 2, 128, 151_936, tied=True, bias=True),
    "Qwen/Qwen2.5-Math-7B": Shape(3584, 18_944, 28, 28, 4, 128, 152_064, tied=False, bias=True),
    "meta-llama/Llama-3.2-3B-Instruct": Shape(3072, 8192, 28, 24, 8, 128, 128_256, tied=True, bias=False),
}
"""The models of ``conf/model``, which need not be on the machine that a sweep is planned on."""


def shape_of(model: schema.ModelConfig) -> Shape:
    """Raises ``NoShape``."""
    folder = EMBEDDED_FOLDER if model.path == EMBEDDED else Path(model.path).expanduser()
    file = folder / "config.json"
    if file.is_file():
        return Shape.of(json.loads(file.read_text()))
    if model.path in KNOWN:
        return KNOWN[model.path]
    raise NoShape(f"the config of model.path={model.path} is not on this machine; name a folder that has it")
