"""What a run went on with that is not what it was frozen with, or not what its attempt before had.

``changes.jsonl`` in the run's directory is only ever appended to. It is not there unless something changed. A row is one of

* ``accepted``: someone told ``pth resume`` to go on over inputs that are not the frozen ones, and why. A worker takes the hashes
  that the newest of these rows names, besides the frozen ones, and no others.
* ``began``: an attempt goes on from an update with what differs then from the frozen inputs, or in its libraries and its device
  from the attempt before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pth_exp.runfiles import append_row, read_rows, stamp

FILE = "changes.jsonl"
FROZEN = "frozen.yaml"
UNASKED = ("version", "device")
"""Kinds that need no acceptance: a cluster's libraries and machines change under a run, and nobody froze them."""
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that is not as it was.

    Attributes:
        kind: source, data, model, tokenizer, study, plug-in, frozen.yaml, version or device.
        name: the file, field or package; empty where only the whole is known.
        before: hash or value; None where there was none.
        after: the same now.
    """

    kind: str
    name: str
    before: Any
    after: Any

    def __str__(self) -> str:
        what = f"{self.kind} {self.name}".strip()
        if self.kind in (*UNASKED, FROZEN):
            return f"{self.name} {self.before} → {self.after}"
        return f"{what} is new" if self.before is None else f"{what} is gone" if self.after is None else f"{what} changed"


def shown(changes: Sequence[Change | Mapping[str, Any]], most: int = _SHOWN) -> str:
    """The changes in a few words."""
    read = [change if isinstance(change, Change) else Change(**change) for change in changes]
    more = f" and {len(read) - most} more" if len(read) > most else ""
    return ", ".join(map(str, read[:most])) + more


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """Every row, in order; none for a run in which nothing changed."""
    return read_rows(run_dir / FILE)


def accept(run_dir: Path, reason: str, inputs: Mapping[str, str], found: Iterable[Change], after: int) -> None:
    """Record that the run may go on over changed inputs: name of the input to the hash that it has now.

    ``after`` is the newest attempt so far.
    """
    row = {"event": "accepted", **stamp("resume"), "reason": reason, "after": after, "inputs": dict(inputs)}
    append_row(run_dir / FILE, row | {"changes": [asdict(change) for change in found]})


def accepted(run_dir: Path) -> dict[str, str]:
    """The hashes that a worker may find besides the frozen ones, by the input's name."""
    found = _newest_acceptance(run_dir)
    return dict(found["inputs"]) if found else {}


def begin(run_dir: Path, attempt: int, update: int, found: Sequence[Change]) -> str:
    """Record that an attempt goes on from ``update`` with these changes; the same in a sentence."""
    row = {"event": "began", **stamp("worker"), "attempt": attempt, "from_update": update}
    told = _newest_acceptance(run_dir)
    if told is not None and any(change.kind not in UNASKED for change in found):
        row |= {"accepted_by": told["by"], "reason": told["reason"]}
    row["changes"] = [asdict(change) for change in found]
    append_row(run_dir / FILE, row)
    return _sentence(row)


def edits_of_the_frozen_file(run_dir: Path) -> list[Change]:
    """The fields whose edit was accepted last."""
    told = _newest_acceptance(run_dir)
    return [Change(**change) for change in told["changes"] if change["kind"] == FROZEN] if told else []


def in_force(run_dir: Path) -> bool:
    """Whether the newest attempt on record here had other inputs than the frozen ones."""
    last = next((row for row in reversed(rows(run_dir)) if row["event"] == "began"), None)
    return last is not None and any(change["kind"] not in UNASKED for change in last["changes"])


def summary(run_dir: Path) -> str | None:
    """What changed in a run and from which update on, for people; None when nothing did."""
    sentences = list(dict.fromkeys(_sentence(row) for row in rows(run_dir) if row["event"] == "began"))
    return "; ".join(sentences) or None


def _newest_acceptance(run_dir: Path) -> dict[str, Any] | None:
    return next((row for row in reversed(rows(run_dir)) if row["event"] == "accepted"), None)


def _sentence(row: Mapping[str, Any]) -> str:
    if not row["changes"]:
        return f"as frozen again from update {row['from_update']} on"
    why = f" (accepted by {row['accepted_by']}: {row['reason']})" if "reason" in row else ""
    return f"from update {row['from_update']} on {shown(row['changes'])}{why}"
