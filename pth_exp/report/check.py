"""``pth check``: verdicts of a sweep, the evidence, what each run ended with, and one picture of it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from math import sqrt
from pathlib import Path

from pth_exp.checks.result import Outcome, Verdict
from pth_exp.checks.run import CHECKS, Report, check_sweep
from pth_exp.naming import Runs
from pth_exp.records.reader import NothingToRead, Sweep
from pth_exp.report import shadows
from pth_exp.report.summary import RunSummary, summarise
from pth_exp.report.text import Painter, paragraph, table

QUESTIONS = {
    "ratio": "What is the ratio, or the weight, taken against?",
    "config": "Did every run get what its label says?",
    "batches": "Is every update trained on a batch of its own, as old as scheduled?",
    "losses": "Is every loss the one that is written down?",
}
PICTURE = "check.png"
MOST_NAMES = 12
"""Runs, and replicates, that are named one by one."""

Naming = Callable[[Sequence[str]], str]


def main(argv: Sequence[str]) -> int:
    """Exit code 0 when exactly the expected verdicts come out, 1 when not, 2 when there is nothing to check."""
    parser = argparse.ArgumentParser(prog="pth check", description=__doc__, epilog=main.__doc__)
    parser.add_argument("sweep", nargs="?", type=Path, help="directory of a sweep or an experiment; default: the latest sweep")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    parser.add_argument("--no-figure", action="store_true", help=f"do not write {PICTURE} into the sweep's directory")
    arguments = parser.parse_args(argv)
    try:
        sweep = Sweep.load(arguments.sweep)
    except NothingToRead as error:
        print(f"pth check: {error}", file=sys.stderr)
        return 2
    report, runs = check_sweep(sweep), summarise(sweep)
    if arguments.json:
        picture = None if arguments.no_figure else _draw(sweep)
        facts = {"sweep": str(sweep.path), "picture": picture and str(picture), "runs": [asdict(run) for run in runs]}
        facts["shadows"] = [asdict(pair) for run in sweep.runs for pair in shadows.pairs(run)]
        problems = {run.label: [asdict(problem) for problem in run.problems] for run in sweep.runs if run.problems}
        print(json.dumps(facts | report.as_dict() | {"problems": problems}, indent=1, ensure_ascii=False))
    else:
        paint = Painter(sys.stdout)
        print("\n".join(_text(sweep, report, runs, paint)), flush=True)
        picture = None if arguments.no_figure else _draw(sweep)
        if picture:
            print(f"\nPicture: {_near(picture)}")
        for line in _next_steps(sweep, paint):
            print(line)
    return 1 if report.surprises else 0


def _draw(sweep: Sweep) -> Path | None:
    from pth_exp.report.picture import draw  # matplotlib is imported only when a picture is drawn

    path = sweep.path / PICTURE
    try:
        return path if draw(sweep, path) else None
    except OSError as error:
        print(f"pth check: the picture was not written: {error}", file=sys.stderr)
        return None


def _near(path: Path) -> Path:
    """The path as seen from where the user stands, if it lies below."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _text(sweep: Sweep, report: Report, runs: Sequence[RunSummary], paint: Painter) -> Iterator[str]:
    gate = sweep.index["gate"]
    named = _naming(sweep)
    yield paint("bold", str(_near(sweep.path)))
    yield f"{len(sweep.runs)} runs · gate: {gate['verdict']}"
    for finding in gate["findings"]:
        yield from paragraph(f"{finding['kind']}: {finding['message']}", 2, paint.width)
    yield ""
    yield from _matrix(sweep, report, paint)
    for check in CHECKS:
        yield ""
        yield paint("bold", f"{CHECKS.index(check) + 1} {check}: {QUESTIONS[check]}")
        yield from _details(report, [v for v in report.verdicts if v.check == check], named, paint)
    yield from shadows.text([pair for run in sweep.runs for pair in shadows.pairs(run)], paint)
    yield ""
    yield from _accuracy(runs, paint)
    yield from _incomplete(sweep, runs, named, paint)
    yield ""
    yield from _conclusion(report, named, paint)


def _naming(sweep: Sweep) -> Naming:
    """How runs are named of which the same is to be said: a few by their labels, many by what they have in common."""
    known = Runs([run.label for run in sweep.runs])
    return lambda runs: ", ".join(runs) if len(runs) <= MOST_NAMES or not known.has(runs) else known.named(runs)


def _matrix(sweep: Sweep, report: Report, paint: Painter) -> Iterator[str]:
    verdicts = {(verdict.run, verdict.check): verdict for verdict in report.verdicts}
    rows = [[verdicts[run.label, check] for check in CHECKS] for run in sweep.runs]
    header = ["run", *(f"{i} {check}" for i, check in enumerate(CHECKS, 1))]
    cells = [
        [run.label, *(f"{v.outcome}{_mark(report, v)}  {v.number}" for v in row)]
        for run, row in zip(sweep.runs, rows, strict=True)
    ]
    padded = table([header, *cells])
    yield paint("bold", "  ".join(padded[0]).rstrip())
    for texts, row in zip(padded[1:], rows, strict=True):
        painted = [text.replace(v.outcome, paint(v.outcome, v.outcome), 1) for text, v in zip(texts[1:], row, strict=True)]
        yield "  ".join([texts[0], *painted]).rstrip()
    marks = {_mark(report, v) for row in rows for v in row}
    notes = {"*": "* as design.expect declares", "!": "! not as expected"}
    if marks & set(notes):
        yield paint("dim", ", ".join(note for mark, note in notes.items() if mark in marks))


def _mark(report: Report, verdict: Verdict) -> str:
    if not report.as_expected(verdict):
        return "!"
    return "*" if (verdict.run, verdict.check) in report.declared else ""


def _details(report: Report, verdicts: Sequence[Verdict], named: Naming, paint: Painter) -> Iterator[str]:
    """Evidence for whatever did not pass, a sentence for what did; once for runs of which the same is to be said."""
    groups: dict[tuple[Outcome, str, tuple[str, ...]], list[str]] = {}
    notes = {"": "", "*": " (as declared)", "!": " (not as expected)"}
    for verdict in sorted(verdicts, key=lambda v: v.outcome is Outcome.passed):
        evidence = () if verdict.outcome is Outcome.passed else verdict.details
        note = notes[_mark(report, verdict)]
        groups.setdefault((verdict.outcome, note, (verdict.reason, *evidence)), []).append(verdict.run)
    for (outcome, note, sentences), runs in groups.items():
        first, *more = paragraph(named(runs), 0, paint.width - 24)
        yield f"  {paint(outcome, outcome)}{note}  {paint('bold', first)}"
        yield from (" " * 8 + paint("bold", line) for line in more)
        for sentence in sentences:
            yield from paragraph(sentence, 6, paint.width)
    own = dict.fromkeys(name for verdict in verdicts for name in verdict.self_reported)
    if own:
        yield paint("dim", f"  Rests on what a run measured of itself: {', '.join(own)}")


def _accuracy(runs: Sequence[RunSummary], paint: Painter) -> Iterator[str]:
    validated = [run for run in runs if run.accuracy is not None]
    if not validated:
        yield "No run has validated: there is no accuracy to show."
        return
    sizes = sorted({run.problems for run in validated if run.problems})
    error = max(
        sqrt(run.accuracy * (1 - run.accuracy) / run.problems) for run in validated if run.problems and run.accuracy is not None
    )
    problems = " or ".join(map(str, sizes))
    yield paint("bold", f"Accuracy at the end: greedy, {problems} problems, standard error of one number at most {error:.3f}")
    replicates = list(dict.fromkeys(run.replicate for run in runs))
    cells = list(dict.fromkeys(run.cell for run in runs))
    if len(replicates) > MOST_NAMES:
        yield from _accuracy_of_many(runs)
        return
    rows = [["", *replicates, "mean" if len(replicates) > 1 else ""]]
    for name in cells:
        own = [run for run in runs if run.cell == name]
        values = [run.accuracy for run in own if run.accuracy is not None and run.accuracy_at == run.planned]
        entries = [" ".join(_entry(run) for run in own if run.replicate == replicate) for replicate in replicates]
        rows.append([name, *entries, f"{sum(values) / len(values):.3f}" if len(values) > 1 else ""])
    for line in table(rows, indent=2):
        yield "  ".join(line).rstrip()


def _accuracy_of_many(runs: Sequence[RunSummary]) -> Iterator[str]:
    """For more replicates than stand side by side: of those of a cell that have ended."""
    rows = [["", "runs", "least", "mean", "most"]]
    cells: dict[str, list[float]] = {run.cell: [] for run in runs}
    for run in runs:
        if run.accuracy is not None and run.accuracy_at == run.planned:
            cells[run.cell].append(run.accuracy)
    for name, values in cells.items():
        shown = [f"{v:.3f}" for v in (min(values), sum(values) / len(values), max(values))] if values else ["-"] * 3
        rows.append([name, str(len(values)), *shown])
    for line in table(rows, indent=2):
        yield "  ".join(line).rstrip()


def _entry(run: RunSummary) -> str:
    if run.accuracy is None:
        return "-"
    return f"{run.accuracy:.3f}" + ("" if run.accuracy_at == run.planned else f" (update {run.accuracy_at})")


def _incomplete(sweep: Sweep, runs: Sequence[RunSummary], named: Naming, paint: Painter) -> Iterator[str]:
    rest = [run for run in runs if not run.complete]
    if rest or sweep.problems:
        yield ""
        yield paint("bold", f"Not complete: {len(rest) + len(sweep.problems)} of {len(sweep.index['runs'])} runs")
        for run in rest[:MOST_NAMES]:
            yield from paragraph(
                f"{run.label}: {run.state}, {run.updates} of {run.planned} updates. {run.state_detail}", 2, paint.width
            )
        if len(rest) > MOST_NAMES:
            yield from paragraph(f"and {named([run.label for run in rest[MOST_NAMES:]])}; `pth status` says more", 2, paint.width)
        for problem in sweep.problems:
            yield from paragraph(str(problem), 2, paint.width)
    damaged = [(run.label, problem) for run in sweep.runs for problem in run.problems]
    if damaged:
        yield ""
        yield paint("bold", "Record files")
        for label, problem in damaged:
            yield from paragraph(f"{label}: {problem}", 2, paint.width)


def _conclusion(report: Report, named: Naming, paint: Painter) -> Iterator[str]:
    if not report.surprises:
        yield paint("pass", f"As expected: all {len(report.verdicts)} verdicts.")
        return
    yield paint("fail", f"Not as expected: {len(report.surprises)}")
    alike: dict[str, list[str]] = {}
    for surprise in report.surprises:
        text = f"{surprise.check}: {surprise.found}, expected {surprise.expected}. {surprise.reason}"
        alike.setdefault(text, []).append(surprise.run)
    for text, runs in alike.items():
        yield from paragraph(f"{named(runs)}, {text}", 2, paint.width)


def _next_steps(sweep: Sweep, paint: Painter) -> Iterator[str]:
    steps = sweep.index["design"]["next_steps"]
    if steps:
        yield ""
        yield paint("bold", "Next")
        yield from (f"  {step}" for step in steps)
