"""GSM8K (Cobbe et al., 2021, arXiv:2110.14168) from the hub or from a local folder."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path

from pth_exp import schema
from pth_exp.tasks.base import Problem, Split, TaskError, split_file
from pth_exp.tasks.reward import exact_number, last_number

HUB_NAME = "openai/gsm8k"
HUB_FILE = "main/{split}-00000-of-00001.parquet"
COUNTS = {Split.train: 7473, Split.test: 1319}
GOLD_MARK = "####"


class Gsm8k:
    """The task. A worked answer ends with ``#### GOLD``; a response scores 1 if its last number equals GOLD."""

    def __init__(self, config: schema.Gsm8kTask) -> None:
        if "{question}" not in config.prompt:
            raise TaskError(f"task.prompt: {config.prompt!r} does not contain {{question}}; put it where the question belongs")
        self._config = config
        self._splits: dict[Split, list[Problem]] = {}

    def problems(self, split: Split) -> Sequence[Problem]:
        if split not in self._splits:
            self._splits[split] = self._read(split)
        return self._splits[split]

    def score(self, response: str, problem: Problem) -> float:
        return float(last_number(response) == problem.gold)

    def _read(self, split: Split) -> list[Problem]:
        path = self._file(split)
        problems = []
        for index, (question, answer) in enumerate(_rows(path)):
            prompt = self._config.prompt.replace("{question}", question)
            source = json.dumps([question, answer])
            problems.append(Problem(split, index, prompt, gold_answer(answer, f"{path} row {index + 1}"), source))
        if len(problems) != COUNTS[split]:
            raise TaskError(
                f"task.path: {path} has {len(problems):,} problems, but GSM8K's {split} split has {COUNTS[split]:,}; "
                "point task.path at the complete, unchanged files"
            )
        return problems

    def _file(self, split: Split) -> Path:
        if self._config.path is None:
            return _hub_file(split)
        folder = Path(self._config.path).expanduser()
        if not folder.is_dir():
            raise TaskError(
                f"task.path: {self._config.path!r} is not a folder (looked at {folder.absolute()}); give the folder that holds "
                "train and test as .jsonl or .parquet, or task.path=null for the hub"
            )
        return split_file(folder, split, (".jsonl", ".parquet"))


def gold_answer(answer: str, where: str) -> Fraction:
    """The number behind the last ``####``. Raises ``TaskError`` naming ``where`` if there is none."""
    _, mark, text = answer.rpartition(GOLD_MARK)
    gold = exact_number(text.strip()) if mark else None
    if gold is None:
        raise TaskError(f"task.path: {where}: the answer does not end with '{GOLD_MARK} NUMBER': {answer[-60:]!r}")
    return gold


def _rows(path: Path) -> Iterator[tuple[str, str]]:
    """Question and answer of each row. Raises ``TaskError`` naming file and row for anything else."""
    rows = _parquet_rows(path) if path.suffix == ".parquet" else _jsonl_rows(path)
    for number, row in enumerate(rows, 1):
        if not (isinstance(row, dict) and isinstance(row.get("question"), str) and isinstance(row.get("answer"), str)):
            raise TaskError(f"task.path: {path} row {number} has no texts 'question' and 'answer'")
        yield row["question"], row["answer"]


def _jsonl_rows(path: Path) -> Iterator[object]:
    try:
        # Not str.splitlines: a question may hold a unicode line separator.
        for line in path.read_text(encoding="utf-8").split("\n"):
            if line.strip():
                yield json.loads(line)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise TaskError(f"task.path: {path} is not lines of JSON in UTF-8: {error}") from error


def _parquet_rows(path: Path) -> Iterator[object]:
    import pyarrow
    import pyarrow.parquet

    try:
        yield from pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowException as error:
        raise TaskError(f"task.path: {path} is not a Parquet file: {error}") from error


@functools.lru_cache
def _hub_file(split: Split) -> Path:
    """The split's file in the hub's cache, fetched if it is not there. Raises ``TaskError`` if the hub cannot be reached."""
    import huggingface_hub

    try:
        return Path(huggingface_hub.hf_hub_download(HUB_NAME, HUB_FILE.format(split=split), repo_type="dataset"))
    except (OSError, ValueError) as error:
        raise TaskError(
            f"task.path: null means the hub's {HUB_NAME}, which cannot be had ({type(error).__name__}); "
            "set task.path to a folder that holds train and test as .jsonl or .parquet"
        ) from error
