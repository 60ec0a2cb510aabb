"""Fields that take one of a few words."""

from __future__ import annotations

from enum import StrEnum


class OldPolicy(StrEnum):
    """Whose log-probabilities are ``old_logp``, the denominator of the PPO ratio (paper, section 4.1)."""

    sampler = "sampler"
    recomputed = "recomputed"


class Correction(StrEnum):
    """How an arm claims to correct for the sampler's lag; check 1 holds the arm to it.

    ``rejection``: it drops what old policy and sampler disagree on too far, and weights nothing by them.
    """

    none = "none"
    ratio = "ratio"
    weight = "weight"
    rejection = "rejection"
    behaviour_free = "behaviour_free"


class Aggregation(StrEnum):
    """How token terms become one number; verl spells the same names with hyphens."""

    token_mean = "token_mean"
    seq_mean_token_mean = "seq_mean_token_mean"
    seq_mean_token_sum = "seq_mean_token_sum"
    seq_mean_token_sum_norm = "seq_mean_token_sum_norm"


class Advantage(StrEnum):
    """How rewards of one group become advantages: centred, then divided by the standard deviation or not (Dr. GRPO)."""

    group_std = "group_std"
    group_mean = "group_mean"


class GradNorm(StrEnum):
    """What happens to the global gradient norm before an optimiser step: bounded above, or set (paper, Table 4)."""

    clip = "clip"
    set = "set"


class KlEstimator(StrEnum):
    """Schulman's estimators of KL(policy || reference) from sampled tokens."""

    k1 = "k1"
    k2 = "k2"
    k3 = "k3"


class Queue(StrEnum):
    """The replay queue's behaviour before it holds ``replay_age + 1`` batches (paper, section 4.3)."""

    unique_prefill = "unique_prefill"
    warmup = "warmup"


class Gate(StrEnum):
    refuse = "refuse"
    label = "label"


class Reference(StrEnum):
    initial = "initial"
    none = "none"


class Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"


class Activations(StrEnum):
    """Whose activations are alive during a backward pass."""

    whole_batch = "whole_batch"
    micro_batch = "micro_batch"


class ChatTemplate(StrEnum):
    never = "never"
    always = "always"


class TrackingMode(StrEnum):
    offline = "offline"
    online = "online"


class OptimizerName(StrEnum):
    adamw = "adamw"
    adamw_8bit = "adamw_8bit"
    paged_adamw_8bit = "paged_adamw_8bit"
