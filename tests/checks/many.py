"""Sweeps of hundreds of runs as `pth diff` and `pth status` see them: what was frozen and what was drawn first, no records."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import sweeps

from pth_exp import schema, sections


def make(root: Path, arms: tuple[str, ...] = ("grpo", "tis_ppo", "san"), seeds: int = 100) -> Path:
    """Runs ``arm·seed=S``, S from 1, of a design that varies the two."""
    configs = {f"{arm}·seed={seed}": sweeps.config(arm, seed=seed) for arm in arms for seed in range(1, seeds + 1)}
    design = asdict(schema.DesignConfig()) | {"vary": ["arm", "seed"]}
    entries = [_run(root, index, label, values) for index, (label, values) in enumerate(configs.items())]
    index = {"format": 1, "sweep": root.name, "id": root.name, "name": "test", "created": "2026-01-01T00:00:00+00:00"}
    index |= {"command": [], "design": design, "gate": {"verdict": "pass", "findings": []}, "runs": entries}
    (root / "index.json").write_text(json.dumps(index))
    return root


def _run(root: Path, index: int, label: str, values: Mapping[str, Any]) -> dict[str, Any]:
    run = root / f"{index:03d}-{hashlib.sha256(label.encode()).hexdigest()[:8]}"
    run.mkdir(parents=True)
    (run / "first_batches.json").write_text(json.dumps([sweeps.prompts(values, draw) for draw in range(2)]))
    entry = {"index": index, "dir": run.name, "label": label, "config_id": label, "overrides": [], "arm": values["arm"]["name"]}
    entry |= {"seed": values["seed"], "updates": values["updates"]}
    return entry | {"frozen_sha256": write(run, label, values, index)}


def write(run: Path, label: str, values: Mapping[str, Any], index: int = 0) -> str:
    """Write a run's frozen file, or write it anew; its hash."""
    inputs = {"source": "5" * 64, "data": "d" * 64, "model": "m" * 64, "tokenizer": "t" * 64}
    frozen = {"format": 1, "run": {"sweep": "s", "index": index, "label": label, "overrides": [], "experiment": "test"}}
    text = sections.dump(frozen | {"config": dict(values), "config_id": label, "inputs": inputs, "environment": {}})
    (run / "frozen.yaml").write_bytes(text)
    return hashlib.sha256(text).hexdigest()


def change(sweep: Path, label: str, **fields: Any) -> Path:
    """Freeze one run with other values; its directory."""
    entry = next(e for e in json.loads((sweep / "index.json").read_text())["runs"] if e["label"] == label)
    arm, _, seed = label.partition("·seed=")
    write(sweep / entry["dir"], label, sweeps.config(arm, seed=int(seed), **fields), entry["index"])
    return sweep / entry["dir"]
