"""The frozen config: the only input of a run, with its hash, its identity and the hashes of everything else that a run reads."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from pth_exp import changes, schema
from pth_exp.changes import Change
from pth_exp.refusal import Refusal, refuse
from pth_exp.runfiles import write_json
from pth_exp.sections import Loader, dump

FORMAT = 1
FILE, HASH_FILE = changes.FROZEN, "frozen.sha256"
LISTING = "inputs.json"
"""Beside the runs of a sweep: the hash of each file of each input, so that a change can be told by its file."""
NOT_EXECUTED = ("conf", "launchers")
"""Folders of an installed package that a worker does not read: they end at the frozen file."""


class FrozenError(ValueError):
    """A frozen file, or an input that it names, is not what was frozen. The message names both hashes."""


@dataclass(frozen=True)
class FrozenRun:
    """A frozen run as read back from its file.

    Attributes:
        path: the frozen file.
        sha256: hash of its bytes.
        run: sweep, index, label, overrides and experiment.
        config_values: the resolved config as plain values.
        config_id: the run's identity, a hash over science fields and input contents.
        inputs: hashes of source, data, model, tokenizer, and of a study folder or plug-ins.
        environment: variables that the worker sets before it imports anything heavy.
        files: name of each file that was derived from the config and frozen beside it, to its sha256.
        accepted: hashes of inputs that the run may have instead of the frozen ones, by the input's name.
    """

    path: Path
    sha256: str
    run: dict[str, Any]
    config_values: dict[str, Any]
    config_id: str
    inputs: dict[str, Any]
    environment: dict[str, str]
    files: dict[str, str]
    accepted: Mapping[str, str] = field(default_factory=dict)

    @functools.cached_property
    def config(self) -> schema.Config:
        """The typed config. Loads the study's and the plug-ins' arms and losses, once their files are verified.

        Raises ``FrozenError`` when one of those changed, or when the values do not fit the schema any more.
        """
        from pth_exp import extensions

        try:
            return schema.build(self.config_values, extensions.arms_of(self.inputs, self.accepted))
        except (ValueError, Refusal) as error:
            raise FrozenError(f"{self.path}: {error}") from error


def config_id(config: schema.Config, inputs: Mapping[str, Any]) -> str:
    """Identity of a run: sha256 of the canonical JSON of its science fields and of its inputs' contents.

    Equal on every machine: where data and weights lie does not enter, what they are does.
    """
    fields = {info.path: _value(config, info.path) for info in schema.leaf_fields(config) if info.role is schema.Role.science}
    for location, contents in schema.LOCATIONS.items():
        fields.pop(location, None)
        fields.update({f"inputs.{name}": inputs[name] for name in contents})
    return hashlib.sha256(canonical(fields)).hexdigest()


def canonical(values: Any) -> bytes:
    """Canonical JSON: sorted keys, no spaces, floats in their shortest exact form. Raises ``ValueError`` on NaN or infinity."""
    return json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False).encode()


def _value(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = getattr(config, name)
    return config


def freeze(
    values: Mapping[str, Any],
    run: Mapping[str, Any],
    inputs: Mapping[str, Any],
    environment: Mapping[str, str],
    run_dir: Path,
    files: Mapping[str, bytes] | None = None,
) -> FrozenRun:
    """Write ``frozen.yaml`` and ``frozen.sha256`` into ``run_dir``, which must not hold them yet, and ``files`` beside them.

    ``values`` is the resolved config. ``files`` are derived from it, so their hashes are no part of the identity. Raises
    ``ValueError`` if it does not fit the schema, ``FrozenError`` if the file's text would not read back as exactly the same
    values.
    """
    from pth_exp import extensions

    identity = config_id(schema.build(values, extensions.arms_of(inputs)), inputs)
    content: dict[str, Any] = {
        "format": FORMAT,
        "run": dict(run),
        "config": dict(values),
        "config_id": identity,
        "inputs": dict(inputs),
        "environment": dict(environment),
    }
    if files:
        content["files"] = {name: hashlib.sha256(derived).hexdigest() for name, derived in files.items()}
    data = dump(content)
    if canonical(yaml.load(data, Loader)) != canonical(content):
        raise FrozenError(f"{run_dir / FILE}: the config does not survive being written to YAML")
    sha256 = hashlib.sha256(data).hexdigest()
    for name, derived in (files or {}).items():
        write_once(run_dir / name, derived)
    write_once(run_dir / FILE, data)
    write_once(run_dir / HASH_FILE, f"{sha256}\n".encode())
    return _parsed(run_dir / FILE, sha256, content, {})


def load(path: Path, sha256: str | None = None) -> FrozenRun:
    """Read a frozen file and hold it against ``sha256``, or against the hash beside it, or a change that was accepted.

    Raises ``FrozenError`` naming both hashes when they differ, or saying what is missing.
    """
    try:
        data = path.read_bytes()
        expected = sha256 or (path.parent / HASH_FILE).read_text().strip()
    except OSError as error:
        raise FrozenError(f"{error.filename}: {error.strerror}; a run is frozen by `pth run`") from error
    actual = hashlib.sha256(data).hexdigest()
    accepted = changes.accepted(path.parent)
    if actual not in (expected, accepted.get(FILE)):
        raise FrozenError(f"{path}: was frozen with sha256 {expected}, now has {actual}; freeze the run again with `pth run`")
    content = yaml.load(data, Loader)
    if content.get("format") != FORMAT:
        raise FrozenError(f"{path}: format {content.get('format')!r}, this version reads {FORMAT}")
    return _parsed(path, actual, content, accepted)


def _parsed(path: Path, sha256: str, content: Mapping[str, Any], accepted: Mapping[str, str]) -> FrozenRun:
    keys = ("run", "config", "config_id", "inputs", "environment")
    run, config, identity, inputs, environment = (content[k] for k in keys)
    return FrozenRun(path, sha256, run, config, identity, inputs, environment, content.get("files", {}), accepted)


# -------------------------------------------------------------------------------------------------------------- inputs


@dataclass(frozen=True, slots=True)
class Difference:
    """An input that is not what was frozen.

    Attributes:
        name: of the input: source, data, model, tokenizer, a plug-in, a study's file, config_id, or a file frozen with the run.
        before: hash of the whole of it as frozen.
        after: the same now; "gone" without it.
        changes: its files that differ; empty where the sweep has no list of them.
    """

    name: str
    before: str
    after: str
    changes: tuple[Change, ...] = ()

    def each(self) -> tuple[Change, ...]:
        """Its files that differ, or itself where they are not known."""
        return self.changes or (Change(self.name, "", self.before, self.after),)

    def __str__(self) -> str:
        named = [dataclasses.replace(c, kind="") if c.kind == self.name else c for c in self.changes]
        files = f" ({changes.shown(named)})" if named else ""
        return f"{self.name} changed after the run was frozen: frozen with sha256 {self.before}, now {self.after}{files}"


def source_files(root: Path = Path(__file__).parent) -> dict[str, str]:
    """sha256 of each file of the package's source as a worker executes it; the same for a wheel and an editable install."""
    files = sorted(p.relative_to(root) for p in root.rglob("*.py"))
    executed = [file for file in files if file.parts[0] not in NOT_EXECUTED and "__pycache__" not in file.parts]
    return {file.as_posix(): file_hash(root / file) for file in executed}


def source_hash(root: Path = Path(__file__).parent) -> str:
    """Hash of the package's source as a worker executes it."""
    return _total(source_files(root))


def _total(files: Mapping[str, str]) -> str:
    return hashlib.sha256("".join(f"{name}\0{digest}\n" for name, digest in files.items()).encode()).hexdigest()


def file_hash(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


Listing = dict[str, dict[str, dict[str, str]]]
"""Input to the hash of the whole to its files' hashes. It explains a difference; nothing is decided by it."""


def input_hashes(config: schema.Config) -> tuple[dict[str, Any], Listing]:
    """Hashes of everything besides the config that decides a run: source, data, weights, tokenizer, a user's own code.

    The second is what `write_listing` takes.
    """
    from pth_exp import extensions

    read = _read(config)
    hashes = {name: total for name, (total, _) in read.items()}
    return {**hashes, **extensions.hashes()}, {name: {total: files} for name, (total, files) in read.items()}


def _read(config: schema.Config) -> dict[str, tuple[str, dict[str, str]]]:
    """Of each input that every run has: the hash of the whole, and of each of its files."""
    from pth_exp import models, tasks

    model, tokenizer = models.files(config.model)
    files = {"source": source_files(), "model": model, "tokenizer": tokenizer}
    return {**{name: (_total(listed), listed) for name, listed in files.items()}, "data": tasks.data_digests(config.task)}


def write_listing(sweep: Path, listing: Listing) -> None:
    """Write which files the inputs of a sweep's runs have."""
    write_json(sweep / LISTING, listing)


def _listing(sweep: Path) -> Listing:
    try:
        listing = json.loads((sweep / LISTING).read_bytes())
    except (OSError, ValueError):
        return {}
    return listing if isinstance(listing, dict) else {}


def verify_inputs(frozen: FrozenRun) -> list[Difference]:
    """Recompute the hashes of the inputs and of the files frozen beside the config; what differs and was accepted.

    Raises ``FrozenError`` naming each input that is neither as frozen nor accepted, both hashes, its files and the remedy.
    """
    differing = differences(frozen)
    found = [d for d in differing if frozen.accepted.get(d.name) != d.after]
    if not found:
        return differing
    sweep = frozen.path.parent.parent
    remedy = "restore it, or freeze again with `pth run`"
    if not any(d.name in frozen.files for d in found):
        remedy += f", or go on all the same, on record: pth resume {sweep} --accept-changes 'why'"
    raise FrozenError("; ".join([*map(str, found), remedy]))


def differences(frozen: FrozenRun) -> list[Difference]:
    """Every input that is not as frozen, accepted or not; of the user's own code alone, where that is not accepted.

    Raises ``FrozenError`` when the config does not fit the schema any more.
    """
    from pth_exp import extensions

    found = [Difference(*changed, _own_code(*changed)) for changed in extensions.changed(frozen.inputs)]
    if any(frozen.accepted.get(d.name) != d.after for d in found):
        return found
    config = frozen.config
    listing = _listing(frozen.path.parent.parent)
    for name, (total, files) in _read(config).items():
        if total != frozen.inputs[name]:
            before = listing.get(name, {}).get(frozen.inputs[name])
            found.append(Difference(name, frozen.inputs[name], total, _changed_files(name, before, files)))
    if (identity := config_id(config, frozen.inputs)) != frozen.config_id:
        found.append(Difference("config_id", frozen.config_id, identity))
    for name, expected in frozen.files.items():
        path = frozen.path.parent / name
        if (actual := file_hash(path) if path.is_file() else "gone") != expected:
            found.append(Difference(name, expected, actual))
    return found


def _own_code(name: str, before: str, after: str) -> tuple[Change, ...]:
    kind, _, plug_in = name.partition(" ")
    named = (kind, plug_in) if kind == "plug-in" else ("study", name)
    return (Change(*named, before, after if len(after) == 64 else None),)


def _changed_files(kind: str, before: Mapping[str, str] | None, now: Mapping[str, str]) -> tuple[Change, ...]:
    if before is None:
        return ()
    names = sorted(before.keys() | now.keys())
    return tuple(Change(kind, n, before.get(n), now.get(n)) for n in names if before.get(n) != now.get(n))


# --------------------------------------------------------------------------------------------------------------- files


def write_once(path: Path, data: bytes) -> None:
    """Create a file, readable as the umask says, that never was there before and is never seen half written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(data)
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise refuse(str(path), "", "exists already; two launches share a directory", "let every launch have its own") from None
    except PermissionError:  # what Linux says of a file system without hard links
        why = "cannot be hard-linked into place, which the lease needs too"
        raise refuse(str(path), "", why, "use a directory of another file system") from None
    finally:
        temporary.unlink()
