"""What a task is: problems in splits, and a score for a response."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from pathlib import Path
from typing import Protocol

from pth_exp import schema


class TaskError(ValueError):
    """A task that cannot be had as configured; the message names the field, its value and the remedy."""


class Split(StrEnum):
    train = "train"
    test = "test"


@dataclass(frozen=True, slots=True)
class Problem:
    """One prompt and its answer.

    Attributes:
        split: the split that the problem belongs to.
        index: its place in the split, from 0.
        prompt: the text of the prompt, before any chat template.
        gold: the exact answer.
        source: the row that the problem was made from; goes into the data's fingerprint.
    """

    split: Split
    index: int
    prompt: str
    gold: Fraction
    source: str


class Task(Protocol):
    def problems(self, split: Split) -> Sequence[Problem]:
        """The split's problems in file order. Raises ``TaskError`` if they cannot be had."""
        ...

    def score(self, response: str, problem: Problem) -> float:
        """The reward of a response, already cut; 0 or 1."""
        ...


def load_task(config: schema.TaskConfig) -> Task:
    """The task that ``config.task`` describes. Problems are read when first asked for."""
    from pth_exp.tasks.arithmetic import Arithmetic
    from pth_exp.tasks.gsm8k import Gsm8k

    if isinstance(config, schema.ArithmeticTask):
        return Arithmetic(config)
    if isinstance(config, schema.Gsm8kTask):
        return Gsm8k(config)
    raise TaskError(f"task.name: {config.name!r} has no implementation; known are arithmetic, gsm8k")


def data_fingerprint(config: schema.TaskConfig) -> str:
    """sha256 over every row of both splits in order, whatever file format they came in. Needs no torch."""
    return data_digests(config)[0]


def data_digests(config: schema.TaskConfig) -> tuple[str, dict[str, str]]:
    """The same, and sha256 of each split by its name and size."""
    task, whole, splits = load_task(config), hashlib.sha256(), dict[str, str]()
    for split in Split:
        digest = hashlib.sha256()
        problems = task.problems(split)
        for problem in problems:
            row = f"{split}\0{problem.index}\0{problem.source}\0{problem.gold}\n".encode()
            digest.update(row)
            whole.update(row)
        splits[f"{split} ({len(problems)} problems)"] = digest.hexdigest()
    return whole.hexdigest(), splits


def split_file(folder: Path, split: Split, suffixes: Sequence[str]) -> Path:
    """The split's one file in ``folder``: ``train.jsonl``, ``train-00000-of-00001.parquet`` and the like.

    Raises ``TaskError`` if there is none, or more than one.
    """
    found = sorted(p for p in folder.iterdir() if p.suffix in suffixes and p.name.startswith(split.value) and p.is_file())
    if len(found) == 1:
        return found[0]
    listing = "none" if not found else ", ".join(p.name for p in found)
    raise TaskError(f"task.path: {folder} needs one file {split}*{{{','.join(suffixes)}}}, found {listing}")
