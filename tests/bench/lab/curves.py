"""Charts of series over a numeric axis, to stand beside the product's bars."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter

from fedring.ctl.local.charts import COLOURS, ERRORS, INK, MARKERS, Series, finish

_LINES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)), (0, (3, 1, 1, 1)))


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
    reference: tuple[float, str] | None = None  # value and label of a horizontal line

    def draw(self, axes: Axes) -> None:
        """Draw the chart into these axes."""
        for number, series in enumerate(self.series):
            axes.errorbar(
                series.xs,
                series.values,
                series.deviations,
                color=COLOURS[number],
                marker="" if len(series.values) > 30 else MARKERS[number],
                linestyle=_LINES[number],
                linewidth=1.8,
                markersize=6,
                label=series.name,
                **ERRORS,
            )
        if self.log_x:
            axes.set_xscale("log")
        if self.log_y:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter(NullFormatter())
        else:
            axes.set_ylim(bottom=0.0)
        if self.ticks:
            axes.set_xticks(self.ticks, [self.tick_label(tick) for tick in self.ticks])
            axes.xaxis.minorticks_off()
        axes.set_xlabel(self.x_label, color=INK, fontsize=9)
        finish(axes, self.title, self.y_label, reference=self.reference, legend=len(self.series) > 1)
        if len(self.ticks) > 7:
            axes.tick_params(axis="x", labelsize=7.5)
