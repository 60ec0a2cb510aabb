"""The reward against a table labelled by hand, and against every answer of the real GSM8K."""

from __future__ import annotations

import json
import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from real_data import gsm8k_folder

from pth_exp.tasks.reward import exact_number, last_number

LABELLED: list[tuple[str, str | None]] = [
    # plain, and with what stands around a number in prose
    ("42", "42"),
    ("42.", "42"),
    ("42,", "42"),
    ("72 clips, altogether.", "72"),
    ("The answer is 18!", "18"),
    ("(18)", "18"),
    ("18?", "18"),
    ("18kg", "18"),
    ("5th", "5"),
    ("18\n", "18"),
    ("**18**", "18"),
    ("__18__", "18"),
    ("`18`", "18"),
    ("#### 42", "42"),
    ("#### 42.", "42"),
    (r"\boxed{18}", "18"),
    (r"$\boxed{18}$.", "18"),
    (r"\(18\)", "18"),
    ("18%", "18"),
    (r"18\%", "18"),
    ("018", "18"),
    # currency and thousands
    ("$1,000", "1000"),
    ("$1,000.", "1000"),
    ("$ 18", "18"),
    (r"\$18", "18"),
    ("£3.50 each", "7/2"),
    ("1,234.50", "2469/2"),
    ("1,234,567", "1234567"),
    (r"1{,}000", "1000"),
    (r"\boxed{1,\!000}", "1000"),
    (r"10\,000", "10000"),
    ("1,2,3", "3"),
    ("2, 3", "3"),
    ("1,23", "23"),
    ("1,2345", "2345"),
    ("1,000,00", "0"),
    # decimals and exponents
    ("5.0", "5"),
    (".5", "1/2"),
    ("0.50", "1/2"),
    ("5.", "5"),
    ("1.2.3", "3"),
    ("1e3", "1000"),
    ("1.5e-3", "3/2000"),
    ("2e", "2"),
    ("1e400", "400"),
    # signs
    ("-5", "-5"),
    ("\u22125", "-5"),
    ("\u22121,234.5", "-2469/2"),
    ("= -5", "-5"),
    ("=-5", "-5"),
    ("(-5)", "-5"),
    (r"\boxed{-5}", "-5"),
    ("**-5**", "-5"),
    ("-$5", "-5"),
    ("$-5", "-5"),
    ("\u2212$5", "-5"),
    ("10-5", "5"),
    ("10 - 5", "5"),
    ("10 -5", "-5"),
    ("$20-$5", "5"),
    ("(2+3)-5", "5"),
    ("pages 3\u20135", "5"),
    ("A-5", "5"),
    ("--5", "5"),
    ("+5", "5"),
    ("5-", "5"),
    # fractions
    ("3/4", "3/4"),
    ("3/4.", "3/4"),
    ("-3/4", "-3/4"),
    (r"\frac{3}{4}", "3/4"),
    (r"-\dfrac{3}{4}", "-3/4"),
    (r"\frac{-3}{4}", "-3/4"),
    ("24/2", "12"),
    ("48/2=24", "24"),
    ("48 / 2", "2"),
    ("2 1/2", "5/2"),
    ("2\u00bd", "5/2"),
    ("\u00bd", "1/2"),
    ("2 10/4", "5/2"),
    ("3/0", "0"),
    ("5/12/2024", "2024"),
    ("18 km/h", "18"),
    # the last one counts, and operands stay apart
    ("so 9 + 7 = 16", "16"),
    ("so 9 + 7 = 1 6", "6"),
    ("16 - 3 = 13, total 13.", "13"),
    ("3 of 4", "4"),
    ("10:30", "30"),
    ("5 m\u00b2", "5"),
    ("\uff11\uff18", "18"),
    # no number
    ("", None),
    ("five", None),
    ("-", None),
    ("$", None),
    ("\u00b2", None),
]


@pytest.mark.parametrize(("text", "label"), LABELLED)
def test_last_number_of_labelled_text(text: str, label: str | None) -> None:
    assert last_number(text) == (None if label is None else Fraction(label))


FORMS = ["{}", "{:,}", "The total is {:,}.", r"\boxed{{{}}}", "{}.00", "1 + 1 = {}"]


@given(st.integers(-(10**12), 10**12), st.sampled_from(FORMS))
def test_any_integer_is_read_back(value: int, form: str) -> None:
    assert last_number(form.format(value)) == value


@given(st.text(), st.integers(0, 10**6))
def test_text_before_a_separate_number_changes_nothing(before: str, value: int) -> None:
    assert last_number(f"{before}\nx = {value}") == value


@given(st.text(alphabet="0123456789,./-+eE $\u2212{}\\%\u00bd", max_size=60))
def test_nothing_raises(text: str) -> None:
    number = last_number(text)
    assert (number is None) == (not any(c.isdecimal() or c == "\u00bd" for c in text))


@pytest.mark.parametrize("piece", ["1,", "1,234,", "1/", "-", "1.", "9e9", "1 1/", "$-"])
def test_time_grows_with_length_only(piece: str) -> None:
    start = time.process_time()
    last_number(piece * 30_000)
    assert time.process_time() - start < 2


def test_more_digits_than_int_would_parse() -> None:
    assert last_number("9" * 5000) == 10**5000 - 1


def test_exact_number_takes_nothing_else() -> None:
    assert exact_number("1,234") == 1234
    assert exact_number("42.") is None
    assert exact_number("4 2") is None
    assert exact_number("") is None


def test_every_real_answer_scores_itself_and_nothing_else() -> None:
    folder, seen = gsm8k_folder(), 0
    for split in ("train", "test"):
        for line in (folder / f"{split}.jsonl").read_text(encoding="utf-8").splitlines():
            answer = json.loads(line)["answer"]
            gold = Fraction(answer.rsplit("#### ", 1)[1].replace(",", ""))
            assert last_number(answer) == gold
            assert last_number(f"{answer}\nthat is ${int(gold) + 1:,}.") == gold + 1
            seen += 1
    assert seen == 8792
