"""Check 3, batches: is every update trained on a batch of its own, as old as the schedule says? (Paper, section 4.3.)

Criterion: distinct batch IDs equal updates, unless ``design.allow_reuse`` says otherwise; it is never inferred from the
queue. Ages are recomputed from the version stamp that travelled with the batch, and a version stamp is held against the
weights' fingerprint: one sampler version is one set of weights, the learner's at that update. A sampler that aliases the
learner is caught there. The schedule's formula is judged by nothing of itself: a trainer never evaluates it, its ages come out
of the queue and the refreshes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import combinations
from typing import Any

from pth_exp.checks.result import Outcome, Verdict, not_all_there
from pth_exp.records.reader import Row, RunRecords, spans
from pth_exp.staleness.schedule import data_age

NAME = "batches"


def check(run: RunRecords) -> Verdict:
    """Judges one run from its ``batches`` and ``updates``."""
    config = run.config
    reuse_allowed = bool(config["design"]["allow_reuse"])
    ids = [row["batch_id"] for row in run.batches if row.get("batch_id") is not None]
    distinct = len(set(ids))
    number = f"{distinct} of {len(ids)}"
    faults: list[tuple[str, str]] = []
    reuse = _reuse(run.batches)
    if distinct < len(ids) and not reuse_allowed:
        faults.append(
            (number, f"{distinct} distinct batches in {len(ids)} updates, and the design does not allow reuse. {reuse}")
        )
    faults += [fault for fault in (_wrong_age(run), _wrong_weights(run), _disturbed(run)) if fault]
    details = tuple(text for text in (_ages(run.updates), _overlap(run.batches)) if text)
    values: dict[str, Any] = {
        "distinct": distinct,
        "updates": len(ids),
        "allow_reuse": reuse_allowed,
        "longest_reuse": _longest(run.batches),
        "ages": sorted({age for row in run.updates if (age := _age(row)) is not None}),
    }

    def say(outcome: Outcome, number: str, reason: str, more: Sequence[str] = ()) -> Verdict:
        return Verdict(NAME, run.label, outcome, number, reason, (*more, *details), values, self_reported=("sampler/version",))

    if faults:
        (number, reason), *others = faults
        return say(Outcome.failed, number, reason, [text for _, text in others])
    missing = _missing(run)
    if missing:
        return say(Outcome.not_measured, number if ids else "no batch IDs", missing + ".")
    if distinct < len(ids):
        return say(Outcome.passed, number, f"Batches are used again, as design.allow_reuse declares. {reuse}")
    return say(Outcome.passed, number, "Every update trains on a batch of its own, as old as scheduled.")


def _missing(run: RunRecords) -> str | None:
    updates = run.config["updates"]
    partial = not_all_there(min(len(run.updates), len(run.batches)), updates)
    if partial:
        return partial
    for rows, column in ((run.batches, "batch_id"), (run.updates, "sampler/version"), (run.updates, "sampler/fingerprint")):
        absent = [row["update"] for row in rows if row.get(column) is None]
        if absent:
            return f"{column} was not recorded at update {spans(absent)}"
    every = run.config["validation"]["every"]
    due = set() if every is None else {*range(0, updates, every), updates}
    seen = {
        row["update"] for row in run.evaluations if row.get("sampler/fingerprint_before") and row.get("sampler/fingerprint_after")
    }
    if due - seen:
        return f"Whether validation left the sampler alone was not recorded at update {spans(sorted(due - seen))}"
    return None


def _longest(batches: Sequence[Row]) -> dict[str, Any] | None:
    """The batch that most updates trained on."""
    users: dict[str, list[Row]] = defaultdict(list)
    for row in batches:
        if row.get("batch_id") is not None:
            users[row["batch_id"]].append(row)
    if not users:
        return None
    rows = max(users.values(), key=len)
    return {"batch": rows[0].get("draw"), "batch_id": rows[0]["batch_id"], "updates": [row["update"] for row in rows]}


def _reuse(batches: Sequence[Row]) -> str:
    longest = _longest(batches)
    if longest is None:
        return ""
    on = longest["updates"]
    return f"Longest reuse: {len(on)} updates ({spans(on)}) on batch {longest['batch']}."


def _age(row: Row) -> int | None:
    version = row.get("sampler/version")
    return None if version is None else int(row["update"] - version)


def _ages(updates: Sequence[Row]) -> str | None:
    ages = [age for row in updates if (age := _age(row)) is not None]
    if not ages:
        return None
    return f"Ages {min(ages)} to {max(ages)}, mean {sum(ages) / len(ages):.1f}, recomputed from the version stamps."


def _wrong_age(run: RunRecords) -> tuple[str, str] | None:
    k, interval = run.config["replay_age"], run.config["refresh_interval"]
    wrong = []
    for row in run.updates:
        age = _age(row)
        due = data_age(row["update"], k, interval)
        if age is not None and (age != due or row.get("data/age") not in (None, age)):
            wrong.append(row)
    if not wrong:
        return None
    row, update = wrong[0], wrong[0]["update"]
    version, claimed = row["sampler/version"], row.get("data/age")
    scheduled = data_age(update, k, interval)
    return (
        f"age off on {len(wrong)}/{len(run.updates)}",
        f"On {len(wrong)} updates the data's age is not the scheduled one: at update {update} the version stamp {version} gives "
        f"{_age(row)}, the row says {claimed}, replay_age={k} and refresh_interval={interval} give {scheduled}.",
    )


def _wrong_weights(run: RunRecords) -> tuple[str, str] | None:
    weights: dict[int, set[str]] = defaultdict(set)
    versions: dict[str, set[int]] = defaultdict(set)
    learner = {row["update"]: row.get("learner/fingerprint") for row in run.updates}
    for row in run.updates:
        version, fingerprint = row.get("sampler/version"), row.get("sampler/fingerprint")
        if version is None or fingerprint is None:
            continue
        weights[version].add(fingerprint)
        versions[fingerprint].add(version)
    for version, fingerprints in sorted(weights.items()):
        if len(fingerprints) > 1:
            return (
                f"{len(fingerprints)} weights of version {version}",
                f"Sampler version {version} stands for {len(fingerprints)} different sets of weights: "
                "the sampler's snapshot did not stand still.",
            )
        (fingerprint,) = fingerprints
        if learner.get(version) not in (None, fingerprint):
            text = f"The sampler's version {version} does not hold the weights that the learner had at update {version}."
            return f"version {version} differs", text
    for same in versions.values():
        # where the learner's own weights stood still, which the loop above has seen, so may the sampler's
        if len(same) > 1 and any(learner.get(version) is None for version in same):
            text = f"Sampler versions {spans(sorted(same))} have the same weights: a refresh did not take place."
            return f"{len(same)} versions alike", text
    return None


def _disturbed(run: RunRecords) -> tuple[str, str] | None:
    for row in run.evaluations:
        before, after = row.get("sampler/fingerprint_before"), row.get("sampler/fingerprint_after")
        if None not in (before, after) and before != after:
            return (
                "validation changed q",
                f"Validation at update {row['update']} left the sampler with other weights than it had before.",
            )
    return None


def _overlap(batches: Sequence[Row]) -> str | None:
    """How many prompts two distinct batches share at most."""
    prompts = {
        row["batch_id"]: (row.get("draw"), row["prompt_ids"]) for row in batches if row.get("batch_id") and row.get("prompt_ids")
    }
    users: dict[str, list[str]] = defaultdict(list)
    for batch, (_, names) in prompts.items():
        for name in set(names):
            users[name].append(batch)
    pairs = Counter(pair for sharing in users.values() for pair in combinations(sharing, 2))
    if not pairs:
        return "No two distinct batches share a prompt." if len(prompts) > 1 else None
    (a, b), shared = pairs.most_common(1)[0]
    (first, names), (second, _) = prompts[a], prompts[b]
    return f"Overlap: distinct batches {first} and {second} share {shared} of {len(names)} prompts, the most of any two."
