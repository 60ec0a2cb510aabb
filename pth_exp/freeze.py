"""The frozen config: the only input of a run, with its hash, its identity and the hashes of everything else that a run reads."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pth_exp import schema
from pth_exp.refusal import Refusal, refuse
from pth_exp.sections import Loader, dump

FORMAT = 1
FILE, HASH_FILE = "frozen.yaml", "frozen.sha256"
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
    """

    path: Path
    sha256: str
    run: dict[str, Any]
    config_values: dict[str, Any]
    config_id: str
    inputs: dict[str, Any]
    environment: dict[str, str]
    files: dict[str, str]

    @functools.cached_property
    def config(self) -> schema.Config:
        """The typed config. Loads the study's and the plug-ins' arms and losses, once their files are verified.

        Raises ``FrozenError`` when one of those changed, or when the values do not fit the schema any more.
        """
        from pth_exp import extensions

        try:
            return schema.build(self.config_values, extensions.arms_of(self.inputs))
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
    return _parsed(run_dir / FILE, sha256, content)


def load(path: Path, sha256: str | None = None) -> FrozenRun:
    """Read a frozen file and hold it against ``sha256``, or against the hash beside it.

    Raises ``FrozenError`` naming both hashes when they differ, or saying what is missing.
    """
    try:
        data = path.read_bytes()
        expected = sha256 or (path.parent / HASH_FILE).read_text().strip()
    except OSError as error:
        raise FrozenError(f"{error.filename}: {error.strerror}; a run is frozen by `pth run`") from error
    actual = hashlib.sha256(data).hexdigest()
    if actual != expected:
        raise FrozenError(f"{path}: was frozen with sha256 {expected}, now has {actual}; freeze the run again with `pth run`")
    content = yaml.load(data, Loader)
    if content.get("format") != FORMAT:
        raise FrozenError(f"{path}: format {content.get('format')!r}, this version reads {FORMAT}")
    return _parsed(path, actual, content)


def _parsed(path: Path, sha256: str, content: Mapping[str, Any]) -> FrozenRun:
    keys = ("run", "config", "config_id", "inputs", "environment")
    run, config, identity, inputs, environment = (content[k] for k in keys)
    return FrozenRun(path, sha256, run, config, identity, inputs, environment, content.get("files", {}))


# -------------------------------------------------------------------------------------------------------------- inputs


def source_hash(root: Path = Path(__file__).parent) -> str:
    """Hash of the package's source as a worker executes it; the same for a wheel and an editable install."""
    files = sorted(p.relative_to(root) for p in root.rglob("*.py"))
    digest = hashlib.sha256()
    for file in files:
        if file.parts[0] not in NOT_EXECUTED and "__pycache__" not in file.parts:
            digest.update(f"{file.as_posix()}\0{file_hash(root / file)}\n".encode())
    return digest.hexdigest()


def file_hash(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def input_hashes(config: schema.Config) -> dict[str, Any]:
    """Hashes of everything besides the config that decides a run: source, data, weights, tokenizer, a user's own code."""
    from pth_exp import extensions, models, tasks

    model, tokenizer = models.fingerprint(config.model)
    data = tasks.data_fingerprint(config.task)
    return {"source": source_hash(), "data": data, "model": model, "tokenizer": tokenizer, **extensions.hashes()}


def verify_inputs(frozen: FrozenRun) -> None:
    """Recompute the hashes of the inputs and of the files frozen beside the config.

    Raises ``FrozenError`` naming the input, both hashes and the remedy.
    """
    for name, expected, actual in _inputs(frozen):
        if actual != expected:
            raise FrozenError(
                f"{name} changed after the run was frozen: frozen with sha256 {expected}, now {actual}; "
                f"restore it, or freeze again with `pth run`"
            )


def _inputs(frozen: FrozenRun) -> Iterator[tuple[str, str, str]]:
    from pth_exp import models, tasks

    yield "source", frozen.inputs["source"], source_hash()
    config = frozen.config
    yield "data", frozen.inputs["data"], tasks.data_fingerprint(config.task)
    model, tokenizer = models.fingerprint(config.model)
    yield "model", frozen.inputs["model"], model
    yield "tokenizer", frozen.inputs["tokenizer"], tokenizer
    yield "config_id", frozen.config_id, config_id(config, frozen.inputs)
    for name, expected in frozen.files.items():
        path = frozen.path.parent / name
        yield name, expected, file_hash(path) if path.is_file() else "gone"


# --------------------------------------------------------------------------------------------------------------- files


def write_once(path: Path, data: bytes) -> None:
    """Create a file, readable as the umask says, that never was there before and is never seen half written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(data)
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise refuse(str(path), "", "exists already; two launches share a directory", "let every launch have its own") from None
    finally:
        temporary.unlink()
