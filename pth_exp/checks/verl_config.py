"""Check 2 on verl: does the job hold the config that was frozen for it, and do the objects that it built?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pth_exp import changes
from pth_exp.design import ABSENT, flatten
from pth_exp.records.reader import RunRecords

ASKED, HELD = "verl.yaml", "received_verl.yaml"

Fault = tuple[str, str]
"""The deciding number and its sentence."""


def applies(run: RunRecords) -> bool:
    """Whether a config of verl's was frozen for this run."""
    return ASKED in run.frozen.get("files", {})


def not_measured(run: RunRecords) -> str | None:
    """What is missing of what the verdict rests on."""
    if not applies(run):
        return None
    if run.mapping(HELD) is None:
        return f"no {HELD}"
    missing = [name for name in ("verl", "source") if not (run.received or {}).get("objects", {}).get(name)]
    return f"no objects.{missing[0]} in received.yaml" if missing else None


def faults(run: RunRecords) -> Iterator[Fault]:
    """Settings of verl's that did not arrive as frozen.

    What an attempt sets by itself is listed in ``received.yaml`` under ``objects.places``, and has to be what it says there.
    """
    asked, held = flatten(run.mapping(ASKED) or {}), flatten(run.mapping(HELD) or {})
    if not applies(run) or not held:
        return
    objects = (run.received or {}).get("objects", {})
    places, built = objects.get("places", {}), objects.get("verl", {})
    yield from _differences({**asked, **places}, {name: held.get(name, ABSENT) for name in {**asked, **held}}, "verl's config")
    yield from _differences(asked, {name: value for name, value in built.items() if name not in places}, "what verl built")
    frozen = run.frozen["inputs"]["source"]
    if (source := objects.get("source", frozen)) not in (frozen, changes.accepted(run.path).get("source")):
        yield "source differs", f"The actor's process ran source with sha256 {source}; frozen was {frozen}."


def _differences(asked: Mapping[str, Any], held: Mapping[str, Any], where: str) -> Iterable[Fault]:
    for name, value in held.items():
        wanted = asked.get(name, ABSENT)
        if wanted != value:
            yield f"{name}: {value}", f"{name} is frozen as {wanted!r} in {ASKED}, and {where} in the job has {value!r}."
