"""The prompt IDs of runs' first batches beside one another: do they part where the data seeds do, and nowhere else?"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pth_exp.checks.config import parting
from pth_exp.records.reader import RunRecords


@dataclass(frozen=True, slots=True)
class Prompts:
    """The first batches of a run beside those of an earlier run, ``beside``: the first one that it contradicts, else the first.

    ``batch`` and ``position`` say where they part, None where one continues the other; ``expected`` says whether the data
    seeds say the same; None for runs that draw from other prompts or in batches of another size.
    """

    run: str
    beside: str
    compared: int
    batch: int | None
    position: int | None
    expected: bool | None


def prompts(runs: Mapping[str, RunRecords], shared_order: bool) -> list[Prompts]:
    """Every run but the first of those that wrote their first batches, held against all before it; ``runs`` by their names.

    ``shared_order``: the design gives one data order to all seeds.
    """
    drawn = {name: run for name, run in runs.items() if run.first_batches}
    found: dict[str, Prompts] = {}
    for group in _comparable(drawn):
        first = group[0]
        found[first] = _beside(next(iter(drawn)), first, drawn, None)
        found |= {one.run: one for one in _group(group, drawn, shared_order)}
    return [found[name] for name in list(drawn)[1:]]


def _comparable(runs: Mapping[str, RunRecords]) -> list[list[str]]:
    """Runs that draw from the same prompts in batches of the same size."""
    groups: dict[Hashable, list[str]] = {}
    for name, run in runs.items():
        inputs = run.frozen["inputs"]
        groups.setdefault((inputs["data"], inputs["tokenizer"], run.config["prompts_per_update"]), []).append(name)
    return list(groups.values())


def _group(names: Sequence[str], runs: Mapping[str, RunRecords], shared_order: bool) -> Iterator[Prompts]:
    """A run that contradicts one of the runs before it contradicts the first with its seed, or the first with its order."""
    count = min(len(runs[name].first_batches or ()) for name in names)
    by_seed: dict[Hashable, str] = {}
    by_order: dict[Hashable, str] = {}
    for name in names:
        order = tuple(tuple(batch) for batch in (runs[name].first_batches or ())[:count])
        beside = [by_seed.setdefault(runs[name].config["seeds"]["data"], name), by_order.setdefault(order, name), names[0]]
        held = [_held(other, name, runs, shared_order) for other in dict.fromkeys(beside) if other != name]
        if held:
            yield next((one for one in held if one.expected is False), held[-1])


def _held(first: str, name: str, runs: Mapping[str, RunRecords], shared_order: bool) -> Prompts:
    a, b = runs[first], runs[name]
    same_seed = a.config["seeds"]["data"] == b.config["seeds"]["data"]
    same_label = shared_order or a.config["seed"] == b.config["seed"]
    parted = parting(a.first_batches or [], b.first_batches or []) is not None
    return _beside(first, name, runs, not same_seed if parted else same_seed and same_label)


def _beside(first: str, name: str, runs: Mapping[str, RunRecords], expected: bool | None) -> Prompts:
    a, b = runs[first].first_batches or [], runs[name].first_batches or []
    batch, position = parting(a, b) or (None, None)
    compared = sum(map(len, a[: min(len(a), len(b))]))
    return Prompts(name, first, compared, batch, position, expected)
