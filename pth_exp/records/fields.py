"""Every column of the record files: type, unit and meaning.

The writer completes each row to these columns, so an absent value is an explicit null: not measured. The types are DuckDB's, so
that ``read_json(files, columns=...)`` reads rows whose numbers may be spelled ``"NaN"``, ``"Infinity"`` or ``"-Infinity"``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

EXTRA = "extra/"
"""Prefix of columns that a stack or a loss adds for itself; every other column is listed here."""

QUANTILES = ("q00", "q01", "q05", "q25", "q50", "q75", "q95", "q99", "q100")
TIMINGS = ("gen", "old_log_prob", "ref", "update_actor", "probe", "records", "step", "validate")


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its name, DuckDB type, unit (empty for a pure number or a name) and meaning."""

    name: str
    type: str
    unit: str
    meaning: str


_KEYS = (
    Column("update", "BIGINT", "updates", "number of the update, from 0"),
    Column("attempt", "BIGINT", "", "the attempt that wrote the row"),
)

_DIFFERENCE = (
    ("value_error", "DOUBLE", "relative error of the loss"),
    ("gradient_error", "DOUBLE", "largest error of a response's d loss / d logp, relative to its norm"),
    ("worst", "JSON", "where: input, response and its tokens"),
    ("cosine", "DOUBLE", "least cosine of the whole gradient and the equation's"),
    ("norm_ratio", "DOUBLE[]", "norm of the whole gradient over the equation's, least and largest"),
    ("response_cosine", "DOUBLE", "least cosine of a response's gradient and the equation's"),
    ("response_norm_ratio", "DOUBLE[]", "norm of a response's gradient over the equation's, least and largest"),
)


def _difference(prefix: str, of: str) -> Iterator[Column]:
    for name, type_, meaning in _DIFFERENCE:
        yield Column(f"{prefix}/{name}", type_, "", f"{of}: {meaning}")


UPDATES: tuple[Column, ...] = (
    *_KEYS,
    Column("sampler/version", "BIGINT", "updates", "updates that the weights had seen that generated the trained batch"),
    Column("sampler/fingerprint", "VARCHAR", "", "fingerprint of the weights that generated the trained batch"),
    Column("learner/fingerprint", "VARCHAR", "", "fingerprint of the learner's weights before the step"),
    Column("data/age", "BIGINT", "updates", "update minus sampler/version"),
    Column("data/batch_index", "BIGINT", "", "draw index of the trained batch"),
    Column("reward/generated", "DOUBLE", "", "mean reward of what was drawn in this update (update 0: the prefill)"),
    Column("reward/trained", "DOUBLE", "", "mean reward of the trained batch"),
    Column("actor/loss", "DOUBLE", "", "the total loss, mean over the batch's optimiser steps"),
    Column("actor/pg_loss", "DOUBLE", "", "the arm's loss"),
    Column("actor/kl_loss", "DOUBLE", "nats", "the penalty to the reference policy, before its coefficient"),
    Column(
        "actor/grad_norm",
        "DOUBLE",
        "",
        "global gradient norm before it was clipped or set, mean over the optimiser steps",
    ),
    Column("actor/grad_clipped", "BOOLEAN", "", "whether the gradient clip acted; null where the norm is set"),
    Column(
        "actor/grad_skipped",
        "BIGINT",
        "steps",
        "optimiser steps left out: grad_norm=set, and a norm below skip_below",
    ),
    Column("actor/lr", "DOUBLE", "", "learning rate"),
    Column("actor/pg_clipfrac", "DOUBLE", "", "share of tokens on which the PPO clip acted"),
    Column("actor/pg_clipfrac_lower", "DOUBLE", "", "share of tokens on which the dual clip acted"),
    Column("actor/ppo_kl", "DOUBLE", "nats", "mean of old_logp - logp"),
    Column("ratio/exactly_one_share", "DOUBLE", "", "share of tokens whose ratio to old_logp is exactly 1, first optimiser step"),
    Column("ratio/clipfrac_by_step", "DOUBLE[]", "", "clip fraction of each optimiser step on the batch"),
    Column("ratio/old_sampler_max_abs", "DOUBLE", "nats", "largest |old_logp - sampler_logp|"),
    Column("ratio/old_policy_max_abs", "DOUBLE", "nats", "largest |old_logp - logp| at the first optimiser step"),
    *(Column(f"ratio/log_policy_over_sampler/{q}", "DOUBLE", "nats", f"{q[1:]} % quantile of log pi_theta/q") for q in QUANTILES),
    Column("rollout_corr/kl", "DOUBLE", "nats", "sampler to learner, k1: mean of log q - log of the recomputed pi_old"),
    Column("rollout_corr/k3_kl", "DOUBLE", "nats", "sampler to learner, k3"),
    Column("rollout_corr/ess", "DOUBLE", "", "effective sample size of the token weights pi_theta / q, as a share of the tokens"),
    Column(
        "rollout_corr/rollout_is_ratio_fraction_high", "DOUBLE", "", "share of tokens with pi/q above the arm's cap, or above 2"
    ),
    Column("rollout_corr/rollout_rs_masked_fraction", "DOUBLE", "", "share of tokens that the loss rejected"),
    Column("rollout_corr/rollout_rs_seq_masked_fraction", "DOUBLE", "", "share of responses of which it rejected a token"),
    Column("rollout_corr/mean_abs_shift", "DOUBLE", "nats", "mean of |log q - log pi_theta|"),
    Column("coef/mean_abs", "DOUBLE", "", "mean size of d loss / d surprisal over tokens"),
    Column("coef/max_abs", "DOUBLE", "", "largest d loss / d surprisal in size"),
    *(Column(f"coef/over_mean_abs/{q}", "DOUBLE", "", f"{q[1:]} % quantile of coefficient / mean size") for q in QUANTILES),
    Column("coef/near_zero_share", "DOUBLE", "", "share of tokens that hardly train"),
    Column("coef/sampler_response", "DOUBLE", "", "relative change of the token coefficients when pi_theta replaces q"),
    Column("shadow/pairs", "JSON", "", "cosine and norm ratio of the token coefficients, each pair of the arm and its shadows"),
    *_difference("backward", "the backward pass, penalty included, at updates 0, 1, 2, 4, 8, ..."),
    Column("backward/not_measured", "VARCHAR", "", "why it was not held against the equation where it was due"),
    Column("response_length/mean", "DOUBLE", "tokens", "mean response length of the trained batch"),
    Column("response_length/clip_ratio", "DOUBLE", "", "share of truncated responses"),
    Column("tokens/trained", "BIGINT", "tokens", "response tokens in the trained batch"),
    *(Column(f"timing_s/{part}", "DOUBLE", "seconds", f"wall time of {part}") for part in TIMINGS),
)

BATCHES: tuple[Column, ...] = (
    *_KEYS,
    Column("batch_id", "VARCHAR", "", "sha256 of the sorted (prompt ID, response tokens) rows of the trained batch"),
    Column("generation_id", "VARCHAR", "", "draw index and sampler version, as draw:version"),
    Column("draw", "BIGINT", "", "draw index of the trained batch"),
    Column("prompt_ids", "VARCHAR[]", "", "prompts of the trained batch in drawn order"),
    Column("rows", "JSON", "", "rows in training order: prompt ID and response number"),
    Column("rewards", "DOUBLE[]", "", "reward of each row"),
    Column("lengths", "BIGINT[]", "tokens", "response length of each row"),
    Column("generated", "JSON", "", "draw index and prompt IDs of what was drawn in this update"),
    Column("histogram", "JSON", "", "histogram of log pi_theta - log q: edges in nats, counts in tokens"),
)

EVALS: tuple[Column, ...] = (
    Column("update", "BIGINT", "updates", "number of updates that the learner had seen"),
    Column("attempt", "BIGINT", "", "the attempt that wrote the row"),
    Column("accuracy", "DOUBLE", "", "share of problems solved"),
    Column("correct", "BIGINT[]", "", "1 or 0 for each problem"),
    Column("problems", "VARCHAR[]", "", "prompt IDs of the problems"),
    Column("decoding", "JSON", "", "how the responses were decoded"),
    Column("policy_version", "BIGINT", "updates", "updates that the evaluated weights had seen"),
    Column("sampler/fingerprint_before", "VARCHAR", "", "fingerprint of the sampler's weights before validation"),
    Column("sampler/fingerprint_after", "VARCHAR", "", "and after it"),
    Column("learner/fingerprint", "VARCHAR", "", "fingerprint of the evaluated weights"),
    Column("mean_length", "DOUBLE", "tokens", "mean response length"),
)

EQUATIONS: tuple[Column, ...] = (
    Column("update", "BIGINT", "updates", "number of updates that the attempt found done when it began"),
    Column("attempt", "BIGINT", "", "the attempt that wrote the row"),
    Column("loss", "VARCHAR", "", "name of the loss that trains"),
    Column("equation/sha256", "VARCHAR", "", "sha256 of the text of arm.equation"),
    Column("not_measured", "VARCHAR", "", "why the loss was not held against the equation; null: it was"),
    Column("inputs", "BIGINT", "batches", "fixed and random inputs"),
    Column("responses", "BIGINT", "responses", "responses in them that have a token"),
    *_difference("float64", "the loss computed in float64"),
    *_difference("float32", "the loss computed in float32"),
    Column("timing_s/equation", "DOUBLE", "seconds", "wall time of this measurement"),
)

KINDS: dict[str, tuple[Column, ...]] = {"updates": UPDATES, "batches": BATCHES, "evals": EVALS, "equations": EQUATIONS}
"""Columns of ``<kind>.NNNN.jsonl``, the segment that attempt NNNN writes."""


def segment_name(kind: str, attempt: int) -> str:
    """File name of the segment of one attempt."""
    return f"{kind}.{attempt:04d}.jsonl"
