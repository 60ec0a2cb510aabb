"""YAML of many files that have most of their text in common, as a sweep's frozen files do: each distinct section is read, or
written, once.

A section is a key of the file's mapping, or of a mapping right below it, with all that belongs to it. PyYAML takes 3 ms for a
frozen file, however often it has seen its lines; a thousand of them are 70 distinct sections, and what names each run.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_Dumper: Any = type("_Dumper", (getattr(yaml, "CSafeDumper", yaml.SafeDumper),), {})

_DEPTH = 2
_INDENT = "  "
_SECTION = [re.compile(rf"^(?={_INDENT * depth}[A-Za-z_])", re.MULTILINE) for depth in range(_DEPTH)]
_BEGINS = [re.compile(rf"{_INDENT * depth}[A-Za-z_][\w.-]*:(?=\s)") for depth in range(_DEPTH)]
_ELSEWHERE = re.compile(r"^(?![A-Za-z_\s]|-\s|\Z)", re.MULTILINE)
"""A line that neither begins a section nor goes on with one: a comment, a second document, a quoted key."""

_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_LINES = re.compile("^(?=.)", re.MULTILINE)

_read: dict[str, dict[Any, Any]] = {}
_written: dict[str, str] = {}


def load(data: bytes) -> Any:
    """What ``yaml.load`` makes of a file. Equal sections are one object in all files: not to be changed.

    Raises ``yaml.YAMLError`` or ``UnicodeDecodeError``.
    """
    try:
        text = data.decode()
        if text and not _ELSEWHERE.search(text):
            return _mapping(text, 0)
    except (yaml.YAMLError, UnicodeDecodeError, _NotSections):
        pass  # a value that reaches over sections, or a mistake, which is to be told with its line
    return yaml.load(data, Loader)


class _NotSections(ValueError):
    pass


def _mapping(text: str, depth: int) -> dict[Any, Any]:
    values: dict[Any, Any] = {}
    for section in _SECTION[depth].split(text):
        if section:
            values.update(_section(section, depth))
    return values


def _section(text: str, depth: int) -> dict[Any, Any]:
    """The one key of a section and its value."""
    if text not in _read:
        begins = _BEGINS[depth].match(text)
        if begins is None:
            raise _NotSections
        head, body = text[: begins.end() + 1], text[begins.end() + 1 :]
        if depth + 1 < _DEPTH and head.endswith("\n") and _BEGINS[depth + 1].match(body):
            (key,) = _section(head, depth)
            return {key: _mapping(body, depth + 1)}  # likely to be of this file alone; its sections are kept
        _read[text] = yaml.load(text, Loader)
    return _read[text]


def dump(content: Any) -> bytes:
    """YAML in the order given; PyYAML reads floats back exactly."""
    return _text(content, _DEPTH).encode()


def _text(content: Any, depth: int) -> str:
    if not (depth and isinstance(content, dict) and content and all(map(_named, content))):
        return _remembered(content)
    parts = []
    for key, value in content.items():
        if depth > 1 and isinstance(value, dict) and value:
            head = _remembered({key: None}).removesuffix(" null\n")
            parts.append(f"{head}\n{_LINES.sub(_INDENT, _text(value, depth - 1))}")
        else:
            parts.append(_remembered({key: value}))
    return "".join(parts)


def _named(key: object) -> bool:
    return isinstance(key, str) and _NAME.fullmatch(key) is not None


def _remembered(content: Any) -> str:
    """Written once for each ``repr``, which for plain values tells all apart that YAML does."""
    key = repr(content)
    if key not in _written:
        text = yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)
        _written[key] = text.removesuffix("...\n")  # a document's end, which PyYAML marks where one might doubt it
    return _written[key]


def _text_as_written(dumper: Any, text: str) -> Any:
    """Several lines stand as lines, so that an arm's equation can be read in a frozen file."""
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text_as_written)
