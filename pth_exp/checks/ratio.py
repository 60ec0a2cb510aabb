"""Check 1, ratio: what is the ratio, or the weight, taken against? (Paper, section 4.1.)

Criterion: ``coef/sampler_response``, the relative change of the coefficients on the tokens' gradients when the learner's
probability replaces q, the sampler's recorded one, wherever the loss reads q. An arm that corrects for the sampler's lag
(``ratio``, ``weight``) must respond on every update whose shift |log q - log pi_theta| stands above the noise; an arm that
does not (``none``, ``behaviour_free``) must not respond at all; one that only rejects (``rejection``) must respond where the loss
rejected something, and nowhere else. A clip fraction of 0 beside a growing KL is the signature
shown, not the criterion: with a second optimiser step on a batch the clip acts, and the arm is still uncorrected.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from pth_exp.checks.result import Outcome, Verdict, not_all_there, short
from pth_exp.records.reader import Row, RunRecords

NAME = "ratio"

RESPONSE, SHIFT = "coef/sampler_response", "rollout_corr/mean_abs_shift"
REJECTED = "rollout_corr/rollout_rs_masked_fraction"

NOISE_FACTOR = 3.0
"""A shift counts as lag when it exceeds the largest one seen at age 0 by this factor."""

ROUNDING = {"float32": 2.0**-23, "bfloat16": 2.0**-8}
"""Nats. The least noise assumed: the type's rounding of a number near 1."""

DEFAULT_NOISE = {"float32": 1e-5, "bfloat16": 0.05}
"""Nats. Assumed when a run has no update at age 0; mean |log q - log pi_theta| of two passes with equal weights stays below."""

LOUD = {"float32": 1e-3, "bfloat16": 0.2}
"""Nats. A larger mean shift at age 0 is no rounding: the recorded q is not the probability that the learner gives the token."""

RESPONDS = 1e-3
"""A shift of x nats moves coefficients that read q by about min(x, 1); a response below this share of it is none."""


@dataclass(frozen=True, slots=True)
class _Noise:
    floor: float  # nats
    source: str


def check(run: RunRecords) -> Verdict:
    """Judges one run from its ``updates``."""
    config = run.config
    correction, dtype = config["arm"]["correction"], config["model"]["dtype"]
    if not config["stack"]["record_sampler_logp"]:
        return _verdict(
            run, Outcome.not_measured, "q not recorded", "stack.record_sampler_logp=false: there is no q to compare with."
        )
    rows = [row for row in run.updates if row.get("sampler/version") is not None]
    # where all rewards of a batch are equal every coefficient is 0, and a relative change is not defined
    defined = [row for row in rows if row.get("coef/max_abs") != 0]
    needed = (RESPONSE, SHIFT, REJECTED) if correction == "rejection" else (RESPONSE, SHIFT)
    measured = [row for row in defined if all(_is_number(row.get(name)) for name in needed)]
    noise = _noise(rows, dtype)
    lagged = [row for row in measured if _age(row) > 0]
    judged = [row for row in lagged if row[SHIFT] > noise.floor]
    details = (*_signature(rows, noise), f"Noise floor {short(noise.floor)} nats: {noise.source}.")
    values: dict[str, Any] = {
        "correction": correction,
        "noise_floor": noise.floor,
        "updates": len(rows),
        "measured": len(measured),
        "lagged": len(lagged),
        "judged": len(judged),
        "response": _range([row[RESPONSE] for row in judged or measured]),
        "shift": _range([row[SHIFT] for row in judged or measured]),
        "kl": _range([row["rollout_corr/kl"] for row in rows if row.get("rollout_corr/kl") is not None]),
        "clip_fraction_zero": sum(row.get("actor/pg_clipfrac") == 0 for row in rows),
    }

    def say(outcome: Outcome, number: str, reason: str) -> Verdict:
        return _verdict(run, outcome, number, reason, details, values)

    fault = _wrong_old_policy(rows, config, noise) or _loud_at_age_zero(rows, dtype)
    if fault:
        return say(Outcome.failed, *fault)
    responding = [row for row in judged if row[RESPONSE] > RESPONDS * min(row[SHIFT], 1.0)]
    rejecting = [row for row in measured if correction == "rejection" and row[REJECTED] > 0]
    reads_q = [row for row in measured if row[RESPONSE] != 0 and row not in rejecting]
    corrects = correction in ("ratio", "weight")
    silent = len(judged) - len(responding)
    if corrects and silent:
        worst = max((row for row in judged if row not in responding), key=lambda row: row[SHIFT])
        return say(
            Outcome.failed,
            f"{short(worst[RESPONSE])} on {silent}/{len(judged)}",
            f"No correction for the sampler: the arm claims {correction}, and on {silent} of {len(judged)} lagged updates its "
            f"coefficients do not change when π_θ replaces q (update {worst['update']}: by {short(worst[RESPONSE])} at a shift "
            f"of {short(worst[SHIFT])} nats).",
        )
    if not corrects and reads_q:
        worst = max(reads_q, key=lambda row: row[RESPONSE])
        return say(
            Outcome.failed,
            f"{short(worst[RESPONSE])} on {len(reads_q)}/{len(measured)}",
            f"The arm claims {correction}, and its coefficients change by {short(worst[RESPONSE])} when π_θ replaces q "
            f"(update {worst['update']}{', where nothing was rejected' if correction == 'rejection' else ''}): "
            "the loss reads the sampler's probabilities.",
        )
    if rejecting and all(row[RESPONSE] == 0 for row in rejecting):
        return say(
            Outcome.failed,
            f"0 on {len(rejecting)}/{len(rejecting)}",
            f"The arm claims rejection, and on {len(rejecting)} updates on which its loss rejected something its coefficients do "
            "not change when π_θ replaces q: what it rejects does not depend on the sampler.",
        )
    partial = not_all_there(len(run.updates), config["updates"])
    unmeasured = len(run.updates) - len(rows) + len(defined) - len(measured)
    if partial or unmeasured:
        absent = f"{unmeasured} of {len(run.updates)} updates have no {' or '.join(needed)}"
        return say(Outcome.not_measured, f"{len(measured)}/{config['updates']}", f"{partial or absent}.")
    shifts = [row[SHIFT] for row in rows if _is_number(row.get(SHIFT))]
    if rows and len(shifts) == len(rows) and not any(_age(row) > 0 for row in rows):
        # nothing to correct, whether or not a coefficient could have responded
        return say(Outcome.passed, f"age 0, shift {short(max(shifts))}", "The sampler never lags, and all is quiet.")
    if correction == "rejection":
        return say(*_rejection(rows, rejecting))
    if not measured:
        silence = "All coefficients are 0 on every update, as where the rewards of each group are equal: nothing can respond."
        return say(Outcome.not_measured, f"0/{config['updates']}", silence)
    if correction == "none":
        return say(
            Outcome.warned,
            f"0 on {len(measured)}/{len(measured)}",
            "No correction for the sampler's lag (uncorrected): the coefficients do not change when π_θ replaces q.",
        )
    if not judged:
        top = max((row[SHIFT] for row in lagged), default=0.0)
        return say(
            Outcome.not_measured,
            f"shift {short(top)}",
            f"The sampler lags, but the shift never exceeds {short(top)} nats: a response would drown in the noise.",
        )
    if corrects:
        middle = median(row[RESPONSE] for row in judged)
        return say(
            Outcome.passed,
            f"{short(middle)} on {len(judged)}/{len(judged)}",
            f"The {correction} is taken against the sampler: coefficients change by {_spread(judged, RESPONSE)}.",
        )
    return say(
        Outcome.passed,
        f"0 on {len(measured)}/{len(measured)}",
        f"The loss does not read q: no coefficient changes when π_θ replaces it, at shifts of {_spread(judged, SHIFT)} nats.",
    )


def _rejection(rows: Sequence[Row], rejecting: Sequence[Row]) -> tuple[Outcome, str, str]:
    """What an arm that only rejects did on the updates of a lagging sampler; no fault was found."""
    lagged = [row for row in rows if _age(row) > 0]
    everything = sum(row[REJECTED] == 1 for row in lagged)
    share = _spread(lagged, REJECTED)
    if not any(row[REJECTED] > 0 for row in lagged):
        why = "the loss was the uncorrected one"
        return Outcome.warned, f"0 of {len(lagged)}", f"Nothing was rejected on any lagged update: {why}."
    if 2 * everything > len(lagged) or not rejecting:
        why = "Everything was rejected on most lagged updates, and there the arm trains on nothing: are its bounds for this lag?"
        return Outcome.warned, f"all on {everything}/{len(lagged)}", f"{why} Share of tokens rejected {share}."
    return (
        Outcome.passed,
        f"rejects on {len(rejecting)}/{len(lagged)}",
        f"Coefficients change where tokens are rejected, by {_spread(rejecting, RESPONSE)}, and nowhere else; share of tokens "
        f"rejected {share}.",
    )


def _verdict(
    run: RunRecords,
    outcome: Outcome,
    number: str,
    reason: str,
    details: tuple[str, ...] = (),
    values: dict[str, Any] | None = None,
) -> Verdict:
    return Verdict(NAME, run.label, outcome, number, reason, details, values or {}, self_reported=(RESPONSE, SHIFT))


def _is_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _age(row: Row) -> int:
    return int(row["update"] - row["sampler/version"])


def _noise(rows: Sequence[Row], dtype: str) -> _Noise:
    quiet = [row[SHIFT] for row in rows if _age(row) == 0 and row.get(SHIFT) is not None]
    if not quiet:
        default = DEFAULT_NOISE[dtype]
        return _Noise(
            NOISE_FACTOR * default, f"{short(NOISE_FACTOR)} times the {short(default)} assumed for {dtype}; no update has age 0"
        )
    largest = max(quiet)
    counted = f"the largest mean |log q − log π_θ| at age 0 (updates measured: {len(quiet)}), {short(largest)}"
    if largest < ROUNDING[dtype]:
        return _Noise(
            NOISE_FACTOR * ROUNDING[dtype], f"{short(NOISE_FACTOR)} times the rounding of {dtype}; {counted}, is smaller"
        )
    return _Noise(NOISE_FACTOR * largest, f"{short(NOISE_FACTOR)} times {counted}")


def _loud_at_age_zero(rows: Sequence[Row], dtype: str) -> tuple[str, str] | None:
    loud = [row for row in rows if _age(row) == 0 and (row.get(SHIFT) or 0.0) > LOUD[dtype]]
    if not loud:
        return None
    worst = max(loud, key=lambda row: row[SHIFT])
    return (
        f"{short(worst[SHIFT])} nats at age 0",
        f"At update {worst['update']} sampler and learner have the same weights, yet log q is off by {short(worst[SHIFT])} nats "
        "on average: the recorded q is not the probability under the policy (sampling parameters, temperature, masks, weights?).",
    )


def _wrong_old_policy(rows: Sequence[Row], config: dict[str, Any], noise: _Noise) -> tuple[str, str] | None:
    """Whose log-probabilities old_logp holds, measured, against ``arm.old_policy``. Skipped where the loss has no old policy."""
    declared = config["arm"]["old_policy"]
    key = "ratio/old_sampler_max_abs"
    lagged = [row for row in rows if _age(row) > 0 and row.get(key) is not None and (row.get(SHIFT) or 0.0) > noise.floor]
    if declared == "sampler":
        wrong = [row for row in rows if row.get(key)]
        found = "old_logp is not what the sampler recorded: it differs by up to {} nats"
    else:
        wrong = [row for row in lagged if row[key] == 0]
        found = "old_logp is what the sampler recorded, to the last bit (difference {})"
    if not wrong:
        return None
    worst = max(wrong, key=lambda row: row[key])
    text = found.format(short(worst[key]))
    return f"old_policy on {len(wrong)}/{len(rows)}", f"arm.old_policy={declared}, but {text} (update {worst['update']})."


def _signature(rows: Sequence[Row], noise: _Noise) -> tuple[str, ...]:
    """What the paper's logs showed: the clip and the ratio beside the KL from sampler to learner."""
    lines = []
    clip = [row["actor/pg_clipfrac"] for row in rows if row.get("actor/pg_clipfrac") is not None]
    if clip:
        zero = sum(value == 0 for value in clip)
        lines.append(
            f"Clip fraction exactly 0 on {zero} of {len(clip)} updates"
            + (f", up to {short(max(clip))}" if zero < len(clip) else "")
        )
    stepped = [row["ratio/clipfrac_by_step"] for row in rows if len(row.get("ratio/clipfrac_by_step") or ()) > 1]
    if stepped:
        first = sum(steps[0] == 0 for steps in stepped)
        later = max(max(steps[1:]) for steps in stepped)
        lines.append(
            f"of {len(stepped[0])} steps a batch the first has clip fraction 0 on {first} of {len(stepped)}, "
            f"later ones up to {short(later)}"
        )
    kl = _growth([row for row in rows if _age(row) > 0 and row.get("rollout_corr/kl") is not None], noise)
    if kl:
        lines.append(kl)
    signature = ["; ".join(lines) + "."] if lines else []
    one = [row["ratio/exactly_one_share"] for row in rows if row.get("ratio/exactly_one_share") is not None]
    if one:
        signature.append(
            f"Ratio identically 1 on {sum(share == 1 for share in one)} of {len(one)} updates (first step of a batch)."
        )
    return tuple(signature)


def _growth(lagged: Sequence[Row], noise: _Noise) -> str | None:
    if not lagged:
        return None
    top = max(lagged, key=lambda row: row["rollout_corr/kl"])
    start = next((row for row in lagged if row["rollout_corr/kl"] > 0 and (row.get(SHIFT) or 0.0) > noise.floor), None)
    if start is None or start["update"] >= top["update"]:
        return f"KL from sampler to learner at most {short(top['rollout_corr/kl'])} nats (update {top['update']})"
    a, b = start["rollout_corr/kl"], top["rollout_corr/kl"]
    return (
        f"KL from sampler to learner grows from {short(a)} (update {start['update']}) "
        f"to {short(b)} nats (update {top['update']}), ×{b / a:,.0f}"
    )


def _range(values: Sequence[float]) -> list[float] | None:
    return [min(values), median(values), max(values)] if values else None


def _spread(rows: Sequence[Row], key: str) -> str:
    values = [row[key] for row in rows]
    return f"{short(min(values))} to {short(max(values))} (median {short(median(values))}, {len(values)} updates)"
