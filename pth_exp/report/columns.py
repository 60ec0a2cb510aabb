"""``pth records``: every column of the record files, with its unit and meaning."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from pth_exp.records.fields import KINDS
from pth_exp.report.text import Painter, table


def main(argv: Sequence[str]) -> int:
    """Exit code 0, or 2 for wrong usage."""
    parser = argparse.ArgumentParser(prog="pth records", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text; types are DuckDB's")
    if parser.parse_args(argv).json:
        print(json.dumps({kind: [asdict(column) for column in columns] for kind, columns in KINDS.items()}, indent=1))
        return 0
    paint = Painter(sys.stdout)
    for kind, columns in KINDS.items():
        print(paint("bold", f"{kind}.NNNN.jsonl"))
        for row in table([[c.name, c.unit, c.meaning] for c in columns], indent=2):
            print("  ".join(row).rstrip())
    return 0
