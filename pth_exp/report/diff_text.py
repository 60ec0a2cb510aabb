"""What `pth diff` found, for a terminal and for a pull request or an appendix.

A few runs stand side by side. Of many, each value stands once, with the runs that have it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pth_exp.design import Finding, brief
from pth_exp.naming import FEW, Runs, shown, values
from pth_exp.report.first_prompts import Prompts
from pth_exp.report.text import Painter, paragraph, table

GROUPS = {
    "varied": "varied: declared by the design",
    "per_arm": "per arm: belongs to the arm, or declared for it",
    "execution": "execution: must not change results",
    "unexpected": "unexpected: no design declares it",
}
MOST_COLUMNS = 4
_WIDEST_FIELD = 34

Fields = Mapping[str, Mapping[str, Any]]
"""Field to {run: value}."""


@dataclass(frozen=True, slots=True)
class Found:
    """What is to be said.

    Attributes:
        kind: runs, or files.
        runs: their names.
        groups: of ``GROUPS``, those to be shown.
        findings: breaches of the design.
        prompts: the first batches; those to be shown.
        notes: what is left out, and why.
    """

    kind: str
    runs: list[str]
    groups: dict[str, Fields]
    findings: Sequence[Finding]
    prompts: Sequence[Prompts]
    notes: Sequence[str]

    def breaches(self) -> list[Finding]:
        """The findings in few words; files have no design that they could breach."""
        return brief(self.findings) if self.kind == "runs" else []


@dataclass(frozen=True, slots=True)
class _Line:
    """A value, or several in few words, and the runs that have it."""

    value: str
    runs: str = ""

    def __str__(self) -> str:
        return f"{self.value}: {self.runs}" if self.runs else self.value


def text(found: Found, paint: Painter) -> Iterator[str]:
    """Lines for a terminal."""
    yield paint("bold", f"{len(found.runs)} {found.kind}")
    names = Runs(found.runs)
    for group, fields in found.groups.items():
        if not fields:
            continue
        yield ""
        yield paint("fail" if group == "unexpected" else "bold", GROUPS[group])
        if len(found.runs) <= MOST_COLUMNS:
            rows = [["", *found.runs], *([path, *(shown(of[run]) for run in found.runs)] for path, of in fields.items())]
            yield from ("  ".join(row).rstrip() for row in table(rows, indent=2))
        else:
            yield from _aligned(fields, names, paint.width)
    if not any(found.groups.values()):
        yield _nothing(found)
    if found.prompts:
        yield ""
        yield paint("bold", "prompt IDs of the first batches")
        for line, surprising in _prompt_lines(found.prompts, names):
            for wrapped in paragraph(line, 2, paint.width):
                yield paint("fail", wrapped) if surprising else wrapped
    yield ""
    for finding in found.breaches():
        yield from paragraph(f"{finding.kind}: {finding.message}", 2, paint.width)
        yield f"    remedy: {finding.remedy}"
    yield from found.notes


def _nothing(found: Found) -> str:
    only_unexpected = list(found.groups) == ["unexpected"]
    return "no unexpected difference" if only_unexpected else "nothing differs that decides a result"


def _aligned(fields: Fields, names: Runs, width: int) -> Iterator[str]:
    column = min(_WIDEST_FIELD, max(map(len, fields)))
    for path, lines in _lines(fields, names):
        head = f"  {path.ljust(column)}  "
        if len(path) > column:
            yield f"  {path}"
            head = " " * (column + 4)
        for line in lines:
            yield from _hanging(head, str(line), width)
            head = " " * (column + 4)


def _hanging(head: str, line: str, width: int) -> Iterator[str]:
    for number, wrapped in enumerate(paragraph(line, len(head), width)):
        yield wrapped if number else head + wrapped[len(head) :]


def _lines(fields: Fields, names: Runs) -> Iterator[tuple[str, list[_Line]]]:
    """Each field in as few lines as say it; first those by which the runs are called."""
    seen: dict[tuple[str, ...], str] = {}
    written = {path: {run: shown(value) for run, value in of.items()} for path, of in fields.items()}
    for path, texts in sorted(written.items(), key=lambda item: not names.say(*item)):
        same_as = seen.setdefault(tuple(texts.values()), path)
        yield path, [_Line(f"as {same_as}")] if same_as != path else list(_values(path, texts, names))


def _values(path: str, of: Mapping[str, str], names: Runs) -> Iterator[_Line]:
    having: dict[str, list[str]] = {}
    for run, value in of.items():
        having.setdefault(value, []).append(run)
    most = max(having, key=lambda value: len(having[value]))
    others = [value for value in having if value != most or 2 * len(having[value]) <= len(of)]
    if names.say(path, of):
        yield _Line(values(having, 3 * FEW))
    elif len(others) <= FEW:
        for value in others:
            yield _Line(value, names.named(having[value]))
    elif most in others:
        yield _Line(values(having))
    else:
        yield _Line(values(others), names.named(run for run, value in of.items() if value != most))
    if most not in others and not names.say(path, of):
        yield _Line(most, f"the other {len(having[most])} runs")


def _prompt_lines(prompts: Sequence[Prompts], names: Runs) -> Iterator[tuple[str, bool]]:
    """What is as it should be is counted, where there are many; each surprise is told, with whether it is one."""
    few = len(prompts) < MOST_COLUMNS
    as_expected = [one for one in prompts if one.expected]
    if as_expected and not few:
        yield f"{len(as_expected)} of {len(prompts)} runs as the seeds say, each held against all before it", False
    alike: dict[tuple[str, str, bool], list[str]] = {}
    for one in prompts:
        if few or not one.expected:
            alike.setdefault((one.beside, f"{_place(one)} {_judgement(one)}", one.expected is False), []).append(one.run)
    for (beside, what, surprising), runs in list(alike.items())[: 2 * FEW]:
        yield f"{names.named(runs)} beside {beside}: {what}", surprising
    left = [run for runs in list(alike.values())[2 * FEW :] for run in runs]
    if left:
        yield f"and {len(left)} more runs: {names.named(left)}", True


def _place(prompt: Prompts) -> str:
    if prompt.batch is None:
        return f"all {prompt.compared} the same"
    return f"part at update {prompt.batch}, position {prompt.position}"


def _judgement(prompt: Prompts) -> str:
    if prompt.expected is None:
        return "(other prompts, or batches of another size)"
    if prompt.expected:
        return "(as the seeds say)"
    return "although the seeds differ" if prompt.batch is None else "although seeds.data is the same"


# ------------------------------------------------------------------------------------------------------------- Markdown


def markdown(found: Found) -> Iterator[str]:
    """Lines of GitHub's Markdown: one table of fields, and lists."""
    yield f"**{len(found.runs)} {found.kind}**" + ("" if any(found.groups.values()) else f": {_nothing(found)}")
    names = Runs(found.runs)
    columns = found.runs if len(found.runs) <= MOST_COLUMNS else ["values"]
    if any(found.groups.values()):
        yield ""
        yield _row(["field", "", *map(_plain, columns)])
        yield _row(["---"] * (len(columns) + 2))
    for group, fields in found.groups.items():
        kind = GROUPS[group].partition(":")[0]
        kind = f"**{kind}**" if group == "unexpected" else kind
        if len(found.runs) <= MOST_COLUMNS:
            for path, of in fields.items():
                yield _row([_code(path), kind, *(_code(shown(of[run])) for run in found.runs)])
        else:
            for path, lines in _lines(fields, names):
                cells = [_code(line.value) + (f" {_plain(line.runs)}" if line.runs else "") for line in lines]
                yield _row([_code(path), kind, "<br>".join(cells)])
    if found.prompts:
        yield ""
        yield "Prompt IDs of the first batches:"
        yield ""
        for line, surprising in _prompt_lines(found.prompts, names):
            yield f"- **{_plain(line)}**" if surprising else f"- {_plain(line)}"
    if found.breaches():
        yield ""
        for finding in found.breaches():
            yield f"- {_plain(finding.kind)}: {_plain(finding.message)}. Remedy: {_plain(finding.remedy)}"
    for note in found.notes:
        yield ""
        yield _plain(note)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _plain(what: str) -> str:
    return re.sub(r"([\\`*_<>\[\]|])", r"\\\1", what).replace("\n", " ")


def _code(what: str) -> str:
    """A code span, which in a table still needs its bars escaped; a fence is longer than any run of backticks within."""
    fence = "`" * (1 + max(map(len, re.findall("`+", what)), default=0))
    space = " " if what[:1] == "`" or what[-1:] == "`" else ""
    return f"{fence}{space}{what}{space}{fence}".replace("|", "\\|").replace("\n", " ") if what else ""
