"""Expands blocks of overrides into the jobs of one batch."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

from pth_exp.refusal import refuse


def expand(
    blocks: Sequence[Any], params: Mapping[str, Any], arguments: Sequence[str], loader: ConfigLoader
) -> tuple[list[list[str]], tuple[str, ...]]:
    """The overrides of each job, block after block, and the keys that are swept: with commas, or by a value in every block.

    ``params`` are sweeps that an experiment sets for every block. The command line's overrides hold for every block, in place of
    one for the same key.
    """
    parser = OverridesParser.create(config_loader=loader)
    common = _by_key(parser, [f"{key}={value}" for key, value in params.items()], "hydra.sweeper.params")
    command_line = _by_key(parser, arguments, "the command line")
    jobs: list[list[str]] = []
    swept: dict[str, None] = {}
    given: dict[str, list[str]] = {}
    for number, block in enumerate(blocks):
        own = _by_key(parser, _overrides(block), f"block {number}")
        merged = {**common, **own, **command_line}
        for override in merged.values():
            given.setdefault(override.key_or_group, []).append(str(override.input_line))
            if override.is_sweep_override():
                swept[override.key_or_group] = None
        jobs += [list(job) for job in itertools.product(*map(_values, merged.values()))]
    swept.update({key: None for key, texts in given.items() if len(texts) == len(blocks) and len(set(texts)) > 1})
    return jobs, tuple(swept)


def _overrides(block: Any) -> list[str]:
    return shlex.split(block) if isinstance(block, str) else [str(override) for override in block]


def _by_key(parser: OverridesParser, overrides: Sequence[str], where: str) -> dict[str, Override]:
    found: dict[str, Override] = {}
    for override in parser.parse_overrides(list(overrides)):
        key = override.key_or_group if override.package is None else f"{override.key_or_group}@{override.package}"
        if key in found:
            raise refuse(key, str(override.input_line).partition("=")[2], f"given twice in {where}", "give it once; commas sweep")
        found[key] = override
    return found


def _values(override: Override) -> list[str]:
    if not override.is_sweep_override():
        return [str(override.input_line)]
    if not override.is_discrete_sweep():
        raise refuse(
            override.key_or_group,
            override.input_line,
            "has no list of values to sweep",
            "write values with commas, or range(...)",
        )
    key = override.get_key_element()
    values = [f"{key}={value}" for value in override.sweep_string_iterator()]
    doubled = {v for v in values if values.count(v) > 1}
    if doubled:
        raise refuse(
            key, str(override.input_line).partition("=")[2], f"sweeps {min(doubled)} twice: the same run", "give each value once"
        )
    return values
