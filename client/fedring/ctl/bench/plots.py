"""The plot of a job's rounds."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from fedring.ctl.bench.charts import BLUE, GREY, INK, ORANGE, make_figure, save, set_title
from fedring.ctl.output import size


def plot_rounds(report: Mapping[str, Any], path: Path) -> None:
    """Draw the accuracy and bytes of `report`'s rounds into `path`.

    The bytes are per client. The file is a PNG. The loss takes the place of the accuracy where that is not defined.
    """
    rounds = report["rounds"]
    figure = make_figure(9, 6)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    numbers, classified = [row["round"] for row in rounds], any(row["accuracy"] is not None for row in rounds)
    if classified or all(row["loss"] is None for row in rounds):
        _plot_accuracy(above, numbers, [row["accuracy"] for row in rounds])
    else:
        _plot_loss(above, numbers, [row["loss"] for row in rounds])
    _plot_bytes(below, rounds)
    save(figure, path)


def _plot_accuracy(axes: Axes, rounds: Sequence[int], accuracies: Sequence[float | None]) -> None:
    shares = [None if accuracy is None else 100 * accuracy for accuracy in accuracies]
    _plot_curve(axes, rounds, shares, "{:.1f} %")
    set_title(axes, "Accuracy on the clients' held-out samples, %")


def _plot_loss(axes: Axes, rounds: Sequence[int], losses: Sequence[float | None]) -> None:
    _plot_curve(axes, rounds, losses, "{:.3f}")
    set_title(axes, "Mean loss over the clients' held-out samples")


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
    set_title(axes, "Bytes per client")
    axes.set_xlabel("round", color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(lambda value, _: size(value))
    axes.legend(frameon=False, ncols=2, loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.2)
