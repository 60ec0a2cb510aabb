"""Tables and paragraphs for a terminal; plain text when piped."""

from __future__ import annotations

import os
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from typing import TextIO

COLOURS = {"bold": "1", "dim": "2", "pass": "32", "warn": "33", "fail": "31;1", "not measured": "35"}


class Painter:
    """Adds colour where the stream is a terminal and NO_COLOR is not set; a verdict's word never depends on it."""

    def __init__(self, stream: TextIO) -> None:
        self._on = stream.isatty() and not os.environ.get("NO_COLOR")
        self.width = min(shutil.get_terminal_size().columns, 140) if stream.isatty() else 140

    def __call__(self, style: str, text: str) -> str:
        return f"\033[{COLOURS[style]}m{text}\033[0m" if self._on else text


def table(rows: Sequence[Sequence[str]], indent: int = 0) -> list[list[str]]:
    """Cells padded to their columns' widths; the last column is left as it is."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    first = " " * indent
    return [[first + row[0].ljust(widths[0]), *(c.ljust(w) for c, w in zip(row[1:], widths[1:], strict=True))] for row in rows]


def paragraph(text: str, indent: int, width: int) -> Iterable[str]:
    """Wrapped text, every line indented."""
    pad = " " * indent
    return textwrap.wrap(text, width, initial_indent=pad, subsequent_indent=pad, break_long_words=False, break_on_hyphens=False)


def duration(seconds: float) -> str:
    """``45s``, ``3m05s``, ``2h07m``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
