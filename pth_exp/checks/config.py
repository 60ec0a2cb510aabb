"""Check 2, config: did every run get what its label says, and does only what the comparison varies differ? (Paper, section 4.2.)

Criteria: the frozen file is the one that was dispatched; what the built objects received equals what was frozen (on verl
also its own config, setting by setting); the runs hold to their design; inputs agree across runs that name the same ones;
and the ordered prompt IDs of the first batches follow the data seeds. Prompt IDs shared by runs that are labelled with
different seeds are a fail even when every config agrees with itself.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pth_exp import changes
from pth_exp.checks import verl_config
from pth_exp.checks.result import Outcome, Verdict
from pth_exp.design import Described, compare, flatten
from pth_exp.records.reader import RunRecords, Sweep
from pth_exp.schema import DesignConfig, PerArm

NAME = "config"

Fault = tuple[str, str]
"""The deciding number and its sentence."""


def check(sweep: Sweep) -> list[Verdict]:
    """Judges every run of a sweep, in the sweep's order."""
    faults: dict[int, list[Fault]] = {i: [] for i in range(len(sweep.runs))}
    entries = {entry["dir"]: entry for entry in sweep.index["runs"]}
    for i, run in enumerate(sweep.runs):
        faults[i] += _integrity(run, entries[run.path.name])
        faults[i] += _received(run)
        faults[i] += verl_config.faults(run)
        faults[i] += _drawn(run)
    for found in (_shared_prompts(sweep), _parted_prompts(sweep.runs), _design(sweep), _inputs(sweep.runs)):
        for i, fault in found:
            faults[i].append(fault)
    return [_verdict(run, faults[i]) for i, run in enumerate(sweep.runs)]


def _verdict(run: RunRecords, faults: Sequence[Fault]) -> Verdict:
    received = len(_known(run))
    ids = sum(map(len, run.first_batches or ()))
    values = {"received": received, "first_prompt_ids": ids, "faults": [text for _, text in faults]}
    changed = changes.summary(run.path)

    def say(outcome: Outcome, number: str, reason: str, details: tuple[str, ...] = ()) -> Verdict:
        if changed is not None:
            details = (*details, f"Not one run in all its updates: {changed}.")
        return Verdict(NAME, run.label, outcome, number, reason, details, values, self_reported=("received.yaml",))

    if faults:
        (number, reason), *others = faults
        return say(Outcome.failed, number, reason, tuple(text for _, text in others))
    if run.received is None:
        return say(Outcome.not_measured, "no received.yaml", "What the built objects received was not read back.")
    if not received:
        return say(Outcome.not_measured, "0 fields received", "received.yaml holds no field of the config.")
    if (missing := verl_config.not_measured(run)) is not None:
        return say(Outcome.not_measured, missing, "What verl holds of its frozen config was not read back.")
    if not ids:
        return say(Outcome.not_measured, "no first batches", "The prompt IDs of the first batches were not written.")
    if changed is not None:
        first = min(row["from_update"] for row in changes.rows(run.path) if row["event"] == "began")
        return say(Outcome.warned, f"changed at {first}", "Something changed since it was frozen, or between its attempts.")
    return say(Outcome.passed, f"{received} fields, {ids} IDs", "Received as frozen; the first prompt IDs follow the data seed.")


def _integrity(run: RunRecords, entry: Mapping[str, Any]) -> Iterable[Fault]:
    for name, expected in run.frozen.get("files", {}).items():
        path = run.path / name
        found = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "gone"
        if found != expected:
            yield f"{name} edited", f"{name} has sha256 {found}, frozen was {expected}."
    found = hashlib.sha256((run.path / "frozen.yaml").read_bytes()).hexdigest()
    if found not in (entry["frozen_sha256"], changes.accepted(run.path).get(changes.FROZEN)):
        yield "frozen.yaml edited", f"frozen.yaml has sha256 {found}, the sweep dispatched {entry['frozen_sha256']}."


MEASURED_ELSEWHERE = ("ratio-with-recomputed", "weight-with-sampler")
"""Findings about what an arm claims: the gate has them from the config, check 1 measures them."""


def described(run: RunRecords, label: str | None = None) -> Described:
    """A run as the design sees it."""
    values = {**run.config, "inputs": run.frozen["inputs"]}
    return Described(label or run.label, values, config_id=run.frozen["config_id"])


def design_config(values: Mapping[str, Any]) -> DesignConfig:
    """The design of an ``index.json``, or of a frozen config."""
    return DesignConfig(**{**values, "per_arm": [PerArm(**declared) for declared in values["per_arm"]]})


def _design(sweep: Sweep) -> Iterable[tuple[int, Fault]]:
    """The design's comparison once more, over what is in the frozen files now; an override is known only to the gate."""
    declared = sweep.index["design"]
    runs = [described(run) for run in sweep.runs]
    if declared["extends"] is not None:
        runs += [described(run, f"{declared['extends']}/{run.label}") for run in Sweep.load(Path(declared["extends"])).runs]
    findings = compare(runs, design_config(declared)).findings
    # whose field did not follow is said more exactly than between which runs it differs
    named = {f.field for f in findings if f.kind == "swept-but-equal"}
    found = [
        (f.kind, f.field, f.runs, f.message)
        for f in findings
        if f.kind not in MEASURED_ELSEWHERE
        and not (f.kind == "undeclared-difference" and f.field in named)
        and not f.field.startswith("inputs.")  # _inputs says which run is astray
    ]
    gate = [f for f in sweep.index["gate"]["findings"] if f["kind"] == "override-did-not-arrive"]
    found += [(f["kind"], f["field"], f["runs"], f["message"]) for f in gate]
    for kind, field, labels, message in found:
        astray = set(labels)
        for i, run in enumerate(sweep.runs):
            if run.label in astray:
                yield i, (f"{field}: {kind}", f"{kind}: {message}.")


def _known(run: RunRecords) -> dict[str, tuple[Any, Any]]:
    """The config's fields that were read back: frozen and received value."""
    frozen, received = flatten(run.config), flatten(run.received or {})
    return {key: (frozen[key], received[key]) for key in received if key in frozen}


def _received(run: RunRecords) -> Iterable[Fault]:
    for key, (frozen, received) in _known(run).items():
        if frozen != received:
            yield f"{key}: {received}", f"{key} is frozen as {frozen!r}, and the built object received {received!r}."


def _drawn(run: RunRecords) -> Iterable[Fault]:
    """The batches trained on against the first batches as drawn."""
    first = run.first_batches or []
    for row in run.batches:
        draw = row.get("draw")
        if draw is not None and draw < len(first) and row.get("prompt_ids") not in (None, first[draw]):
            yield (
                f"batch {draw} differs",
                f"Update {row['update']} trained on batch {draw}, whose prompts are not those drawn as batch {draw}.",
            )
            return


def _comparable(runs: Sequence[RunRecords]) -> Iterable[list[int]]:
    """Groups of runs that draw from the same prompts in batches of the same size, so that equal seeds mean equal prompt IDs."""
    groups: dict[str, list[int]] = defaultdict(list)
    for i, run in enumerate(runs):
        if run.first_batches:
            inputs, config = run.frozen["inputs"], run.config
            groups[repr((inputs["data"], inputs["tokenizer"], config["task"], config["prompts_per_update"]))].append(i)
    return groups.values()


def _orders(runs: Sequence[RunRecords], group: Sequence[int]) -> dict[tuple[str, ...], list[int]]:
    """Runs by the ordered prompt IDs of as many first batches as all of them wrote."""
    count = min(len(runs[i].first_batches or ()) for i in group)
    orders: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for i in group:
        orders[tuple(name for batch in (runs[i].first_batches or ())[:count] for name in batch)].append(i)
    return orders


def _shared_prompts(sweep: Sweep) -> Iterable[tuple[int, Fault]]:
    runs = sweep.runs
    if "seeds.data" in sweep.index["design"]["fixed"]:
        return  # one data order for all seeds is what the design declares
    for group in _comparable(runs):
        for order, sharing in _orders(runs, group).items():
            seeds = {runs[i].config["seed"] for i in sharing}
            if len(seeds) == 1:
                continue
            astray = [i for i in sharing if runs[i].config["seeds"]["data"] != runs[i].config["seed"]]
            if len({runs[i].config["seed"] for i in sharing if i not in astray}) > 1:
                astray = sharing  # the configs do not tell who is wrong
            for i in astray or sharing:
                other = next(runs[j] for j in sharing if runs[j].config["seed"] != runs[i].config["seed"])
                text = (
                    f"Labelled seed {_seed(runs[i])}, yet its first {len(order)} prompt IDs are those of {other.label}, in "
                    f"the same order: the data seed did not arrive (seeds.data is {runs[i].config['seeds']['data']})."
                )
                yield i, (f"IDs of seed {_seed(other)}", text)


def _seed(run: RunRecords) -> str:
    seed = run.config["seed"]
    return "default" if seed is None else str(seed)


def _parted_prompts(runs: Sequence[RunRecords]) -> Iterable[tuple[int, Fault]]:
    for group in _comparable(runs):
        by_seed: dict[Any, list[int]] = defaultdict(list)
        for i in group:
            by_seed[runs[i].config["seeds"]["data"]].append(i)
        for seed, same in by_seed.items():
            orders = _orders(runs, same)
            for i in _minority(orders):
                other = next(j for j in same if j != i and runs[j].first_batches != runs[i].first_batches)
                update, position = parting(runs[i].first_batches or [], runs[other].first_batches or []) or (0, 0)
                text = (
                    f"seeds.data is {seed} as in {runs[other].label}, yet prompt IDs part at batch {update}, position {position}."
                )
                yield i, (f"IDs part at {update}:{position}", text)


def _minority(groups: Mapping[Any, Sequence[int]]) -> list[int]:
    """Who is not in the largest group; everyone when there is no single largest."""
    if len(groups) < 2:
        return []
    sizes = sorted((len(members) for members in groups.values()), reverse=True)
    tied = sizes[0] == sizes[1]
    return [i for members in groups.values() if tied or len(members) < sizes[0] for i in members]


def parting(a: Sequence[Sequence[str]], b: Sequence[Sequence[str]]) -> tuple[int, int] | None:
    """Batch and position at which two sequences of first batches part; None when one continues the other."""
    for batch, (left, right) in enumerate(zip(a, b, strict=False)):
        for position, (x, y) in enumerate(zip(left, right, strict=False)):
            if x != y:
                return batch, position
        if len(left) != len(right):
            return batch, min(len(left), len(right))
    return None


def _inputs(runs: Sequence[RunRecords]) -> Iterable[tuple[int, Fault]]:
    """Runs that name the same input must have had the same bytes; code is named by no field, so all runs share it."""
    for name in sorted({name for run in runs for name in run.frozen["inputs"]}):
        groups: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        for i, run in enumerate(runs):
            config = run.config
            model = config["model"]["path"], config["model"]["revision"]
            named = {"data": config["task"], "model": model, "tokenizer": model}.get(name)
            groups[repr(named)][repr(run.frozen["inputs"].get(name))].append(i)
        for hashes in groups.values():
            for i in _minority(hashes):
                found = repr(runs[i].frozen["inputs"].get(name))
                other = next(h for h in hashes if h != found)
                yield i, (f"{name} differs", f"The {name} has hash {found}, in other runs that name the same one {other}.")
