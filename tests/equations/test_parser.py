"""What the language lets through, and what each refusal says."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pth_exp import equations
from pth_exp.equations import EquationError, parse


def test_what_an_equation_reads() -> None:
    equation = parse("r = exp(logp - old_logp) * T  # per token\nloss = aggregate(A * min(r, cap), r < 2)")
    assert equation.inputs == {"logp", "old_logp", "advantage", "lengths"}
    assert equation.parameters == {"cap", "aggregation"}
    assert equation.reference is None
    assert [b.name for b in equation.bindings] == ["r", "loss"]
    assert equation.place("old_logp") == "line 1, column 16"
    assert parse('loss = reference("m2po")').reference == "m2po"


def test_the_example_of_the_package_s_documentation() -> None:
    text = "\n".join(line for line in (equations.__doc__ or "").splitlines() if line.startswith("    "))
    equation = parse(textwrap.dedent(text), {"cap"})
    assert equation.inputs == {"logp", "old_logp", "sampler_logp", "advantage", "lengths"}


def test_lines_may_be_broken_within_parentheses() -> None:
    assert parse("loss = mean(\n    mean(logp)  # in nats\n)\n").inputs == {"logp"}


REFUSED = [
    # not lines of the language
    ("", 1, 1, "has no line"),
    ("# nothing\n", 1, 1, "has no line"),
    ("loss = ", 1, 8, "cannot be read"),
    ("loss = mean(mean(logp)) +* 2", 1, 26, "cannot be read"),
    ("loss = sum(mean(logp)\nx = 1", 1, 11, "never closed"),
    ("  loss = 1", 1, 2, "cannot be read"),
    ("loss = 0x", 1, 9, "cannot be read"),
    ("loss = \0", 1, 1, "cannot be read"),
    ("mean(mean(logp))", 1, 1, "is not of the form name = expression"),
    ("a = b = 1\nloss = a", 1, 1, "is not of the form name = expression"),
    ("a: float = 1\nloss = a", 1, 1, "is not of the form name = expression"),
    ("a, b = 1, 2\nloss = a + b", 1, 1, "only a plain name can be bound"),
    ("logp.x = 1\nloss = 1", 1, 1, "only a plain name can be bound"),
    ("a += 1\nloss = a", 1, 1, "a name is bound once"),
    ("for t in logp: pass\nloss = 1", 1, 1, "there are no loops"),
    ("while 1: pass\nloss = 1", 1, 1, "there are no loops"),
    ("def f(): pass\nloss = 1", 1, 1, "functions cannot be defined"),
    ("import os\nloss = 1", 1, 1, "nothing can be imported"),
    ("from os import system\nloss = 1", 1, 1, "nothing can be imported"),
    ("if A > 0: pass\nloss = 1", 1, 1, "there are no statements but"),
    ("del logp\nloss = 1", 1, 1, "is not of the form"),
    # names
    ("x = 1\nx = 2\nloss = x", 2, 1, "x is bound already"),
    ("x = 1\nx = x * 2\nloss = x", 2, 1, "x is bound already"),
    ("logp = 1\nloss = logp", 1, 1, "logp is an input"),
    ("A = 1\nloss = A", 1, 1, "A is an input"),
    ("sum = 1\nloss = sum", 1, 1, "sum is a function"),
    ("cap = 1\nloss = cap", 1, 1, "cap is a parameter of the arm"),
    ("x = x + 1\nloss = x", 1, 5, "x is read before it is bound; give the new value another name"),
    ("y = x\nx = 1\nloss = y + x", 1, 5, "x is read before it is bound; line 2 binds it"),
    ("x = mean(logp)\nloss = 1", 1, 1, "x is used by no later line"),
    ("loss = mean(mean(lopg))", 1, 18, "lopg is not known, did you mean logp?"),
    ("surprisal = -logp\nloss = mean(mean(suprisal))", 2, 18, "did you mean surprisal?"),
    ("loss = cpa", 1, 8, "did you mean cap?; inputs are logp"),
    ("loss = mean * 2", 1, 8, "mean is a function; write mean(...)"),
    ("loss = aggregation", 1, 8, "aggregation is a word"),
    ("__x = 1\nloss = __x", 1, 1, "no name for a value"),
    ("loss = __builtins__", 1, 8, "no name for a value"),
    ("λ = -logp\nloss = mean(mean(λ))", 1, 1, "no name for a value"),
    # calls
    ("loss = mean(mean(expp(logp)))", 1, 18, "expp is no function, did you mean exp?"),
    ("loss = sort(logp)", 1, 8, "sort is no function"),
    ("loss = clip(logp, 1)", 1, 8, "clip takes 3 arguments, not 2"),
    ("loss = aggregate()", 1, 8, "aggregate takes 1 or 2 arguments, not 0"),
    ("loss = max()", 1, 8, "max takes 1 or more arguments, not 0"),
    ("loss = clip(logp, lo=1, hi=2)", 1, 8, "clip takes no keyword arguments"),
    ("loss = mean(*logp)", 1, 13, "arguments cannot be unpacked"),
    ("loss = mean(mean(logp, axis=1))", 1, 13, "mean takes no keyword arguments"),
    # expressions
    ("loss = logp[0]", 1, 8, "there is no indexing"),
    ("loss = [t for t in logp]", 1, 8, "there are no comprehensions"),
    ("loss = sum(t for t in logp)", 1, 11, "there are no comprehensions"),
    ("loss = {t for t in logp}", 1, 8, "there are no comprehensions"),
    ("loss = lambda: 1", 1, 8, "functions cannot be defined"),
    ("loss = 1 if A > 0 else 2", 1, 8, "write where(c, a, b)"),
    ("loss = (x := 1)", 1, 9, "a name is bound on a line of its own"),
    ("loss = 'text'", 1, 8, "there are no strings"),
    ("loss = f'{logp}'", 1, 8, "there are no strings"),
    ("loss = b'text'", 1, 8, "is not a number"),
    ("loss = True", 1, 8, "True is not a number"),
    ("loss = None", 1, 8, "None is not a number"),
    ("loss = ...", 1, 8, "Ellipsis is not a number"),
    ("loss = 2j", 1, 8, "2j is not a number"),
    ("loss = 1e999", 1, 8, "too large"),
    ("loss = 1" + "0" * 400, 1, 8, "too large"),
    ("loss = 5 // 2", 1, 8, "this operator is not of the language"),
    ("loss = 5 % 2", 1, 8, "this operator is not of the language"),
    ("loss = logp @ logp", 1, 8, "this operator is not of the language"),
    ("loss = ~5", 1, 8, "this operator is not of the language"),
    ("loss = where(1 < 2 | 3, 1, 2)", 1, 18, "this operator is not of the language"),
    ("loss = where(1 in 2, 1, 2)", 1, 14, "this comparison is not of the language"),
    ("loss = where(1 is 1, 1, 2)", 1, 14, "this comparison is not of the language"),
    ("loss = (1, 2)", 1, 8, "this is not of the language"),
    ("loss = [1]", 1, 8, "this is not of the language"),
    ("loss = mean(mean(2**logp))", 1, 21, "an exponent must be a number or a parameter"),
    ("x = 2\nloss = 2**x", 2, 11, "an exponent must be a number or a parameter"),
    # numbers and conditions
    ("loss = where(A, 1, 2)", 1, 14, "a number where a condition is needed"),
    ("loss = where(A > 0, A > 0, 2)", 1, 21, "a condition where a number is needed"),
    ("loss = (A > 0) * 2", 1, 9, "a condition where a number is needed; where(condition, 1, 0) makes it one"),
    ("loss = sg(A > 0)", 1, 11, "a condition where a number is needed"),
    ("loss = mean(A > 0)", 1, 13, "a condition where a number is needed"),
    ("keep = A > 0\nloss = mean(keep)", 2, 13, "a condition where a number is needed"),
    ("loss = where(not A, 1, 2)", 1, 18, "a number where a condition is needed"),
    ("loss = where(A > 0 and 1, 1, 2)", 1, 24, "a number where a condition is needed"),
    ("loss = aggregate(logp, logp)", 1, 24, "a number where a condition is needed"),
    ("loss = cap > 1", 1, 1, "loss is a condition, not a number"),
    # rungs
    ("loss = logp", 1, 1, "loss is per token, not a number of the batch; take it up with aggregate(...), mean(...)"),
    ("loss = A * mean(logp)", 1, 1, "loss is per response"),
    ("loss = mean(logp)", 1, 1, "loss is per response"),
    ("loss = mean(mean(mean(logp)))", 1, 8, "mean of one argument goes one rung up, and this is a number of the batch"),
    ("loss = max(3)", 1, 8, "max of one argument goes one rung up"),
    ("loss = sum(cap)", 1, 8, "sum of one argument goes one rung up"),
    ("loss = aggregate(mean(A))", 1, 18, "aggregate takes what is per token"),
    # the loss
    ("x = mean(A)", 1, 1, "the last line binds x, not loss"),
    ("loss = 1\nx = 2", 2, 1, "nothing follows the loss"),
    ("loss = 1\nx = loss", 2, 1, "nothing follows the loss"),
    ("x = 1\nloss = reference('m2po')", 1, 1, "x stands beside a reference"),
    ("x = reference('m2po')\nloss = x", 1, 5, "reference(...) stands for a whole loss"),
    ("loss = reference('m2po') * 2", 1, 8, "reference(...) stands for a whole loss"),
    ("loss = reference(m2po)", 1, 8, "takes the name of a registered function"),
    ("loss = reference('a', 'b')", 1, 8, "takes the name of a registered function"),
    ("loss = reference(name='a')", 1, 8, "takes the name of a registered function"),
]


@pytest.mark.parametrize(("text", "line", "column", "message"), REFUSED)
def test_refusals_name_place_fault_and_remedy(text: str, line: int, column: int, message: str) -> None:
    with pytest.raises(EquationError) as error:
        parse(text, {"cap", "aggregation"})
    assert message in str(error.value)
    assert (error.value.line, error.value.column) == (line, column)
    assert str(error.value).startswith(f"line {line}, column {column}: ")
    assert error.value.remedy


def test_aggregate_needs_the_arm_s_aggregation() -> None:
    with pytest.raises(EquationError, match="aggregation, a parameter that the arm has not"):
        parse("loss = aggregate(logp)", {"cap"})


@pytest.mark.parametrize("text", ["loss = " + "(" * 5000, "loss = " + "-" * 100_000 + "1", "loss = 1" + " + 1" * 5000])
def test_what_is_nested_too_deeply_is_refused(text: str) -> None:
    with pytest.raises(EquationError, match=r"nest|recursion"):
        parse(text)


PYTHON = [
    "loss = __import__('os').system('touch {}')",
    "loss = ().__class__.__bases__[0].__subclasses__()",
    "loss = (lambda: open('{}', 'w'))()",
    "loss = open('{}', 'w')",
    'loss = eval(\'open("{}", "w")\')',
    "loss = exec(reference('x'))",
    "loss = exp.__globals__",
    "loss = (exp)(open('{}', 'w'))",
    "loss = where(open('{}', 'w'), 1, 2)",
    "x = [open('{}', 'w') for _ in (1,)]\nloss = x",
    "@print\ndef f(): pass\nloss = 1",
    "class loss: open('{}', 'w')",
    "with open('{}', 'w') as loss: pass",
    "loss = f\"{{open('{}', 'w')}}\"",
    "assert open('{}', 'w')\nloss = 1",
]


@pytest.mark.parametrize("text", PYTHON)
def test_python_cannot_be_reached(text: str, tmp_path: Path) -> None:
    with pytest.raises(EquationError):
        parse(text.format(tmp_path / "owned"))
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet="logpAT =+-*/()<,.#\n123'\"\\_[]{}:sumexw", max_size=40))
def test_any_text_parses_or_is_refused(text: str) -> None:
    try:
        equation = parse(text)
    except EquationError as error:
        assert str(error)
    else:
        assert equation.bindings[-1].name == "loss"
