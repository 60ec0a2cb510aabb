"""Where a run's numbers come from, besides its frozen inputs: commit, versions, machine."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pth_exp
from pth_exp import machine
from pth_exp.changes import Change

PACKAGES = (
    *("torch", "transformers", "tokenizers", "torchdata", "numpy", "safetensors", "hydra-core", "omegaconf"),
    *("verl", "vllm", "ray", "bitsandbytes"),
)
"""Installed distributions whose versions are recorded."""


def provenance() -> dict[str, Any]:
    """Facts for ``manifest.json``: git commit and diff hash, versions, Python, platform and machine."""
    gpus, visible = machine.gpu_names(), machine.visible_gpus()
    return {
        "git": git_state(Path(pth_exp.__file__).parent),
        "versions": {"pth-exp": pth_exp.__version__} | {name: version for name in PACKAGES if (version := _version(name))},
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "device": {"cpu": machine.cpu_name(), "cores": machine.cores(), "gpus": gpus, "visible_gpus": visible},
    }


def moved(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Libraries and processors that are not those of an earlier attempt, by what `provenance` said of both.

    They are no frozen inputs: a cluster's change under a run, often for good. Rounding may follow them.
    """
    found = []
    for name in sorted({*before.get("versions", {}), *now["versions"]}):
        pair = before.get("versions", {}).get(name), now["versions"].get(name)
        found += [Change("version", name, *pair)] if pair[0] != pair[1] else []
    pairs = {"python": ("version", before.get("python"), now["python"])}
    pairs |= {name: ("device", before.get("device", {}).get(name), now["device"][name]) for name in ("cpu", "gpus")}
    return found + [Change(kind, name, was, there) for name, (kind, was, there) in pairs.items() if was != there]


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit of the checkout that tracks ``folder``, and the sha256 of its uncommitted changes (``None``: no changes).

    ``None`` when no checkout tracks the folder: a package installed somewhere inside a repository is not part of it.
    """
    if not _git(folder, "ls-files", "--", "."):
        return None
    commit, diff = _git(folder, "rev-parse", "HEAD"), _git(folder, "diff", "HEAD", "--binary")
    if commit is None or diff is None:
        return None
    return {"commit": commit.decode().strip(), "diff_sha256": hashlib.sha256(diff).hexdigest() if diff else None}


def _git(folder: Path, *command: str) -> bytes | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *command], capture_output=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
