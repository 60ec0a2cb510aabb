"""YAML read and written section by section is the YAML that PyYAML reads and writes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pth_exp import sections

texts = st.one_of(
    st.text(max_size=8),
    st.sampled_from(
        ["a: b", "- x", "# no", "two\nlines\n\n\nfour", " leads", "ends ", "\n", "yes", "1e3", "0x1", "x" * 1200 + " y"]
    ),
)
scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), texts)
keys = st.one_of(
    st.sampled_from(["lr", "arm", "seeds.data", "yes", "a-b", "_x", "1"]), texts.filter(lambda text: "\n" not in text)
)
values = st.recursive(scalars, lambda v: st.one_of(st.lists(v, max_size=3), st.dictionaries(keys, v, max_size=3)), max_leaves=12)
mappings = st.dictionaries(keys, values, max_size=5)


def plain(data: bytes) -> Any:
    return yaml.load(data, sections.Loader)


def same(a: Any, b: Any) -> bool:
    """Equal with types, and keys in one order."""
    return repr(a) == repr(b)


@settings(deadline=None, max_examples=60)
@given(mappings)
@example({"a": "x\n\n", "b": {"c": "\n", "d": 1}, "e": "\n\n"})
@example({"a": {"b": "x\n\n\ny\n"}, "c": {"d": {"e": [1, {"f": " g\nh"}]}}})
def test_what_is_written_reads_back_either_way(content: dict[str, Any]) -> None:
    data = sections.dump(content)
    assert same(plain(data), content)
    assert same(sections.load(data), content)


@settings(deadline=None, max_examples=60)
@given(mappings, st.booleans(), st.sampled_from([None, True, False]), st.integers(1, 4))
def test_other_writers_files_read_as_with_pyyaml(content: dict[str, Any], wide: bool, flow: bool | None, indent: int) -> None:
    text = yaml.safe_dump(content, width=1000 if wide else 20, default_flow_style=flow, indent=indent, sort_keys=False)
    assert same(sections.load(text.encode()), plain(text.encode()))


@pytest.mark.parametrize(
    "text",
    [
        "", "\n", "a: 1", "a:\n  b: 1\n  c:\n  - 2\n", "- a\n- b\n", "# head\na: 1\n", "---\na: 1\n", "a: 1\n...\n",
        "a: &x {b: 1}\nc: *x\n", "a: &x\n  b: 1\nc:\n  <<: *x\n  d: 2\n", "a: 'x\n\n  y: z'\nb: 1\n", "a: [1,\n  2]\nb: 1\n",
        "a: |\n  b: 1\n\n  c: 2\nd: 3\n", "a:\n    b: 1\n    c: 2\nd: 3\n", "a:\n  b: 1\n  # in between\n  c: 2\n",
        "a: # why\n  b: 1\n", "a: 1\na: 2\n", "a:\n  b: 1\na:\n  c: 2\n", "yes: 1\nnull: 2\n", "a: >\n  b\n  c: d\n",
        "a:\n- b: 1\n  c: 2\n-\n  d\n",
        "a:\n  b\n  c\nd: 1\n", "a: x\n  y\nb: 1\n", "? a\n: b\n", "a: !!str 1\n", "a:\nb:\n", "a:\n  b:\n  c:\n",
        "a : 1\n", "a: 1\r\nb: 2\r\n",
        "\ufeffa: 1\n", "a:\n  b: 1\n\n\nc: 2\n", "a: {b: 1}\n", "é: 1\na: 2\n", "a:\t1\n",
        "a:b\n", "a:\n  b:c\n", "a: 2026-01-01\n",
    ],
)  # fmt: skip
def test_files_that_people_write_read_as_with_pyyaml(text: str) -> None:
    assert same(sections.load(text.encode()), plain(text.encode()))


@pytest.mark.parametrize(
    "text",
    [
        "a: [",
        "a: 1\n...\nb: 2\n",
        "a:\n  b: 1\n- 3\n",
        "a: 1\n b: 2\n",
        "a: *x\n",
        "a: 1\nb\n",
        "a: 'x\nb: 1\n",
        "a:\n  b: {\n  c: 1\n",
        "\x00",
    ],
)
def test_a_mistake_is_told_as_by_pyyaml(text: str) -> None:
    with pytest.raises(yaml.YAMLError) as expected:
        yaml.load(text.encode(), sections.Loader)
    with pytest.raises(yaml.YAMLError) as found:
        sections.load(text.encode())
    assert str(found.value) == str(expected.value)


def test_equal_sections_are_read_once_and_unequal_ones_are_not_mixed_up() -> None:
    first = sections.load(b"lr: 1\nkl:\n  coef: 1\n  name: a\n")
    second = sections.load(b"lr: 1.0\nkl:\n  coef: true\n  name: a\nz: {a: [1]}\n")
    third = sections.load(b"kl:\n  coef: 1\nz: {a: [1]}\n")
    assert (type(first["lr"]), type(second["lr"])) == (int, float)
    assert first["kl"]["coef"] is not second["kl"]["coef"] and third["kl"]["coef"] == 1
    assert third["z"] is second["z"]
    assert sections.dump({"x": 1}) != sections.dump({"x": True}) != sections.dump({"x": 1.0})
    assert math.isnan(sections.load(sections.dump({"x": float("nan")}))["x"])
