"""The files that are frozen beside a run's config: verl's own config, made by verl's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pth_exp import extensions
from pth_exp.interpreters import NoInterpreter, interpreter
from pth_exp.refusal import Objection, Refusal, refuse

if TYPE_CHECKING:
    from pth_exp.launchers.freezing import Planned

COMMAND = ("-P", "-m", "pth_exp.verl_stack.render")
FILE = "verl.yaml"

_ENVIRONMENT = {"PTH_VERL_CPU": "1", "VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": "1"}
"""A config is checked without a GPU, whatever it is for: verl alone would not start on a machine that has none."""

_TIMEOUT = 600.0
"""Seconds; importing verl from a cold disk takes one minute."""


class NoVerl(Refusal):
    """verl's interpreter is not there."""


def files(runs: Sequence[Planned], models: bool = True) -> list[dict[str, bytes]]:
    """Name to content of each run's files; none for the trainer's. One call of verl's interpreter for all.

    ``models=False`` leaves out what needs a model's files. Raises :class:`NoVerl`, or another :class:`Refusal` when verl refuses
    a run.
    """
    found: list[dict[str, bytes]] = [{} for _ in runs]
    by_interpreter: dict[Path, list[int]] = {}
    for index, run in enumerate(runs):
        stack = run.composed.values["stack"]
        if stack["name"] == "verl":
            by_interpreter.setdefault(_interpreter(stack), []).append(index)
    for python, indices in by_interpreter.items():
        for index, text in zip(indices, _texts(python, [runs[index] for index in indices], models), strict=True):
            found[index] = {FILE: text.encode()}
    return found


def _interpreter(stack: Mapping[str, Any]) -> Path:
    try:
        return interpreter(stack["name"], stack["python"])
    except NoInterpreter as error:
        why, _, remedy = str(error).partition("; ")
        raise NoVerl([Objection("stack", "verl", why, remedy)]) from None


def _texts(python: Path, runs: Sequence[Planned], models: bool) -> list[str]:
    code = extensions.hashes()
    asked = [{"config": run.composed.values, "inputs": run.inputs or code} for run in runs]
    answers = ask(python, {"runs": asked, "models": models})["runs"]
    for run, answer in zip(runs, answers, strict=True):
        if "objections" in answer:
            raise Refusal([Objection(**objection) for objection in answer["objections"]], " ".join(run.composed.overrides))
    return [answer["text"] for answer in answers]


def ask(python: Path, asked: Mapping[str, Any]) -> Any:
    """What `pth_exp.verl_stack.render` answers in verl's environment. Raises :class:`Refusal` when it does not."""
    try:
        done = subprocess.run(
            [str(python), *COMMAND],
            input=json.dumps(asked),
            env={**os.environ, **_ENVIRONMENT},
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise refuse("stack.python", python, f"does not render verl's config: {error}", "see `pth doctor`") from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["without a word"])[-1]
        raise refuse("stack.python", python, f"ended with exit code {done.returncode}: {last}", "see `pth doctor`")
    try:
        return json.loads(done.stdout)
    except ValueError as error:
        raise refuse("stack.python", python, "says nothing that can be read as JSON", "see `pth doctor`") from error
