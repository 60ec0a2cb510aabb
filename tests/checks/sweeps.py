"""Sweeps made by the record writer: plausible numbers, without training anything."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from pth_exp import lifecycle, schema
from pth_exp.lifecycle import State
from pth_exp.records.writer import RunRecorder

CORRECTION = {
    "grpo": "none", "ppo_clip": "ratio", "tis_ppo": "weight", "tis_reinforce": "weight", "san": "behaviour_free",
    "mis_geo": "rejection",
}  # fmt: skip
Mutate = Callable[[str, dict[str, Any]], dict[str, Any] | None]
"""Gets the kind of a row and the row; returns the row to write, or None to leave it out."""


def config(arm: str, **fields: Any) -> dict[str, Any]:
    """A resolved config's plain values; ``fields`` are dotted, with ``__`` for the dots."""
    old_policy = "sampler" if arm == "ppo_clip" else "recomputed"
    values: dict[str, Any] = asdict(
        schema.Config(
            arm=schema.BUILTIN_ARMS[arm](
                name=arm, loss=arm, label=arm.upper(), equation="", old_policy=schema.OldPolicy(old_policy),
                correction=schema.Correction(CORRECTION[arm]),
            ),
            stack=schema.TrainerStack(name="trainer"),
            task=schema.ArithmeticTask(name="arithmetic"),
            model=schema.ModelConfig(name="embedded", path="embedded"),
            validation=schema.ValidationConfig(every=4),
            updates=12,
        )
    )  # fmt: skip
    values["seed"] = fields.pop("seed", 42)
    values["seeds"] = {"data": values["seed"], "sampling": values["seed"], "init": values["seed"], "eval": 0}
    for path, value in fields.items():
        *groups, name = path.split("__")
        node = values
        for group in groups:
            node = node[group]
        assert name in node, path
        node[name] = value
    return json.loads(json.dumps(values))  # type: ignore[no-any-return]


def make(
    root: Path,
    configs: Mapping[str, Mapping[str, Any]],
    design: Mapping[str, Any] | None = None,
    mutate: Mapping[str, Mutate] | None = None,
    updates: Mapping[str, int] | None = None,
) -> Path:
    """Write a sweep; label to config. ``mutate`` changes rows of a run, ``updates`` cuts a run short."""
    arms = {values["arm"]["name"] for values in configs.values()}
    seeds = {values["seed"] for values in configs.values()}
    vary = [name for name, values in (("arm", arms), ("seed", seeds)) if len(values) > 1]
    full_design = asdict(schema.DesignConfig()) | {"vary": vary} | dict(design or {})
    entries = []
    for index, (label, values) in enumerate(configs.items()):
        values = json.loads(json.dumps({**values, "design": full_design}))
        identity = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
        run = root / f"{index:03d}-{identity[:8]}"
        run.mkdir(parents=True)
        frozen = {
            "format": 1,
            "run": {"sweep": root.name, "index": index, "label": label, "overrides": [], "experiment": "test"},
            "config": values,
            "config_id": identity,
            "inputs": {"source": "5" * 64, "data": "d" * 64, "model": "m" * 64, "tokenizer": "t" * 64},
            "environment": {},
        }
        text = yaml.safe_dump(frozen, sort_keys=False)
        (run / "frozen.yaml").write_text(text)
        sha256 = hashlib.sha256(text.encode()).hexdigest()
        (run / "frozen.sha256").write_text(sha256 + "\n")
        entries.append(
            {"index": index, "dir": run.name, "label": label, "config_id": identity, "frozen_sha256": sha256, "overrides": []}
            | {"arm": values["arm"]["name"], "seed": values["seed"]}
        )
        lease = lifecycle.claim(run, 5.0, 60.0, "here", None)
        write_run(run, values, (updates or {}).get(label, values["updates"]), (mutate or {}).get(label, lambda kind, row: row))
        lease.end(State.COMPLETED if label not in (updates or {}) else State.PREEMPTED)
    index_file = {"format": 1, "sweep": root.name, "name": "test", "created": "", "command": [], "design": full_design}
    (root / "index.json").write_text(json.dumps(index_file | {"gate": {"verdict": "pass", "findings": []}, "runs": entries}))
    return root


def prompts(values: Mapping[str, Any], draw: int) -> list[str]:
    size, seed = values["prompts_per_update"], values["seeds"]["data"]
    return [f"train:{(draw * size + i) * 17 % 4001 + 5 * (seed or 0)}:{seed}" for i in range(size)]


def shift(lag: int) -> float:
    """Nats between a learner and itself ``lag`` updates ago."""
    return 2e-3 * lag**1.5 if lag else 2e-6


def write_run(run: Path, values: Mapping[str, Any], updates: int, mutate: Mutate) -> None:
    k, interval, correction = values["replay_age"], values["refresh_interval"], values["arm"]["correction"]
    with RunRecorder(run, 1, lambda: None) as recorder:
        recorder.received({"lr": values["lr"], "seeds.data": values["seeds"]["data"], "objects": {"optimizer": "AdamW"}})
        recorder.first_batches([prompts(values, draw) for draw in range(values["probe"]["first_batches"])])
        write: dict[str, Callable[[Mapping[str, Any]], None]] = {
            "updates": recorder.update, "batches": recorder.batch, "evals": recorder.evaluation,
            "equations": recorder.equation,
        }  # fmt: skip
        if row := mutate("equations", _equation(values)):
            recorder.equation(row)
        if updates and (row := mutate("evals", _evaluation(0, 0))):
            recorder.evaluation(row)
        for u in range(updates):
            generated = max(0, u - k)
            version = generated // interval * interval
            draw = generated if values["queue"] == "warmup" else u
            for kind, row in _rows(values, u, version, draw, correction):
                row = mutate(kind, row) or {}
                if row:
                    write[kind](row)


def _rows(values: Mapping[str, Any], u: int, version: int, draw: int, correction: str) -> Sequence[tuple[str, dict[str, Any]]]:
    lag = shift(u - version)
    clips = values["arm"]["loss"] in ("grpo", "ppo_clip", "tis_ppo")
    against_sampler = correction == "ratio"
    batch_id = hashlib.sha256(f"{draw}:{values['seed']}:{version}".encode()).hexdigest()
    update = {
        "update": u,
        "sampler/version": version,
        "sampler/fingerprint": f"w{version}",
        "learner/fingerprint": f"w{u}",
        "data/age": u - version,
        "data/batch_index": draw,
        "reward/generated": 0.3,
        "actor/pg_clipfrac": (min(0.5, lag) if against_sampler and u > version else 0.0) if clips else None,
        "ratio/clipfrac_by_step": [0.0] if clips else None,
        "ratio/exactly_one_share": (0.0 if against_sampler and u > version else 1.0) if clips else None,
        "ratio/old_sampler_max_abs": 0.0 if values["arm"]["old_policy"] == "sampler" else 3 * lag,
        "ratio/old_policy_max_abs": 3 * lag if values["arm"]["old_policy"] == "sampler" else 0.0,
        "rollout_corr/kl": lag / 2,
        "rollout_corr/mean_abs_shift": lag,
        "coef/max_abs": 1.0,
        "coef/sampler_response": 0.9 * min(lag, 1.0) if correction in ("ratio", "weight", "rejection") and u > version else 0.0,
        "rollout_corr/rollout_rs_masked_fraction": min(0.5, lag) * (u > version) if correction == "rejection" else None,
        **(difference("backward", 2e-7) if u in (0, 1, 2, 4, 8) else {}),
    }
    batch = {
        "update": u,
        "batch_id": batch_id,
        "generation_id": f"{draw}:{version}",
        "draw": draw,
        "prompt_ids": prompts(values, draw),
    }
    rows: list[tuple[str, dict[str, Any]]] = [("batches", batch), ("updates", update)]
    every = values["validation"]["every"]
    if every and ((u + 1) % every == 0 or u + 1 == values["updates"]):
        rows.append(("evals", _evaluation(u + 1, version)))
    return rows


def difference(prefix: str, error: float, cosine: float = 1.0, ratio: Sequence[float] = (1.0, 1.0)) -> dict[str, Any]:
    """Columns of a loss that is off by ``error`` beside its equation."""
    return {
        f"{prefix}/value_error": error,
        f"{prefix}/gradient_error": error,
        f"{prefix}/worst": {"input": "policies apart", "response": 3, "tokens": 5},
        f"{prefix}/cosine": cosine,
        f"{prefix}/norm_ratio": list(ratio),
        f"{prefix}/response_cosine": cosine,
        f"{prefix}/response_norm_ratio": list(ratio),
    }


def _equation(values: Mapping[str, Any]) -> dict[str, Any]:
    equation = values["arm"]["equation"]
    row = {"update": 0, "loss": values["arm"]["loss"], "inputs": 20, "responses": 205}
    digest = None if equation is None else hashlib.sha256(equation.encode()).hexdigest()
    return {**row, "equation/sha256": digest, **difference("float64", 2e-15), **difference("float32", 3e-7)}


def _evaluation(done: int, version: int) -> dict[str, Any]:
    correct = [int((i * 7 + done - 1) % 10 < 4 + (done - 1) // 25) for i in range(64)]
    row = {"update": done, "accuracy": sum(correct) / 64, "correct": correct, "policy_version": done}
    return row | {"sampler/fingerprint_before": f"w{version}", "sampler/fingerprint_after": f"w{version}"}
