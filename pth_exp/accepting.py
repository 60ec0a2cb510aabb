"""``pth resume --accept-changes``: what differs from what was frozen, and whether a run can honestly go on over it.

Code, data, weights and the user's own code can: the run's records then say from which update on it had which. An edited frozen
file can only where it is known what it was, and the edit decides no number: everything else in it is what the run *is*.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from pth_exp import changes, freeze, lifecycle, schema
from pth_exp.changes import Change
from pth_exp.design import ABSENT, flatten, role
from pth_exp.freeze import FrozenError, FrozenRun
from pth_exp.records.reader import NothingToRead, read_yaml
from pth_exp.sections import dump

COMPOSED = Path(".hydra") / "config.yaml"
"""What Hydra composed, which a frozen file was made from."""

_SETTLED = ("config.stack.device", "config.task.path", "config.model.path", "config.probe.shadows")
"""Fields whose value is decided when a run is frozen, and that Hydra's file need not hold."""


def load(run_dir: Path, index: Mapping[str, Any], entry: Mapping[str, Any]) -> FrozenRun:
    """A run's frozen file, held against the sweep's index. Raises ``FrozenError`` with the fields that were edited."""
    try:
        return freeze.load(run_dir / freeze.FILE, entry["frozen_sha256"])
    except FrozenError as error:
        raise FrozenError(f"{error}{_edits_in_words(run_dir, index, entry)}") from None


def accept(run_dir: Path, index: Mapping[str, Any], entry: Mapping[str, Any], reason: str) -> tuple[FrozenRun, str | None]:
    """Let a run go on over what has changed since it was frozen, on record.

    Returns the frozen run and what was accepted, in words; None when nothing differs from what was frozen or accepted before.
    Raises ``FrozenError`` for a change that makes it another run, naming what differs.
    """
    hashes: dict[str, str] = {}
    found: list[Change] = []
    try:
        frozen = freeze.load(run_dir / freeze.FILE, entry["frozen_sha256"])
    except FrozenError as error:
        found, hashes[freeze.FILE] = _accepted_edits(run_dir, index, entry, error)
        frozen = freeze.load(run_dir / freeze.FILE, hashes[freeze.FILE])
    if frozen.sha256 != entry["frozen_sha256"] and not hashes:  # accepted before, and to be named again beside what is new
        found, hashes[freeze.FILE] = _accepted_edits(run_dir, index, entry, FrozenError(str(frozen.path)))
    for _ in range(2):  # what a user's own code decides can only be looked at once that code is accepted
        differences = freeze.differences(dataclasses.replace(frozen, accepted={**frozen.accepted, **hashes}))
        hashes |= {difference.name: difference.after for difference in differences}
    for difference in differences:
        if difference.name in frozen.files:
            raise FrozenError(
                f"{difference}; it was made from the frozen config, so restore it, or freeze a new run with `pth run`"
            )
        if difference.after in ("gone", "not installed"):
            raise FrozenError(f"{difference}; without it the run cannot go on")
        found += difference.each()
    if hashes == frozen.accepted or not hashes:
        return frozen, None
    changes.accept(run_dir, reason, hashes, found, lifecycle.newest_attempt(run_dir))
    return dataclasses.replace(frozen, accepted=hashes), changes.shown(found)


def _accepted_edits(
    run_dir: Path, index: Mapping[str, Any], entry: Mapping[str, Any], error: FrozenError
) -> tuple[list[Change], str]:
    """The edits of a frozen file that decide no number, and its hash now; raises ``FrozenError`` for any other."""
    path = run_dir / freeze.FILE
    edited = _content(path)
    if edited is None:
        raise error
    original = _original(run_dir, index, entry, edited)
    told = f"{error}{_edits_in_words(run_dir, index, entry)}"
    if original is None:
        raise FrozenError(f"{told}; what it was cannot be told for certain, so it cannot be accepted")
    if edited.get("files"):
        raise FrozenError(f"{told}; other files were made from it, so it cannot be accepted")
    edits = [*_edits(original, edited)]
    science = [edit for edit in edits if not _decides_no_number(edit.name)]
    if science:
        raise FrozenError(f"{error}; with {changes.shown(science)} it is another run, which cannot be accepted")
    sha256 = freeze.file_hash(path)
    return edits or [Change(freeze.FILE, "text", entry["frozen_sha256"], sha256)], sha256


def _decides_no_number(path: str) -> bool:
    section, _, field = path.partition(".")
    return section == "config" and role(field) in (schema.Role.execution, schema.Role.output)


def _edits_in_words(run_dir: Path, index: Mapping[str, Any], entry: Mapping[str, Any]) -> str:
    edited = _content(run_dir / freeze.FILE)
    if edited is None:
        return ""
    original = _original(run_dir, index, entry, edited)
    if original is not None:
        edits = [*_edits(original, edited)]
        told = f"; edited: {changes.shown(edits)}" if edits else "; edited: its text, no value"
        if edited.get("files") or not all(_decides_no_number(edit.name) for edit in edits):
            return told
        return f"{told}, which decides no number: `pth resume --accept-changes 'why'` goes on with it, on record"
    composed = _composed(run_dir)
    if composed is None:
        return ""
    edits = [edit for edit in _edits({"config": composed}, {"config": edited.get("config", {})}) if edit.name not in _SETTLED]
    return f"; beside {COMPOSED} it differs in {changes.shown(edits)}" if edits else ""


def _edits(original: Mapping[str, Any], edited: Mapping[str, Any]) -> Iterator[Change]:
    before, after = flatten(original), flatten(edited)
    for path in dict.fromkeys([*before, *after]):
        was, now = before.get(path, ABSENT), after.get(path, ABSENT)
        if was != now or type(was) is not type(now):
            yield Change(freeze.FILE, path, was, now)


def _original(
    run_dir: Path, index: Mapping[str, Any], entry: Mapping[str, Any], edited: Mapping[str, Any]
) -> dict[str, Any] | None:
    """What the frozen file held before it was edited: made again from the index and Hydra's file, and proved by its hash."""
    composed = _composed(run_dir)
    if composed is None or not isinstance(edited.get("config"), dict):
        return None
    run = {"sweep": index["sweep"], **{key: entry[key] for key in ("index", "label", "overrides")}, "experiment": index["name"]}
    for settled in (True, False):
        content = copy.deepcopy(dict(edited)) | {"format": freeze.FORMAT, "run": run, "config_id": entry["config_id"]}
        for path, value in flatten({"config": composed}).items():
            if not (settled and path.startswith(_SETTLED)):
                _put(content, path, value)
        if hashlib.sha256(dump(content)).hexdigest() == entry["frozen_sha256"]:
            return content
    return None


def _put(content: dict[str, Any], path: str, value: Any) -> None:
    *parents, name = path.split(".")
    node: Any = content
    for key in parents:
        node = node.get(key) if isinstance(node, dict) else None
    if isinstance(node, dict):
        node[name] = float(value) if isinstance(node.get(name), float) and type(value) is int else value


def _composed(run_dir: Path) -> dict[str, Any] | None:
    """What Hydra composed for a run, resolved as far as that can be done once more."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from pth_exp import store

    store.register(schema.BUILTIN_ARMS)  # with the schema come the resolvers
    composed = _content(run_dir / COMPOSED)
    if composed is None:
        return None
    config = OmegaConf.create(composed)
    for path, value in flatten(composed).items():
        if isinstance(value, str) and "${" in value:
            try:
                resolved = OmegaConf.select(config, path)
            except OmegaConfBaseException:
                continue
            _put(composed, path, resolved)
    return composed


def _content(path: Path) -> dict[str, Any] | None:
    try:
        content = read_yaml(path)
    except (NothingToRead, OSError, yaml.YAMLError):
        return None
    return copy.deepcopy(content) if isinstance(content, dict) else None
