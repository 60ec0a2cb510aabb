"""Which interpreter runs a stack: verl pins libraries that the trainer does without, and has an environment of its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pth_exp

VARIABLE, FOLDER, INSTALL = "PTH_VERL_PYTHON", ".venv-verl", "make verl"
STAMP = ".installed"
"""What `make verl` leaves when it is done: an environment without it is half installed."""


class NoInterpreter(FileNotFoundError):
    """The stack's interpreter is not there; the message says where it was looked for, and the remedy."""

    def __str__(self) -> str:
        return str(self.args[0])


def interpreter(stack: str, chosen: str | None) -> Path:
    """The interpreter of a stack. ``chosen`` is ``stack.python``. Raises ``NoInterpreter``."""
    if stack != "verl":
        return Path(sys.executable)
    named = chosen or os.environ.get(VARIABLE)
    places = [Path(named).expanduser()] if named else [folder / FOLDER / "bin" / "python" for folder in _folders()]
    for place in places:
        if place.is_file() and (named or (place.parents[1] / STAMP).is_file()):
            return place.absolute()
    looked = ", ".join(map(str, places))
    raise NoInterpreter(
        f"stack=verl needs verl's environment, looked for at {looked}; install it with `{INSTALL}`, or set {VARIABLE}"
    )


def _folders() -> list[Path]:
    """Where the environment may lie: where the command was given, then the checkout that the package runs from."""
    return list(dict.fromkeys([Path.cwd(), Path(pth_exp.__file__).resolve().parents[1]]))
