"""Charts as PNG files: a job's rounds, and bars with deviations.

The colours are those of Okabe and Ito (2008), which colour-blind people can tell apart; each series also has a marker
or a hatch of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedring.ctl.output import size

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000")
BLUE, ORANGE, GREY, INK = "#0072B2", "#E69F00", "#B8BDC4", "#24292F"
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
ERRORS: Mapping[str, Any] = {"ecolor": INK, "capsize": 3, "elinewidth": 1}
_HATCHES = ("", "//", "..", "xx", "\\\\", "++", "oo")
_NAMES_IN_A_ROW = 4  # of a legend
_DPI = 160


def plot_rounds(report: Mapping[str, Any], path: Path) -> None:
    """Draw the accuracy and bytes of `report`'s rounds into `path`.

    The bytes are per client. The file is a PNG. The loss takes the place of the accuracy where that is not defined.
    """
    rounds = report["rounds"]
    figure = _make_figure(9, 6)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    numbers, classified = [row["round"] for row in rounds], any(row["accuracy"] is not None for row in rounds)
    if classified or all(row["loss"] is None for row in rounds):
        shares = [None if row["accuracy"] is None else 100 * row["accuracy"] for row in rounds]
        _plot_curve(above, numbers, shares, "{:.1f} %")
        _set_title(above, "Accuracy on the clients' held-out samples, %")
    else:
        _plot_curve(above, numbers, [row["loss"] for row in rounds], "{:.3f}")
        _set_title(above, "Mean loss over the clients' held-out samples")
    _plot_bytes(below, rounds)
    figure.savefig(path, dpi=_DPI)


def plot_over_time(reports: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Draw accuracies of simulations over their virtual time.

    The file is a PNG. The loss takes the place of the accuracy where no report has one.

    Args:
        reports: by name, each of a simulation with a timing.
        path: of the file.
    """
    figure = _make_figure(9, 5)
    axes = figure.subplots()
    classified = any(row["accuracy"] is not None for report in reports.values() for row in report["rounds"])
    key, scale = ("accuracy", 100) if classified else ("loss", 1)
    for number, (name, report) in enumerate(reports.items()):
        known = [row for row in report["rounds"] if row[key] is not None]
        style: dict[str, Any] = {
            "color": COLOURS[number % len(COLOURS)],
            "marker": MARKERS[number % len(MARKERS)],
            "markersize": 5,
        }
        times = [row["virtual"]["ended"] for row in known]
        axes.plot(times, [scale * row[key] for row in known], label=name, linewidth=2, **style)
    axes.set_xlabel("virtual seconds", color=INK)
    title = "Accuracy on the clients' held-out samples" if classified else "Loss over the clients' held-out samples"
    finish(axes, title, "%" if classified else "", reference=None, legend=len(reports) > 1)
    figure.savefig(path, dpi=_DPI)


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
    _set_title(axes, "Bytes per client")
    axes.set_xlabel("round", color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(lambda value, _: size(value))
    axes.legend(frameon=False, ncols=2, loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.2)


class Panel(Protocol):
    """A chart that can be drawn beside others."""

    def draw(self, axes: Axes) -> None:
        """Draw the chart into these axes."""


def plot_panels(panels: Sequence[Panel], path: Path, *, columns: int = 2, width: float = 6.6) -> None:
    """Write the PNG `path` with all charts as panels.

    `columns` charts stand side by side, each `width` inches wide.
    """
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    figure = _make_figure(width * columns, 4.2 * rows)
    places = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, panel in zip(places, panels, strict=False):
        panel.draw(axes)
    for axes in places[len(panels) :]:
        axes.remove()
    figure.savefig(path, dpi=_DPI)


@dataclass(frozen=True, slots=True)
class Series:
    """Values of one kind, in a chart's order.

    The order is that of the chart's names; a curve is over `xs`.
    """

    name: str
    values: Sequence[float]
    deviations: Sequence[float] | None = None  # standard deviations
    xs: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Bars:
    """A chart with one bar for each name and series.

    It has points instead if the axis of values does not begin at 0.
    """

    title: str
    unit: str  # the label of the axis of values
    names: Sequence[str]
    series: Sequence[Series]
    label: Callable[[float], str]  # the text at each bar
    reference: tuple[float, str] | None = None  # value and label of a horizontal line
    low: float = 0.0  # where the axis of values begins
    log: bool = False
    annotated: bool = True  # whether each bar has its label; narrow bars leave no room for them

    def draw(self, axes: Axes) -> None:
        """Draw the chart into these axes."""
        places = range(len(self.names))
        count = len(self.series)
        width = 0.8 / count if count > 1 else 0.62
        highest = self.low
        font = 9.0 if count == 1 else 7.5 if len(self.names) < 8 else 6.0
        for number, series in enumerate(self.series):
            xs = [place + (number - (count - 1) / 2) * width for place in places]
            tops = [v + d for v, d in zip(series.values, series.deviations or [0.0] * len(xs), strict=True)]
            highest = max(highest, *tops)
            style: dict[str, Any] = {"color": COLOURS[number], "label": series.name if count > 1 else "_"}
            if self.low:  # the length of a bar would mislead where the axis does not begin at 0: draw points
                points: dict[str, Any] = {"fmt": MARKERS[number], "markersize": 8, **ERRORS}
                axes.errorbar(xs, series.values, series.deviations, **style, **points)
            else:
                hatch: dict[str, Any] = {"hatch": _HATCHES[number], "edgecolor": "white", "linewidth": 0}
                axes.bar(xs, series.values, 0.94 * width, yerr=series.deviations, error_kw=ERRORS, **style, **hatch)
            for x, top, value in zip(xs, tops, series.values, strict=True) if self.annotated else ():
                _annotate(axes, self.label(value), x, top, above=9 if self.low else 3, points=font)
        self._set_range(axes, highest)
        axes.set_xticks(places, self.names)
        axes.set_xlim(-0.6, len(self.names) - 0.4)
        axes.yaxis.set_major_formatter(lambda value, _: self.label(value))
        axes.set_axisbelow(True)
        finish(axes, self.title, self.unit, reference=self.reference, legend=count > 1)

    def _set_range(self, axes: Axes, highest: float) -> None:
        top = max(highest, self.reference[0] if self.reference else self.low)
        if self.log:
            axes.set_yscale("log")
            low, high = axes.get_ylim()
            axes.set_ylim(low / 2, 3 * high)
        else:
            axes.set_ylim(self.low, self.low + 1.18 * max(top - self.low, 1e-9))


def finish(axes: Axes, title: str, unit: str, *, reference: tuple[float, str] | None, legend: bool) -> None:
    """Write a panel's title, unit, line of reference and legend.

    The legend stands between the title and the chart, where it covers nothing.
    """
    if reference:
        value, label = reference
        axes.axhline(value, color=COLOURS[4], linewidth=1.5, linestyle="--", label=label, zorder=1)
    axes.set_ylabel(unit, color=INK, fontsize=9)
    axes.grid(axis="y", color=GREY, alpha=0.4, linewidth=0.6)
    _set_title(axes, title)
    if legend or reference:
        rows = -(-len(axes.get_legend_handles_labels()[1]) // _NAMES_IN_A_ROW)
        axes.set_title(title, loc="left", fontsize=11, color=INK, pad=12 + 14 * rows)
        place: Any = {"loc": "lower left", "bbox_to_anchor": (-0.02, 0.99)}
        axes.legend(frameon=False, fontsize=8.5, ncols=_NAMES_IN_A_ROW, labelcolor=INK, columnspacing=1.2, **place)


def _annotate(axes: Axes, text: str, x: float, y: float, *, above: float, points: float) -> None:
    """Write a text above a bar or a point.

    It has a white ground, so that no line crosses it.
    """
    ground = {"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85}
    place: Any = {"textcoords": "offset points", "ha": "center", "va": "bottom"}
    axes.annotate(text, (x, y), (0, above), fontsize=points, color=INK, bbox=ground, zorder=5, **place)


def _make_figure(width: float, height: float) -> Figure:
    """Return an empty figure of that size in inches."""
    figure = Figure(figsize=(width, height))
    figure.set_layout_engine("constrained", w_pad=0.2, h_pad=0.15)
    return figure


def _set_title(axes: Axes, text: str) -> None:
    """Write the title, and style the axes like all charts'."""
    axes.set_title(text, loc="left", fontsize=11, color=INK, pad=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK, labelsize=9)
