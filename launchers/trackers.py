"""Whether the interpreters that will run a sweep have what its trackers need."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pth_exp.interpreters import NoInterpreter, interpreter
from pth_exp.refusal import refuse
from pth_exp.tracking import BACKENDS, requirement, separate

if TYPE_CHECKING:
    from pth_exp.launchers.freezing import Planned

_ASK = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"


def check(runs: Sequence[Planned]) -> None:
    """Raises :class:`Refusal` for a backend whose package the run's own interpreter does not have."""
    asked: dict[tuple[Path, str], None] = {}
    for run in runs:
        stack = run.composed.values["stack"]
        for name in separate(run.composed.values["tracking"]["backends"]):
            try:
                asked[interpreter(stack["name"], stack.get("python")), name] = None
            except NoInterpreter:  # as a dry run may find; a launch refuses it elsewhere
                continue
    for python, name in asked:
        package = BACKENDS[name]
        assert package is not None
        if not _has(python, package):
            here = python == Path(sys.executable)
            remedy = requirement(name) if here else f"{python} -m pip install {package}"
            raise refuse(
                "tracking.backends", name, f"{python} has no package {package}", f"{remedy}, or leave tracking={name} out"
            )


def _has(python: Path, package: str) -> bool:
    if python == Path(sys.executable):
        return importlib.util.find_spec(package) is not None
    return subprocess.run([str(python), "-P", "-c", _ASK, package], capture_output=True, check=False).returncode == 0
