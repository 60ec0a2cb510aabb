"""``python -P -m pth_exp.verl_stack.render``: each run's ``verl.yaml``, made in verl's own environment before any run starts.

Reads from stdin ``{"runs": [{"config": ..., "inputs": ...}, ...]}``, a frozen config's values and the inputs that name a study's
or a plug-in's code. Writes to stdout ``{"runs": [...]}``: for each either its ``text``, or its ``objections``. One call serves a
sweep: importing verl takes longer than all the rest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import transformers
import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pth_exp import extensions, schema, sections
from pth_exp.models.resolve import resolve
from pth_exp.refusal import Objection
from pth_exp.schema import Config
from pth_exp.verl_stack import known
from pth_exp.verl_stack.frozen import verl_stack
from pth_exp.verl_stack.mapping import settings, verl_config
from pth_exp.verl_stack.overrides import FIELD
from pth_exp.verl_stack.places import places, put

Answer = dict[str, Any]

BUILT = tuple(f"actor_rollout_ref.{branch}" for branch in ("actor", "ref.fsdp_config", "rollout", "rollout.checkpoint_engine"))
MODEL = "actor_rollout_ref.model"
"""Branches of which the job builds verl's dataclasses; that of the model reads its files."""


def render(config: Config, models: bool = True) -> Answer:
    """``{"text": ...}``, or ``{"objections": [...]}``. ``models=False`` asks nothing of a model, which may not be here."""
    found = list(_objections(config, models))
    if found:
        return {"objections": [dataclasses.asdict(objection) for objection in found]}
    values = OmegaConf.to_container(verl_config(config))
    text = sections.dump(values).decode()
    if repr(yaml.load(text, sections.Loader)) != repr(values):  # repr, since infinity and NaN are values too
        raise AssertionError("verl's config does not survive being written to YAML")
    return {"text": text}


def _objections(config: Config, models: bool) -> Iterator[Objection]:
    """Setting by setting, then what verl makes of all of them together."""
    overrides = verl_stack(config).overrides
    wrong = [objection for text in overrides for objection in _of_one(text, config, models)]
    yield from wrong
    if not wrong:
        yield from _of_all(config, overrides, models)


def _of_one(text: str, config: Config, models: bool) -> Iterator[Objection]:
    name = text.partition("=")[0]
    if not models and name.startswith(known.HF_CONFIG):
        return
    try:
        value = OmegaConf.select(OmegaConf.from_dotlist([text]), name)
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        yield Objection(FIELD, text, f"cannot be read: {' '.join(str(error).split())}", "write the value as in YAML")
        return
    plain = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    yield from known.objections(name, plain, text, lambda: _model(str(resolve(config.model))))


@cache
def _model(folder: str) -> Any:
    return transformers.AutoConfig.from_pretrained(folder, local_files_only=True)


def _of_all(config: Config, overrides: Sequence[str], models: bool) -> Iterator[Objection]:
    verl = verl_config(config)
    if models:
        put(verl, places(config, Path("checkpoint"), (1, verl.trainer.n_gpus_per_node)))
    try:
        _check(verl, models)
    except Exception as error:  # verl raises whatever it likes
        field, given = (FIELD, " ".join(overrides)) if overrides else ("stack", "verl")
        why = f"verl refuses the config: {type(error).__name__}: {str(error).strip() or 'without a word'}"
        yield Objection(field, given, why, "change the settings that it names")


def _check(verl: DictConfig, models: bool) -> None:
    from verl.trainer.ppo.utils import need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    validate_config(verl, use_reference_policy=need_reference_policy(verl), use_critic=False)
    for branch in (*BUILT, MODEL) if models else BUILT:
        omega_conf_to_dataclass(OmegaConf.select(verl, branch))
    ranks, parts = verl.trainer.n_gpus_per_node, verl.actor_rollout_ref.rollout.tensor_model_parallel_size
    if ranks % parts:  # verl finds out when vLLM starts
        raise ValueError(
            f"{ranks} GPUs (stack.ranks) cannot be divided among vLLM servers of {parts} (tensor_model_parallel_size)"
        )


def answers(runs: Sequence[Mapping[str, Any]], models: bool = True) -> list[Answer]:
    """Of each run; runs that verl cannot tell apart are checked once."""
    known_answers: dict[str, Answer] = {}
    found = []
    for run in runs:
        config = schema.build(run["config"], extensions.arms_of(run["inputs"]))
        key = json.dumps([settings(config), verl_stack(config).overrides, dataclasses.asdict(config.model)], default=str)
        if key not in known_answers:
            known_answers[key] = render(config, models)
        found.append(known_answers[key])
    return found


def main() -> None:
    asked = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):  # verl prints
        found = answers(asked["runs"], asked.get("models", True))
    json.dump({"runs": found}, sys.stdout)


if __name__ == "__main__":
    main()
