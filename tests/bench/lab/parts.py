"""The parts of a benchmark, and the header of its results.

The parts are measured one after the other.
"""

import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Annotated, Any

import typer

from fedring.ctl.local.progress import progress_bar
from fedring.ctl.local.ranks import Advance
from fedring.ctl.output import duration, percent
from fedring.version import VERSION

QuickOption = Annotated[
    bool, typer.Option("--quick", help="Measure less, in at most two minutes, to see what the figures look like.")
]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a benchmark."""

    label: str
    cost: float  # seconds on an idle machine with two cores, roughly: the progress bar uses it, and nothing else
    measure: Callable[[Advance], Any]  # takes a function that is called with the share that is done, from 0 to 1


def run_parts(bench: str, parts: Mapping[str, Part]) -> dict[str, Any]:
    """Measure all parts, and return their results under their names.

    A bar on stderr shows the time left; if stderr is no terminal, each part writes a line there when it has ended.
    """
    results: dict[str, Any] = {}
    with progress_bar(speed_seconds=600) as progress:
        task = progress.add_task(bench, total=sum(part.cost for part in parts.values()))
        before = 0.0
        for name, part in parts.items():
            progress.update(task, description=f"{bench}: {part.label}")
            began = time.perf_counter()

            def advance(share: float, before: float = before, cost: float = part.cost) -> None:
                progress.update(task, completed=before + cost * share)

            results[name] = part.measure(advance)
            before += part.cost
            progress.update(task, completed=before)
            if progress.disable:
                progress.console.print(f"{bench}: {part.label}: {duration(time.perf_counter() - began)}")
    return results


def with_deviation(row: Mapping[str, Any]) -> str:
    """Return a mean accuracy with its standard deviation over the seeds."""
    return f"{percent(row['accuracy'])} ± {100 * row['accuracy_deviation']:.2f}"


def describe_run(bench: str, *, quick: bool, chosen: bool = False) -> dict[str, Any]:
    """Return the header of a file of results.

    It has the benchmark, its scale, and the machine and its load.

    Args:
        bench: The benchmark.
        quick: Whether it measures less.
        chosen: Whether options say how much it measures.
    """
    return {
        "bench": bench,
        "scale": "chosen" if chosen else "quick" if quick else "full",
        "machine": {
            "processors": os.cpu_count(),
            "load_average": round(os.getloadavg()[0], 2),
            "python": platform.python_version(),
            "torch": version("torch"),
            "fedring": VERSION,
        },
    }
