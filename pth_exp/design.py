"""What a comparison varies and holds fixed: one :func:`compare` that serves the design gate, ``pth diff`` and check 2.

It works on plain mappings, so that any two YAML files can be compared; what the schema knows of a field adds its role and
the field that it follows.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pth_exp import naming, schema
from pth_exp.naming import FEW, SEPARATOR, shown
from pth_exp.schema import DesignConfig, Role

ABSENT = "(absent)"
"""Stands for the value of a field that a run does not have."""

INPUT_OWNERS = {"inputs.data": "task", "inputs.model": "model", "inputs.tokenizer": "model"}


@dataclass(frozen=True)
class Described:
    """One run as the design sees it.

    Attributes:
        label: how the run is called.
        values: nested mapping of its config; the frozen hashes, where known, under ``inputs``.
        given: dotted field to the value that an override asked for.
        choices: config group to the option that was chosen.
        config_id: the run's identity, where known.
    """

    label: str
    values: Mapping[str, Any]
    given: Mapping[str, Any] = field(default_factory=dict)
    choices: Mapping[str, str] = field(default_factory=dict)
    config_id: str | None = None


@dataclass(frozen=True)
class Finding:
    """One breach of the design.

    ``kind`` is one of undeclared-difference, swept-but-equal, duplicate, override-did-not-arrive, ratio-with-recomputed,
    weight-with-sampler, rejection-with-sampler, fixed-field-differs.
    """

    kind: str
    field: str
    runs: list[str]
    message: str
    remedy: str


@dataclass
class Comparison:
    """Fields that differ between runs, by what the design says of them: field to {run label: value}."""

    varied: dict[str, dict[str, Any]] = field(default_factory=dict)
    per_arm: dict[str, dict[str, Any]] = field(default_factory=dict)
    unexpected: dict[str, dict[str, Any]] = field(default_factory=dict)
    execution: dict[str, dict[str, Any]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)


def compare(runs: Sequence[Described], design: DesignConfig, swept: Iterable[str] = ()) -> Comparison:
    """Hold runs against a design. ``swept`` are the fields swept on the command line; they stand for ``vary: null``.

    Every field may differ that ``vary``, ``blocks`` or ``per_arm`` names, or that follows such a field; within a block a
    follower must be a function of what it follows. Labels must be unique.
    """
    return _Comparing(runs, design, list(swept)).result


def brief(findings: Sequence[Finding], most: int = 3) -> list[Finding]:
    """Findings for people: of many that breach the design in one way, the first ones, and how many there are."""
    alike: dict[tuple[str, str, str], list[Finding]] = {}
    for found in findings:
        alike.setdefault((found.kind, found.field, found.remedy), []).append(found)
    shortened: list[Finding] = []
    for group in alike.values():
        rest = group[most:] if len(group) > most + 1 else []
        shortened += group[: len(group) - len(rest)]
        if rest:
            runs = [run for found in rest for run in found.runs]
            message = f"and {len(rest)} more like these, in {len(set(runs))} runs"
            shortened.append(replace(rest[0], runs=runs, message=message))
    return shortened


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mapping to {dotted path: leaf}; lists, and empty mappings, are leaves."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if value and (type(value) is dict or isinstance(value, Mapping)):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def covers(entry: str, path: str) -> bool:
    """Whether naming ``entry`` speaks of the field ``path``: the field, a group that holds it, or what it follows."""
    return path == entry or path.startswith(entry + ".") or entry in (_info(path).follows, INPUT_OWNERS.get(path))


@functools.cache
def _table() -> dict[str, schema.FieldInfo]:
    return schema.field_table()


def _info(path: str) -> schema.FieldInfo:
    """What the schema says of a field, or of the mapping that it lies in; one that it does not know, as a user's own arm has,
    counts as science."""
    parts = path.split(".")
    within = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((_table()[p] for p in within if p in _table()), schema.FieldInfo(path, Role.science, "", "", ""))


def role(path: str) -> Role:
    """What a field does to a comparison; science where the schema does not know the field."""
    return _info(path).role


def _key(value: Any) -> Hashable:
    """What two values have in common that count as equal: the same JSON, so that 1, 1.0 and true are three.

    Unlike the identity's canonical form it takes whatever a YAML file holds.
    """
    if value is None or type(value) in (str, int, bool):
        return type(value), value
    return float.__repr__(value) if type(value) is float else json.dumps(value, sort_keys=True, default=str)


class _Comparing:
    def __init__(self, runs: Sequence[Described], design: DesignConfig, swept: list[str]) -> None:
        self.runs = runs
        self.design = design
        self.swept = swept
        self.vary = swept if design.vary is None else list(design.vary)
        self.flat = {run.label: flatten(run.values) for run in runs}
        self.fields = list(dict.fromkeys(path for flat in self.flat.values() for path in flat))
        self.keys = {path: self._column(path) for path in self.fields}
        self.differing = {path: None for path in self.fields if self._distinct(path) > 1}
        self.names = naming.Runs(list(self.flat))
        self.groups: dict[str, list[list[str]]] = {}
        self.result = Comparison()
        self._check_each_run()
        for declared in design.per_arm:
            self._check_per_arm(declared)
        for path in self.differing:
            self._classify(path)
        self._check_swept()
        self._check_followers()
        self._check_duplicates()

    def _column(self, path: str) -> dict[str, Hashable]:
        return {label: _key(flat.get(path, ABSENT)) for label, flat in self.flat.items()}

    def _value(self, label: str, path: str) -> Any:
        return self.flat[label].get(path, ABSENT)

    def _values(self, path: str, labels: Iterable[str] | None = None) -> dict[str, Any]:
        return {label: self._value(label, path) for label in (self.flat if labels is None else labels)}

    def _distinct(self, path: str, labels: Iterable[str] | None = None) -> int:
        keys = self.keys.get(path, {})
        return len(set(keys.values() if labels is None else map(keys.get, labels)))

    def _find(self, kind: str, path: str, runs: Iterable[str], message: str, remedy: str) -> None:
        self.result.findings.append(Finding(kind, path, list(runs), message, remedy))

    def _show(self, values: Mapping[str, Any]) -> str:
        """Each value with the runs that have it, the most frequent first."""
        return self._listed([(shown(value), label) for label, value in values.items()], "{what} ({runs})", ", ", "values")

    def _listed(self, said: Iterable[tuple[str, str]], form: str, between: str, rest: str) -> str:
        """What is said of each run, said once for all the runs of which it is said."""
        having: dict[str, list[str]] = {}
        for what, label in said:
            having.setdefault(what, []).append(label)
        most = sorted(having.items(), key=lambda item: -len(item[1]))
        texts = [form.format(what=what, runs=self.names.named(labels)) for what, labels in most[:FEW]]
        return between.join(texts) + (f" and {len(most) - FEW} more {rest}" if len(most) > FEW else "")

    # ------------------------------------------------------------------------------------------------ run by run

    def _check_each_run(self) -> None:
        """What is wrong with a run alone; the runs with which the same is wrong are one finding."""
        wrong: dict[tuple[str, str, str], list[tuple[str, str]]] = {}
        for run in self.runs:
            for kind, path, message, remedy in self._wrong(run):
                wrong.setdefault((kind, path, remedy), []).append((message, run.label))
        for (kind, path, remedy), said in wrong.items():
            self._find(
                kind, path, [label for _, label in said], self._listed(said, "{what}, in {runs}", "; ", "such cases"), remedy
            )

    def _wrong(self, run: Described) -> Iterator[tuple[str, str, str, str]]:
        """Kind, field, message and remedy."""
        flat = self.flat[run.label]
        for path, asked in run.given.items():
            got = flat.get(path, ABSENT)
            if _key(got) != _key(asked) and not (isinstance(asked, int) and got == float(asked)):
                yield (
                    "override-did-not-arrive", path, f"asked for {path}={shown(asked)}, resolved to {shown(got)}",
                    "give the field once, and nowhere after the override",
                )  # fmt: skip
        arm, chosen = flat.get("arm.name"), run.choices.get("arm")
        if chosen is not None and arm != chosen:
            yield (
                "override-did-not-arrive", "arm", f"asked for arm={chosen}, the run's arm calls itself {arm}",
                f"set name: {chosen} in conf/arm/{chosen}.yaml",
            )  # fmt: skip
        correction, old_policy = flat.get("arm.correction"), flat.get("arm.old_policy")
        if (correction, old_policy) == ("ratio", "recomputed"):
            yield (
                "ratio-with-recomputed", "arm.old_policy",
                "arm.correction=ratio with arm.old_policy=recomputed: the ratio is against the learner, at any number of "
                "optimiser steps, and corrects nothing of the sampler's lag",
                "set arm.old_policy=sampler, or arm.correction=none",
            )  # fmt: skip
        if correction in ("weight", "rejection") and old_policy == "sampler":
            yield (
                f"{correction}-with-sampler", "arm.old_policy",
                f"arm.correction={correction} with arm.old_policy=sampler: old policy / sampler is 1 for every token",
                "set arm.old_policy=recomputed",
            )  # fmt: skip

    # ---------------------------------------------------------------------------------------------- field by field

    def _classify(self, path: str) -> None:
        info, values = _info(path), self._values(path)
        if info.role is Role.output:
            return
        if any(covers(entry, path) for entry in self.design.fixed):
            self.result.unexpected[path] = values
            self._find(
                "fixed-field-differs", path, values, f"design.fixed names {path}, and it differs: {self._show(values)}",
                f"give {path} one value, or take it out of design.fixed",
            )  # fmt: skip
            return
        if info.role is Role.execution:
            self.result.execution[path] = values
            return
        if path in schema.LOCATIONS and all("inputs.data" in flat for flat in self.flat.values()):
            return  # the contents are compared in its place
        if any(declared.field == path for declared in self.design.per_arm):
            return
        owners = [entry for entry in [*self.vary, *self.design.blocks] if covers(entry, path)]
        if not owners:
            self.result.unexpected[path] = values
            self._find(
                "undeclared-difference", path, values, f"{path} differs, which the design does not declare: {self._show(values)}",
                f"give it one value, or name it in design.vary, design.blocks or design.per_arm (now: vary {self.vary}, "
                f"blocks {list(self.design.blocks)})",
            )  # fmt: skip
            return
        owner = max(owners, key=len)
        followed = info.follows in self.differing  # held against what it follows, run by run
        strays = [] if owner == path or followed else self._strays(path, owner)
        if strays:
            self.result.unexpected[path] = values
            self._find(
                "undeclared-difference", path, strays,
                f"{path} differs between runs of one {owner}: {self._show(self._values(path, strays))}",
                f"give {path} one value for each {owner}, or name {path} in design.vary",
            )  # fmt: skip
            return
        (self.result.per_arm if owner == "arm" else self.result.varied)[path] = values

    def _strays(self, path: str, owner: str) -> list[str]:
        """Runs of one block and one value of ``owner`` between which ``path`` differs all the same."""
        return [label for group in self._groups(owner) if self._distinct(path, group) > 1 for label in group]

    def _groups(self, owner: str) -> list[list[str]]:
        """Runs of one block and one value of ``owner``."""
        if owner in self.groups:
            return self.groups[owner]
        blocks = [f for f in self.fields if any(covers(b, f) for b in self.design.blocks)]
        groups: dict[tuple[Hashable, ...], list[str]] = {}
        for label, flat in self.flat.items():
            identity = _key(flat.get(f"{owner}.name", flat.get(owner, ABSENT)))
            groups.setdefault((identity, *(self.keys[f][label] for f in blocks)), []).append(label)
        self.groups[owner] = list(groups.values())
        return self.groups[owner]

    def _check_per_arm(self, declared: schema.PerArm) -> None:
        path, values = declared.field, self._values(declared.field)
        arms = {label: flat.get("arm.name", ABSENT) for label, flat in self.flat.items()}
        wrong = [x for x, value in values.items() if arms[x] in declared.values and _key(value) != _key(declared.values[arms[x]])]
        others = [x for x in values if arms[x] not in declared.values]
        if self._distinct(path, others) > 1:
            wrong += others
        if self._distinct(path) > 1:
            (self.result.unexpected if wrong else self.result.per_arm)[path] = values
        if wrong:
            self._find(
                "undeclared-difference", path, wrong,
                f"design.per_arm gives {path} as {declared.values}; resolved to {self._show(self._values(path, wrong))}",
                f"do not override {path}, or change design.per_arm",
            )  # fmt: skip

    # -------------------------------------------------------------------------------------------- the whole sweep

    def _check_swept(self) -> None:
        """A swept field must differ. One that `vary` names may rest only if its values are replicates."""
        expected = [*self.swept, *(e for e in self.vary if e not in self.swept and e not in self.design.replicate)]
        for entry in expected if len(self.runs) > 1 else []:
            own = [path for path in self.fields if path == entry or path.startswith(entry + ".")]
            if not any(path in self.differing for path in own):
                value = self._value(self.runs[0].label, own[0]) if own else ABSENT
                self._find(
                    "swept-but-equal", entry, self.flat, f"the comparison varies {entry}, and every run has {shown(value)}",
                    f"give {entry} more than one value, or take it out of design.vary",
                )  # fmt: skip

    def _check_followers(self) -> None:
        """Where ``seed`` differs, what it feeds must have followed; ``seed=null`` leaves the streams but the data's at 0."""
        declared = [*self.design.fixed, *self.vary, *self.design.blocks]
        for path in self.fields:
            source = _info(path).follows
            if not source or source not in self.differing or path in declared:
                continue
            astray = [x for x in self.flat if self._value(x, path) != self._value(x, source)]
            astray = [x for x in astray if (self._value(x, source), self._value(x, path)) != (None, 0)]
            if astray:
                self.result.varied.pop(path, None)
                self.result.unexpected[path] = self._values(path)
                seen = self._astray(path, source, astray)
                self._find(
                    "swept-but-equal", path, astray, f"{source} is varied but did not reach {path}: {seen}",
                    f"do not set {path}; it follows {source}. If it is to rest, name it in design.fixed",
                )  # fmt: skip

    def _astray(self, path: str, source: str, astray: Iterable[str]) -> str:
        having: dict[str, list[str]] = {}
        for label in astray:
            having.setdefault(shown(self._value(label, path)), []).append(label)
        texts = [
            f"{self.names.named(group)}: {source}={naming.values(self._value(x, source) for x in group)}, {path}={value}"
            for value, group in list(having.items())[:FEW]
        ]
        return "; ".join([*texts, *([f"and {len(having) - FEW} more values"] if len(having) > FEW else [])])

    def _check_duplicates(self) -> None:
        groups: dict[Hashable, list[str]] = {}
        for run in self.runs:
            groups.setdefault(run.config_id or self._identity(run.label), []).append(run.label)
        for group in groups.values():
            if len(group) > 1:
                self._find(
                    "duplicate", "config_id", group, f"{self.names.named(group)}: the same science fields, so the same run",
                    "leave one out, or let them differ in seed",
                )  # fmt: skip

    def _identity(self, label: str) -> Hashable:
        science = {p: v for p, v in self.flat[label].items() if _info(p).role is Role.science and not p.startswith("inputs.")}
        return _key(science)


def labels(arms: Sequence[str], flats: Sequence[Mapping[str, Any]], design: DesignConfig, vary: Sequence[str]) -> list[str]:
    """A readable, unique name for each run: its arm, the varied fields that differ, and blocks' fields where needed."""
    parts = [[arm] for arm in arms]

    def add(path: str, only: Iterable[int]) -> None:
        short = path.removesuffix(".name")
        for index in only:
            parts[index].append(f"{short}={shown(flats[index].get(path, ABSENT))}")

    keys = {
        path: [_key(flat.get(path, ABSENT)) for flat in flats] for path in dict.fromkeys(path for flat in flats for path in flat)
    }
    fields = [path for path, column in keys.items() if len(set(column)) > 1]
    own = [f for e in vary if e != "arm" for f in fields if f == e or f == f"{e}.name"]
    others = [f for e in design.blocks for f in fields if f == e or f == f"{e}.name"]
    blocks = _alike(list(zip(*(keys[path] for path in others), strict=True)) or [()] * len(flats))
    for path in own:
        add(path, {i for block in blocks if len({keys[path][i] for i in block}) > 1 for i in block})
    for path in [*others, *(f for f in fields if _info(f).role is Role.science)]:
        for group in _alike([tuple(part) for part in parts]):
            if len({keys[path][i] for i in group}) > 1:
                add(path, group)
    names = [SEPARATOR.join(part) for part in parts]
    times = Counter(names)
    return [name if times[name] == 1 else f"{name}{SEPARATOR}#{index}" for index, name in enumerate(names)]


def _alike(rows: Sequence[Hashable]) -> list[set[int]]:
    """The places of equal rows."""
    places: dict[Hashable, set[int]] = {}
    for index, row in enumerate(rows):
        places.setdefault(row, set()).add(index)
    return list(places.values())
