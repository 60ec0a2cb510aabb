from __future__ import annotations

import hashlib
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pth_exp import schema
from pth_exp.models.vocabulary import build_tokenizer
from pth_exp.tasks import Problem, Split, TaskError
from pth_exp.tasks.cut import cut_response
from pth_exp.tasks.prompts import prompt_id, render

ARITHMETIC = schema.ArithmeticTask("arithmetic")


def problem(prompt: str = "ana has 9 keys, buys 7, loses 3?", index: int = 7) -> Problem:
    return Problem(Split.test, index, prompt, Fraction(13), prompt)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer()


def test_render_is_one_token_a_word_or_digit(tokenizer: Any) -> None:
    tokens = render(problem(), tokenizer, ARITHMETIC, 64)
    words = ["ana", " has ", "9", " keys", ",", " buys ", "7", ",", " loses ", "3", "?"]
    assert tokenizer.convert_ids_to_tokens(tokens) == words


def test_prompt_id_is_split_index_and_hash_of_little_endian_tokens() -> None:
    tokens = [3, 70000, 5]
    digest = hashlib.sha256(np.array(tokens, dtype="<i8").tobytes()).hexdigest()
    assert prompt_id(problem(), tokens) == f"test:7:{digest[:12]}"


def test_too_long_a_prompt_names_the_field(tokenizer: Any) -> None:
    assert len(render(problem(), tokenizer, ARITHMETIC, 11)) == 11
    with pytest.raises(TaskError, match=r"max_prompt_tokens: 10 .*test prompt 7 has 11"):
        render(problem(), tokenizer, ARITHMETIC, 10)


def test_text_that_the_tokenizer_would_drop_is_refused(tokenizer: Any) -> None:
    with pytest.raises(TaskError, match=r"model.path: .*cannot represent the test prompt 7"):
        render(problem("zoe has 9 keys, buys 7?"), tokenizer, ARITHMETIC, 64)


def test_chat_template_opens_the_assistants_turn(tokenizer: Any) -> None:
    chat = build_tokenizer()
    config = schema.ArithmeticTask("arithmetic", chat_template=schema.ChatTemplate.always)
    with pytest.raises(TaskError, match=r"task.chat_template: always .* set it to never"):
        render(problem(), chat, config, 64)
    chat.chat_template = "{% for m in messages %}{{ m.content }}.{% endfor %}{% if add_generation_prompt %} so {% endif %}"
    assert chat.decode(render(problem(), chat, config, 64)) == "ana has 9 keys, buys 7, loses 3?. so "


PIECES = ["18", ".", "\n\n", "Q", ":", "\n\nQ: ", " what", "\u00e9", ""]
piece_lists = st.lists(st.integers(0, len(PIECES) - 1), max_size=12)


def decode(tokens: Sequence[int]) -> str:
    return "".join(PIECES[t] for t in tokens)


def test_cut_before_the_first_marker_by_hand() -> None:
    row = [0, 1, 2, 3, 4, 6]  # "18" "." "\n\n" "Q" ":" " what"
    assert cut_response(row, decode, []).kept == 6
    assert cut_response(row, decode, ["absent"]).text == "18.\n\nQ: what"
    cut = cut_response(row, decode, ["Q:", "\n\nQ"])
    assert (cut.text, cut.kept) == ("18.", 2)
    assert cut_response([3, 4, 0], decode, ["Q:"]).kept == 0


def test_a_token_that_begins_before_the_marker_is_kept() -> None:
    cut = cut_response([0, 5, 6], decode, ["Q:"])  # "18" "\n\nQ: " " what"
    assert (cut.text, cut.kept) == ("18\n\n", 2)


@given(piece_lists, st.lists(st.sampled_from(["\n\n", "Q:", "18", "\n"]), max_size=3))
def test_cut_holds_no_marker_and_kept_tokens_cover_it(tokens: list[int], markers: list[str]) -> None:
    cut = cut_response(tokens, decode, markers)
    assert not any(marker in cut.text for marker in markers)
    assert decode(tokens[: cut.kept]).startswith(cut.text)
    if cut.kept:
        assert len(decode(tokens[: cut.kept - 1])) < len(cut.text) or not markers or cut.text == decode(tokens)
