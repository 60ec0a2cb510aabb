from __future__ import annotations

import ast
import re

import pytest

from pth_exp import schema
from pth_exp.tasks import Split, TaskError, data_fingerprint, load_task


def task(**changes: int) -> schema.ArithmeticTask:
    return schema.ArithmeticTask("arithmetic", **changes)  # type: ignore[arg-type]


def solve(prompt: str) -> int:
    """The answer by rewriting the words as an expression for Python's own parser."""
    numbers = re.sub(r"^\w+ has (\d+) \w+", r"\1", prompt.rstrip("?"))
    numbers = re.sub(r", (?:buys|finds) (\d+)", r"+\1", numbers)
    numbers = re.sub(r", (?:loses|sells) (\d+)", r"-\1", numbers)
    assert re.fullmatch(r"\d+([+-]\d+)+", numbers), prompt
    total, node = 0, ast.parse(numbers, mode="eval").body
    while isinstance(node, ast.BinOp):
        assert isinstance(node.right, ast.Constant)
        total += node.right.value if isinstance(node.op, ast.Add) else -node.right.value
        node = node.left
    assert isinstance(node, ast.Constant)
    return int(total + node.value)


def test_gold_is_the_answer_to_the_words() -> None:
    config = task(train_problems=600, test_problems=200)
    for split in Split:
        for problem in load_task(config).problems(split):
            assert problem.gold == solve(problem.prompt)


def test_sizes_steps_and_operands_are_the_configured_ones() -> None:
    config = task(train_problems=300, test_problems=40, min_steps=2, max_steps=3, max_operand=6)
    problems = [p for split in Split for p in load_task(config).problems(split)]
    assert [len(load_task(config).problems(split)) for split in Split] == [300, 40]
    assert [p.index for p in load_task(config).problems(Split.test)] == list(range(40))
    assert {p.prompt.count(",") for p in problems} == {2, 3}
    assert {int(n) for p in problems for n in re.findall(r"(?:buys|finds|loses|sells) (\d+)", p.prompt)} == set(range(1, 7))


def test_no_prompt_occurs_twice() -> None:
    everything = [p.prompt for split in Split for p in load_task(task()).problems(split)]
    assert len(everything) == len(set(everything)) == 4096 + 512


def test_test_split_does_not_depend_on_the_training_split() -> None:
    small, large = (load_task(task(train_problems=n)).problems(Split.test) for n in (10, 1000))
    assert list(small) == list(large)


def test_seed_decides_the_problems_and_the_fingerprint() -> None:
    assert data_fingerprint(task()) == data_fingerprint(task())
    others = [task(problem_seed=1), task(train_problems=4095), task(test_problems=511), task(max_operand=4)]
    assert len({data_fingerprint(c) for c in [task(), *others]}) == 5


def test_score_is_one_for_the_right_last_number_only() -> None:
    t = load_task(task())
    problem = t.problems(Split.test)[0]
    assert t.score(f" so 1 + 1 = 2, total {problem.gold}.", problem) == 1.0
    assert t.score(f" total {problem.gold}, total {problem.gold + 1}.", problem) == 0.0
    assert t.score("", problem) == 0.0


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"train_problems": 0}, "task.train_problems: 0"),
        ({"test_problems": -1}, "task.test_problems: -1"),
        ({"max_steps": 3}, "task.max_steps: 3 is less than task.min_steps=4"),
        ({"max_operand": 0}, "task.max_operand: 0"),
        ({"min_steps": 1, "max_steps": 1, "max_operand": 1, "train_problems": 10**5}, "distinct problems are wanted"),
    ],
)
def test_impossible_sizes_are_refused(changes: dict[str, int], field: str) -> None:
    with pytest.raises(TaskError, match=re.escape(field)):
        load_task(task(**changes)).problems(Split.train)
