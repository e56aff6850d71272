"""Plots of experiments, labelled directly, in colours that colour-blind people can tell apart (Okabe and Ito 2008)."""

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
    """A chart with one bar for each name, or one point if the axis of values does not begin at 0."""

    title: str
    file: str  # name of the PNG that shows this chart alone
    names: Sequence[str]
    values: Sequence[float]
    labels: Sequence[str]
    reference: tuple[float, str] | None = None  # value and label of a horizontal line
    low: float = 0.0  # where the axis of values begins


def plot_rounds(report: Mapping[str, Any], path: Path) -> None:
    """Draw accuracy and bytes per client over the rounds of `report`, and write the PNG `path`.

    The loss takes the place of the accuracy where that is not defined.
    """
    rounds = report["rounds"]
    figure = _figure(9, 6)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    numbers, classified = [row["round"] for row in rounds], any(row["accuracy"] is not None for row in rounds)
    if classified or all(row["loss"] is None for row in rounds):
        _plot_accuracy(above, numbers, [row["accuracy"] for row in rounds])
    else:
        _plot_loss(above, numbers, [row["loss"] for row in rounds])
    _plot_bytes(below, rounds)
    figure.savefig(path, dpi=_DPI)


def plot_bars(charts: Sequence[Bars], directory: Path, together: str) -> None:
    """Write a PNG for each chart into `directory`, and one named `together` that shows all of them."""
    for chart in charts:
        figure = _figure(6.4, 4)
        _draw(figure.subplots(), chart)
        figure.savefig(directory / chart.file, dpi=_DPI)
    rows = (len(charts) + 1) // 2
    figure = _figure(12.8, 4 * rows)
    for panel, chart in zip(figure.subplots(rows, 2, squeeze=False).flat, charts, strict=False):
        _draw(panel, chart)
    figure.savefig(directory / together, dpi=_DPI)


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height))
    figure.set_layout_engine("constrained", w_pad=0.2, h_pad=0.15)
    return figure


def _plot_accuracy(axes: Axes, rounds: Sequence[int], accuracies: Sequence[float | None]) -> None:
    shares = [None if accuracy is None else 100 * accuracy for accuracy in accuracies]
    _plot_curve(axes, rounds, shares, "{:.1f} %")
    _title(axes, "Accuracy on the clients' held-out samples, %")


def _plot_loss(axes: Axes, rounds: Sequence[int], losses: Sequence[float | None]) -> None:
    _plot_curve(axes, rounds, losses, "{:.3f}")
    _title(axes, "Mean loss over the clients' held-out samples")


def _plot_curve(axes: Axes, rounds: Sequence[int], values: Sequence[float | None], label: str) -> None:
    known = [(number, value) for number, value in zip(rounds, values, strict=True) if value is not None]
    if known:
        axes.plot(*zip(*known, strict=True), color=BLUE, linewidth=2, marker="o", markersize=5)
        last, value = known[-1]
        text = label.format(value)
        axes.annotate(text, (last, value), (8, 0), textcoords="offset points", va="center", color=BLUE)
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
        labels = [*[""] * (len(rounds) - 1), *[size(row[key]) for row in rounds[-1:]]]
        axes.bar_label(bars, labels, fontsize=8, color=INK, padding=2)
    _title(axes, "Bytes per client")
    axes.set_xlabel("round", color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(lambda value, _: size(value))
    axes.legend(frameon=False, ncols=2, loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.2)


def _draw(axes: Axes, chart: Bars) -> None:
    highs: list[float] = [*chart.values, chart.reference[0] if chart.reference else chart.low]
    top = chart.low + 1.15 * max(max(highs) - chart.low, 1e-9)
    if chart.low:  # the length of a bar would mislead where the axis does not begin at 0: draw points
        axes.plot(chart.names, chart.values, "o", color=BLUE, markersize=9)
        axes.margins(x=0.15)
        axes.grid(axis="y", color=GREY, alpha=0.4, linewidth=0.6)
    else:
        axes.bar(chart.names, chart.values, 0.62, color=BLUE)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
    axes.set_ylim(chart.low, top)
    for name, value, label in zip(chart.names, chart.values, chart.labels, strict=True):
        place = (0, 8 if chart.low else 3)
        axes.annotate(label, (name, value), place, textcoords="offset points", ha="center", fontsize=9, color=INK)
    if chart.reference:
        _draw_reference(axes, *chart.reference)
    _title(axes, chart.title)


def _draw_reference(axes: Axes, value: float, label: str) -> None:
    axes.axhline(value, color=ORANGE, linewidth=1.5, linestyle="--")
    place: Any = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
    axes.annotate(label, (1, value), (0, 4), ha="right", fontsize=9, color=INK, **place)


def _title(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=11, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK, labelsize=9)
