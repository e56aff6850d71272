"""Charts of measurements: bars and curves with deviations, in one PNG.

The colours are those of Okabe and Ito (2008), which colour-blind people can tell apart; each series also has a marker,
a line style or a hatch of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000")
BLUE, ORANGE, GREY, INK = "#0072B2", "#E69F00", "#B8BDC4", "#24292F"
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_LINES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)), (0, (3, 1, 1, 1)))
_HATCHES = ("", "//", "..", "xx", "\\\\", "++", "oo")
_DPI = 160
_ERRORS: dict[str, Any] = {"ecolor": INK, "capsize": 3, "elinewidth": 1}


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


@dataclass(frozen=True, slots=True)
class Curves:
    """A chart of series over a numeric axis."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    log_x: bool = False
    log_y: bool = False
    ticks: Sequence[float] = ()  # of the horizontal axis; empty = where matplotlib puts them
    tick_label: Callable[[float], str] = "{:g}".format
    low: float | None = 0.0  # where the vertical axis begins; None = where the values do
    reference: tuple[float, str] | None = None  # value and label of a horizontal line


def plot_panels(panels: Sequence[Bars | Curves], path: Path, *, columns: int = 2, width: float = 6.6) -> None:
    """Write the PNG `path` with all charts as panels.

    `columns` charts stand side by side, each `width` inches wide.
    """
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    figure = make_figure(width * columns, 4.2 * rows)
    places = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, panel in zip(places, panels, strict=False):
        if isinstance(panel, Bars):
            _draw_bars(axes, panel)
        else:
            _draw_curves(axes, panel)
    for axes in places[len(panels) :]:
        axes.remove()
    save(figure, path)


def make_figure(width: float, height: float) -> Figure:
    """Return an empty figure of that size in inches."""
    figure = Figure(figsize=(width, height))
    figure.set_layout_engine("constrained", w_pad=0.2, h_pad=0.15)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write the figure as a PNG."""
    figure.savefig(path, dpi=_DPI)


def set_title(axes: Axes, text: str) -> None:
    """Write the title, and style the axes like all charts'."""
    axes.set_title(text, loc="left", fontsize=11, color=INK, pad=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK, labelsize=9)


def _draw_bars(axes: Axes, chart: Bars) -> None:
    places = range(len(chart.names))
    count = len(chart.series)
    width = 0.8 / count if count > 1 else 0.62
    highest = chart.low
    font = 9.0 if count == 1 else 7.5 if len(chart.names) < 8 else 6.0
    for number, series in enumerate(chart.series):
        xs = [place + (number - (count - 1) / 2) * width for place in places]
        tops = [v + d for v, d in zip(series.values, series.deviations or [0.0] * len(xs), strict=True)]
        highest = max(highest, *tops)
        style: dict[str, Any] = {"color": COLOURS[number], "label": series.name if count > 1 else "_"}
        if chart.low:  # the length of a bar would mislead where the axis does not begin at 0: draw points
            points: dict[str, Any] = {"fmt": _MARKERS[number], "markersize": 8, **_ERRORS}
            axes.errorbar(xs, series.values, series.deviations, **style, **points)
        else:
            hatch: dict[str, Any] = {"hatch": _HATCHES[number], "edgecolor": "white", "linewidth": 0}
            axes.bar(xs, series.values, 0.94 * width, yerr=series.deviations, error_kw=_ERRORS, **style, **hatch)
        for x, top, value in zip(xs, tops, series.values, strict=True) if chart.annotated else ():
            _annotate(axes, chart.label(value), x, top, above=9 if chart.low else 3, points=font)
    _set_range(axes, chart, highest)
    if chart.reference:
        _draw_reference(axes, *chart.reference)
    axes.set_xticks(places, chart.names)
    axes.set_xlim(-0.6, len(chart.names) - 0.4)
    axes.yaxis.set_major_formatter(lambda value, _: chart.label(value))
    axes.set_ylabel(chart.unit, color=INK, fontsize=9)
    axes.grid(axis="y", color=GREY, alpha=0.4, linewidth=0.6)
    axes.set_axisbelow(True)
    _finish(axes, chart.title, legend=count > 1 or chart.reference is not None)


def _set_range(axes: Axes, chart: Bars, highest: float) -> None:
    top = max(highest, chart.reference[0] if chart.reference else chart.low)
    if chart.log:
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        axes.set_ylim(low / 2, 3 * high)
    else:
        axes.set_ylim(chart.low, chart.low + 1.18 * max(top - chart.low, 1e-9))


def _draw_curves(axes: Axes, chart: Curves) -> None:
    for number, series in enumerate(chart.series):
        many = len(series.values) > 30
        axes.errorbar(
            series.xs,
            series.values,
            series.deviations,
            color=COLOURS[number],
            marker="" if many else _MARKERS[number],
            linestyle=_LINES[number],
            linewidth=1.8,
            markersize=6,
            label=series.name,
            **_ERRORS,
        )
    if chart.log_x:
        axes.set_xscale("log")
    if chart.log_y:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    elif chart.low is not None:
        axes.set_ylim(bottom=chart.low)
    if chart.ticks:
        axes.set_xticks(chart.ticks, [chart.tick_label(tick) for tick in chart.ticks])
        axes.xaxis.minorticks_off()
    if chart.reference:
        _draw_reference(axes, *chart.reference)
    axes.set_xlabel(chart.x_label, color=INK, fontsize=9)
    axes.set_ylabel(chart.y_label, color=INK, fontsize=9)
    axes.grid(axis="y", color=GREY, alpha=0.4, linewidth=0.6)
    _finish(axes, chart.title, legend=len(chart.series) > 1 or chart.reference is not None)
    if len(chart.ticks) > 7:
        axes.tick_params(axis="x", labelsize=7.5)


def _annotate(axes: Axes, text: str, x: float, y: float, *, above: float, points: float) -> None:
    """Write a text above a bar or a point.

    It has a white ground, so that no line crosses it.
    """
    ground = {"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85}
    place: Any = {"textcoords": "offset points", "ha": "center", "va": "bottom"}
    axes.annotate(text, (x, y), (0, above), fontsize=points, color=INK, bbox=ground, zorder=5, **place)


def _draw_reference(axes: Axes, value: float, label: str) -> None:
    axes.axhline(value, color=COLOURS[4], linewidth=1.5, linestyle="--", label=label, zorder=1)


def _finish(axes: Axes, title: str, *, legend: bool) -> None:
    """Write the title, and the legend between it and the chart.

    There the legend covers nothing.
    """
    set_title(axes, title)
    if legend:
        axes.set_title(title, loc="left", fontsize=11, color=INK, pad=26)
        place: Any = {"loc": "lower left", "bbox_to_anchor": (-0.02, 0.99)}
        axes.legend(frameon=False, fontsize=8.5, ncols=4, labelcolor=INK, columnspacing=1.2, **place)
