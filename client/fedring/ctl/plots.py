"""Plots of experiments: direct labels, no chart junk, colours that colour-blind people tell apart (Okabe and Ito)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedring.ctl.output import size

BLUE, ORANGE, GREY, INK = "#0072B2", "#E69F00", "#B8BDC4", "#24292F"
_DPI = 160


@dataclass(frozen=True, slots=True)
class Bars:
    """A bar chart: one bar a name."""

    title: str
    file: str  # of its own PNG
    names: Sequence[str]
    values: Sequence[float]
    labels: Sequence[str]
    reference: tuple[float, str] | None = None  # a line across, and what it is
    low: float = 0.0  # where the axis begins


def plot_rounds(report: Mapping[str, Any], path: Path) -> None:
    """`path` shows accuracy and bytes per client, round by round."""
    rounds = report["rounds"]
    figure = Figure(figsize=(9, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    _plot_accuracy(above, [row["round"] for row in rounds], [row["accuracy"] for row in rounds])
    _plot_bytes(below, rounds)
    figure.savefig(path, dpi=_DPI)


def plot_bars(charts: Sequence[Bars], directory: Path, together: str) -> None:
    """Each chart has a PNG of its own in `directory`, and `together` shows them all."""
    for chart in charts:
        figure = Figure(figsize=(6.4, 4), layout="constrained")
        _draw_bars(figure.subplots(), chart)
        figure.savefig(directory / chart.file, dpi=_DPI)
    figure = Figure(figsize=(12.8, 4 * ((len(charts) + 1) // 2)), layout="constrained")
    panels = figure.subplots((len(charts) + 1) // 2, 2, squeeze=False).flat
    for panel, chart in zip(panels, charts, strict=False):
        _draw_bars(panel, chart)
    figure.savefig(directory / together, dpi=_DPI)


def _plot_accuracy(axes: Axes, rounds: Sequence[int], accuracies: Sequence[float | None]) -> None:
    known = [(n, 100 * accuracy) for n, accuracy in zip(rounds, accuracies, strict=True) if accuracy is not None]
    if known:
        axes.plot(*zip(*known, strict=True), color=BLUE, linewidth=2, marker="o", markersize=5)
        last, value = known[-1]
        axes.annotate(f"{value:.1f} %", (last, value), (8, 0), textcoords="offset points", va="center", color=BLUE)
    _title(axes, "Accuracy on the clients' held-out samples, %")
    axes.grid(axis="y", color=GREY, alpha=0.4, linewidth=0.6)
    axes.margins(x=0.06)


def _plot_bytes(axes: Axes, rounds: Sequence[Mapping[str, Any]]) -> None:
    width = 0.38
    for key, label, colour, shift in (
        ("download_bytes", "download", GREY, -width / 2),
        ("upload_bytes", "upload", ORANGE, width / 2),
    ):
        places = [row["round"] + shift for row in rounds]
        bars = axes.bar(places, [row[key] for row in rounds], width, color=colour, label=label)
        if len(rounds) <= 12:
            axes.bar_label(bars, [size(row[key]) for row in rounds], fontsize=6.5, color=INK, padding=1)
    _title(axes, "Bytes per client")
    axes.set_xlabel("round", color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(lambda value, _: size(value))
    axes.legend(frameon=False, ncols=2, loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.2)


def _draw_bars(axes: Axes, chart: Bars) -> None:
    bars = axes.bar(chart.names, chart.values, 0.62, color=BLUE)
    axes.bar_label(bars, chart.labels, fontsize=9, color=INK, padding=2)
    highs: list[float] = [*chart.values, chart.reference[0] if chart.reference else chart.low]
    axes.set_ylim(chart.low, chart.low + 1.15 * max(max(highs) - chart.low, 1e-9))
    if chart.reference:
        value, label = chart.reference
        axes.axhline(value, color=ORANGE, linewidth=1.5, linestyle="--")
        axes.annotate(label, (1, value), (0, 4), xycoords=("axes fraction", "data"), textcoords="offset points",
                      ha="right", fontsize=9, color=INK)  # fmt: skip
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    _title(axes, chart.title)


def _title(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=11, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK, labelsize=9)
