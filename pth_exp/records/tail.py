"""The ends of record files, of however many updates: for those who look at a thousand runs every second."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_FIRST_BYTES = 1 << 13
"""More than most rows take."""


def last_rows(run_dir: Path, names: Iterable[str], kind: str, most: int = 1) -> list[dict[str, Any]]:
    """Up to ``most`` last rows of the newest segment of a kind that has a whole one, the newest last.

    ``names`` are those of the directory's files. A torn row is left out.
    """
    segments = sorted((name for name in names if name.startswith(f"{kind}.") and name.endswith(".jsonl")), reverse=True)
    for name in segments:
        if rows := _ends(run_dir / name, most):
            return rows
    return []


def _ends(path: Path, most: int) -> list[dict[str, Any]]:
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        length = _FIRST_BYTES
        while True:
            start = max(0, size - length)
            file.seek(start)
            lines = file.read(size - start).split(b"\n")[:-1]  # what lost its beginning is no row either
            rows: list[dict[str, Any]] = []
            while lines and len(rows) < most:
                row = _row(lines.pop())
                if row is not None:
                    rows.insert(0, row)
            if len(rows) == most or start == 0:
                return rows
            length *= 4


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
