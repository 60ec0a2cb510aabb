"""One picture of a sweep: accuracy; the sampler's lag beside the clip; which batch each update trains on.

A row of panels for each staleness setting (refresh interval and replay age) of the sweep, at most four.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from pth_exp.records.reader import RunRecords, Sweep
from pth_exp.report.summary import cell

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

MOST_ROWS = 4

# Okabe and Ito's palette, distinguishable with any common colour vision
ARM_COLOURS = {"grpo": "#D55E00", "ppo_clip": "#CC79A7", "tis_ppo": "#009E73", "tis_reinforce": "#E69F00", "san": "#0072B2"}
OTHER_COLOURS = ("#56B4E9", "#117733", "#882255", "#332288", "#999933")
DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "axes.titlepad": 8,
}


def draw(sweep: Sweep, path: Path) -> bool:
    """Writes the picture as PNG; False, and no file, when no run has recorded an update."""
    settings: dict[tuple[int, int], list[RunRecords]] = {}
    for run in sweep.runs:
        if run.updates:
            settings.setdefault((run.config["refresh_interval"], run.config["replay_age"]), []).append(run)
    if not settings:
        return False
    rows = list(settings.items())[:MOST_ROWS]
    replicate = sweep.index["design"]["replicate"]
    with plt.rc_context(STYLE):
        figure = plt.figure(figsize=(13.5, 3.9 * len(rows) + 0.4), layout="constrained")
        figure.suptitle(f"{sweep.index['name']}  ·  {sweep.index['sweep']}", x=0.01, ha="left", fontsize=9, color="#666666")
        for part, (setting, runs) in zip(_parts(figure, len(rows)), rows, strict=True):
            _row(part, setting, runs, replicate)
        temporary = path.with_name(f".{path.name}.tmp")
        figure.savefig(temporary, dpi=150, format="png")
        plt.close(figure)
    temporary.replace(path)
    return True


def _parts(figure: Any, count: int) -> Sequence[SubFigure]:
    parts = figure.subfigures(count, 1, squeeze=False, hspace=0.04)
    return [row[0] for row in parts]


def _row(figure: SubFigure, setting: tuple[int, int], runs: Sequence[RunRecords], replicate: Sequence[str]) -> None:
    interval, age = setting
    names = [f"sampler refreshed every {interval} updates"] if interval > 1 else []
    names += [f"replay age {age}"] if age else []
    figure.suptitle(", ".join(names) or "sampler never lags", x=0.01, ha="left", fontsize=11, fontweight="bold")
    grid = figure.add_gridspec(2, 3, height_ratios=(3, 1.15), width_ratios=(1, 1, 1))
    accuracy, kl = figure.add_subplot(grid[:, 0]), figure.add_subplot(grid[0, 1])
    clip, batch = figure.add_subplot(grid[1, 1], sharex=kl), figure.add_subplot(grid[:, 2])
    looks = _looks(runs, replicate)
    for run in runs:
        colour, dash = looks[cell(run, replicate)]
        style = {"color": colour, "linestyle": dash, "linewidth": 1.6, "alpha": 0.9}
        _line(accuracy, [(row["update"], row.get("accuracy")) for row in run.evaluations], **style, marker="o", markersize=2.8)
        updates = [row["update"] for row in run.updates]
        # an estimate from samples may fall below 0 where the KL is near 0; a log scale has no place for it, so the line breaks
        _line(
            kl,
            [(u, k if k is None or k > 0 else nan) for u, k in zip(updates, run.column("rollout_corr/kl"), strict=True)],
            **style,
        )
        _line(clip, list(zip(updates, run.column("actor/pg_clipfrac"), strict=True)), **style)
    _finish_accuracy(accuracy, runs, interval)
    _finish_lag(kl, clip, max((c for run in runs for c in run.column("actor/pg_clipfrac") if c is not None), default=0.0))
    _batches(batch, runs, replicate, looks)
    end = max(run.config["updates"] for run in runs)
    for axes in (accuracy, kl, batch):
        axes.set_xlim(-0.03 * end, 1.03 * end)
    handles = [Line2D([], [], color=c, linestyle=d, linewidth=1.8, label=name) for name, (c, d) in looks.items()]
    figure.legend(handles=handles, loc="outside lower left", ncols=min(len(handles), 6))


def _looks(runs: Sequence[RunRecords], replicate: Sequence[str]) -> dict[str, tuple[str, Any]]:
    """Colour by arm, dashes by whatever else tells cells of one arm apart."""
    others = cycle(OTHER_COLOURS)
    colours: dict[str, str] = {}
    seen: dict[str, int] = {}
    looks: dict[str, tuple[str, Any]] = {}
    for run in runs:
        name, arm = cell(run, replicate), run.config["arm"]["name"]
        if name not in looks:
            if arm not in colours:
                colours[arm] = ARM_COLOURS.get(arm) or next(others)
            looks[name] = colours[arm], DASHES[seen.get(arm, 0) % len(DASHES)]
            seen[arm] = seen.get(arm, 0) + 1
    return looks


def _line(axes: Axes, points: Sequence[tuple[int, float | None]], **style: Any) -> None:
    measured = [(x, y) for x, y in points if y is not None]
    if measured:
        axes.plot(*zip(*measured, strict=True), **style)


def _finish_accuracy(axes: Axes, runs: Sequence[RunRecords], interval: int) -> None:
    axes.set_title("Greedy accuracy")
    axes.set_xlabel("updates")
    axes.set_ylim(bottom=0)
    end = max(run.config["updates"] for run in runs)
    if 1 < interval < end and end / interval <= 12:
        for update in range(interval, end, interval):
            axes.axvline(update, color="#777777", linestyle=":", linewidth=1)
        look: Any = {"ha": "right", "va": "bottom", "rotation": 90, "fontsize": 8, "color": "#777777"}
        axes.annotate("refresh", (interval, 0.03), xycoords=("data", "axes fraction"), **look)
    if not axes.lines:
        _nothing(axes, "no validation recorded")


def _finish_lag(kl: Axes, clip: Axes, top: float) -> None:
    kl.set_title("KL from sampler to learner, and the clip")
    kl.set_ylabel("nats per token")
    kl.tick_params(labelbottom=False)
    if kl.lines:
        kl.set_yscale("log")
    else:
        _nothing(kl, "no KL above 0 recorded")
    clip.set_xlabel("update")
    clip.set_ylabel("clip fraction")
    clip.set_ylim(-0.12 * max(top, 0.05), 1.15 * max(top, 0.05))
    clip.yaxis.set_major_locator(MaxNLocator(3))
    if clip.lines and top == 0:
        clip.annotate("exactly 0 on every update", (0.02, 0.9), xycoords="axes fraction", va="top", fontsize=8, color="#555555")
    if not clip.lines:
        _nothing(clip, "these arms do not clip")


def _batches(axes: Axes, runs: Sequence[RunRecords], replicate: Sequence[str], looks: dict[str, tuple[str, Any]]) -> None:
    """One line for all runs that trained on the same batch numbers."""
    axes.set_title("Batch that each update trains on")
    axes.set_xlabel("update")
    axes.set_ylabel("index of the batch, in drawn order")
    paths: dict[tuple[tuple[int, int], ...], list[RunRecords]] = {}
    for run in runs:
        points = tuple((row["update"], row["draw"]) for row in run.batches if row.get("draw") is not None)
        if points:
            paths.setdefault(points, []).append(run)
    longest: dict[str, tuple[tuple[tuple[int, int], ...], list[RunRecords]]] = {}
    for points, sharing in paths.items():
        queue = sharing[0].config["queue"]
        if queue not in longest or len(points) > len(longest[queue][0]):
            longest[queue] = points, sharing
    for queue, (points, sharing) in longest.items():
        distinct = len({row["batch_id"] for row in sharing[0].batches if row.get("batch_id")})
        colours = {looks[cell(run, replicate)][0] for run in sharing}
        axes.plot(
            *zip(*points, strict=True),
            color=colours.pop() if len(colours) == 1 else "#333333",
            linestyle=DASHES[1] if queue == "warmup" else "-",
            linewidth=1.8,
            label=f"{queue}: {distinct} of {len(points)} distinct",
        )
    if paths:
        axes.legend(loc="upper left")
    else:
        _nothing(axes, "no batches recorded")


def _nothing(axes: Axes, text: str) -> None:
    axes.annotate(text, (0.5, 0.5), xycoords="axes fraction", ha="center", va="center", color="#777777")
