from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from real_data import gsm8k_folder

from pth_exp import schema
from pth_exp.tasks import Split, TaskError, data_fingerprint, gsm8k, load_task

Row = dict[str, str]


def config(path: str | Path | None, prompt: str = "Q: {question}\nA:") -> schema.Gsm8kTask:
    return schema.Gsm8kTask(name="gsm8k", path=None if path is None else str(path), prompt=prompt)


def rows(n: int) -> list[Row]:
    return [{"question": f"How many\u2028is {i}?", "answer": f"It is {i}.\n#### {i:,}"} for i in range(n)]


def write_jsonl(path: Path, content: list[Row]) -> None:
    path.with_suffix(".jsonl").write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in content), encoding="utf-8")


def write_parquet(path: Path, content: list[Row]) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(content), path.with_suffix(".parquet"))


@pytest.fixture
def small_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gsm8k, "COUNTS", {Split.train: 1200, Split.test: 3})


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_a_local_folder_is_read(tmp_path: Path, small_counts: None, write: Callable[[Path, list[Row]], None]) -> None:
    write(tmp_path / "train-00000-of-00001", rows(1200))
    write(tmp_path / "test", rows(3))
    problems = load_task(config(tmp_path)).problems(Split.train)
    assert problems[1100].prompt == "Q: How many\u2028is 1100?\nA:"
    assert problems[1100].gold == 1100
    assert [len(load_task(config(tmp_path)).problems(split)) for split in Split] == [1200, 3]


def test_fingerprint_is_of_the_content_not_of_the_format(tmp_path: Path, small_counts: None) -> None:
    for name, write in (("a", write_jsonl), ("b", write_parquet)):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "train", rows(1200))
        write(tmp_path / name / "test", rows(3))
    before = data_fingerprint(config(tmp_path / "a"))
    assert data_fingerprint(config(tmp_path / "b")) == before
    edited = rows(3)
    edited[2]["answer"] = edited[2]["answer"].replace("It is", "That is")
    write_jsonl(tmp_path / "a" / "test", edited)
    assert data_fingerprint(config(tmp_path / "a")) != before


def test_missing_rows_are_refused(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "test", rows(1318))
    with pytest.raises(TaskError, match=r"task.path: .*test.jsonl has 1,318 problems, but .* 1,319; .*unchanged"):
        load_task(config(tmp_path)).problems(Split.test)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"question": "?", "answer": "no mark 5"}\n', "row 1: the answer does not end with '#### NUMBER'"),
        ('{"question": "?", "answer": "#### five"}\n', "row 1: the answer does not end with '#### NUMBER'"),
        ('{"question": "?", "answer": "#### 5"}\n{"question": "?"}\n', "row 2 has no texts 'question' and 'answer'"),
        ("[]\n", "row 1 has no texts"),
        ("not json\n", "is not lines of JSON"),
    ],
)
def test_broken_rows_are_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "test.jsonl").write_text(content)
    with pytest.raises(TaskError, match=message):
        load_task(config(tmp_path)).problems(Split.test)


def test_a_file_that_is_no_parquet_is_named(tmp_path: Path) -> None:
    (tmp_path / "test.parquet").write_text("no")
    with pytest.raises(TaskError, match=r"task.path: .*test.parquet is not a Parquet file"):
        load_task(config(tmp_path)).problems(Split.test)


def test_missing_and_ambiguous_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"task.path: '.*nowhere' is not a folder"):
        load_task(config(tmp_path / "nowhere")).problems(Split.test)
    with pytest.raises(TaskError, match=r"task.path: .* needs one file test\*.*found none"):
        load_task(config(tmp_path)).problems(Split.test)
    write_jsonl(tmp_path / "test", rows(1))
    write_parquet(tmp_path / "test", rows(1))
    with pytest.raises(TaskError, match=r"found test.jsonl, test.parquet"):
        load_task(config(tmp_path)).problems(Split.test)


def test_prompt_without_a_place_for_the_question_is_refused() -> None:
    with pytest.raises(TaskError, match=r"task.prompt: 'no' does not contain \{question\}"):
        load_task(config(None, prompt="no"))


def test_unreachable_hub_names_the_field_and_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    gsm8k._hub_file.cache_clear()
    with pytest.raises(TaskError, match=r"task.path: null .*openai/gsm8k.* set task.path to a folder"):
        load_task(config(None)).problems(Split.test)


def test_the_real_files_have_the_published_sizes() -> None:
    task = load_task(config(gsm8k_folder()))
    train, test = (task.problems(split) for split in Split)
    assert (len(train), len(test)) == (7473, 1319)
    # Known rows of the published data, and its two negative test answers.
    assert train[0].gold == 72 and "Natalia sold clips" in train[0].prompt
    assert test[0].gold == 18
    assert sorted(p.gold for p in test if p.gold < 0) == [-10, -3]
    assert task.score("He pays 48/2 = $24. So she makes **$18.00** a day.", test[0]) == 1.0
