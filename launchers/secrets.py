"""Secrets never enter a frozen config."""

from __future__ import annotations

import os
import re

from omegaconf import OmegaConf

from pth_exp.refusal import refuse

_WORDS = {"KEY", "APIKEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL", "CREDENTIALS", "AUTH"}
_UNSET = object()


def looks_secret(name: str) -> bool:
    """Whether an environment variable's name says that it holds a key, a token or a password."""
    words = set(re.split(r"[^A-Z]+", name.upper()))
    return bool(words & _WORDS) or name.upper().endswith(("APIKEY", "PASSWORD"))


def guard_environment() -> None:
    """Make the resolver ``oc.env`` refuse such names."""
    OmegaConf.register_new_resolver("oc.env", _environment, replace=True)


def _environment(name: str, default: object = _UNSET) -> object:
    if looks_secret(name):
        raise refuse(
            f"${{oc.env:{name}}}", "", "would write a secret into the frozen config",
            f"leave {name} in the environment: a worker inherits it",
        )  # fmt: skip
    if name in os.environ:
        return os.environ[name]
    if default is _UNSET:
        raise refuse(f"${{oc.env:{name}}}", "", "the environment has no such variable", f"export {name}, or give a default")
    return None if default is None else str(default)
