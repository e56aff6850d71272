"""The DistributedDataParallel paper's measurements.

The ring and Gloo are measured side by side. Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data
Parallel Training", figures 2 and 7 to 10.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, pstdev
from typing import Annotated, Any

import typer

from fedring.ctl.local.charts import Panel, Series, plot_panels
from fedring.ctl.local.ranks import Advance, Host, run_ranks
from fedring.ctl.local.runner import present, unique_names
from fedring.ctl.options import OutputOption, make_out_folder
from fedring.ctl.output import Output, duration, print_table
from fedring.daemon.wording import counted
from tests.bench.lab.command import Command
from tests.bench.lab.curves import Curves
from tests.bench.lab.networks import UNSHAPED, check_rate, network
from tests.bench.lab.parts import Part, QuickOption, describe_run, run_parts, with_deviation

_TASKS = "tests.bench.ddp_steps"
_BACKENDS = ("gloo", "fedring")


@dataclass(frozen=True, slots=True)
class DdpScale:
    """How much is measured."""

    total: int = 60_000_000  # float32 values that are all-reduced
    pieces: tuple[int, ...] = (1_000, 10_000, 100_000, 500_000, 1_000_000, 5_000_000, 20_000_000, 60_000_000)
    model: str = "torchvision:resnet18"  # of the backward pass, the bucket sizes and no_sync
    shape: tuple[int, ...] = (16, 3, 64, 64)  # of its inputs
    repeats: int = 5
    buckets_mib: tuple[int, ...] = (1, 5, 10, 25, 50, 100)
    rate: str = "1gbit"  # of the lines for bucket sizes and no_sync
    every: tuple[int, ...] = (1, 2, 4, 8)  # steps between two all-reduces
    cycle: int = 8  # steps of a turn of no_sync: a multiple of each of them
    trained: str = "fedring.train.models:digits_mlp"  # of the accuracy with no_sync
    samples: str = "fedring.data:digits"  # that it trains on
    steps: int = 320  # batches of a rank in each training
    seeds: int = 3  # trainings with each number of steps between two all-reduces
    sizes: tuple[int, ...] = (100_000, 1_000_000, 5_000_000, 25_000_000)  # parameters of the models of many sizes
    sized: str = "tests.bench.lab.sized:layers"
    sized_shape: tuple[int, ...] = (16, 256)
    worlds: tuple[int, ...] = (1, 2, 4, 8)
    rates: tuple[str, ...] = ("100mbit", "1gbit")  # of the lines for 1 to 8 ranks
    small_model: str = "fedring.train.models:mnist_cnn"  # of the measurement with 1 to 8 ranks
    small_shape: tuple[int, ...] = (16, 1, 28, 28)


QUICK = DdpScale(
    total=6_000_000,
    pieces=(1_000, 10_000, 100_000, 1_000_000, 6_000_000),
    shape=(4, 3, 64, 64),
    repeats=2,
    buckets_mib=(1, 25, 100),
    every=(1, 4),
    cycle=4,
    steps=80,
    sizes=(100_000, 1_000_000, 5_000_000),
    worlds=(1, 2, 4),
    rates=("1gbit",),
)


def ddp(
    rate: Annotated[
        str,
        typer.Option(help="Rate of each rank's line in the measurements of bucket sizes, no_sync and model sizes."),
    ] = "1gbit",
    rates: Annotated[
        str,
        typer.Option(
            help="Rates of the lines in the measurement with 1 to 8 ranks, separated by commas.",
            show_default="100mbit,1gbit, with --quick 1gbit",
        ),
    ] = "",
    quick: QuickOption = False,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for ddp.json and ddp.png.")] = Path("bench-out"),
    output: OutputOption = Output.TABLE,
) -> None:
    """Measure data-parallel training with Gloo and with the ring.

    Both are measured side by side in one run. All-reduces in pieces of many sizes; when gradients are ready; bucket
    sizes; no_sync, with its accuracy; model sizes; 1 to 8 ranks. Lines with a rate need root; without root they are not
    limited, and the results say so.
    """
    scale = QUICK if quick else DdpScale()
    wanted = tuple(unique_names("--rates", rates.split(","))) if rates else scale.rates
    chosen = replace(scale, rate=check_rate("--rate", rate), rates=tuple(check_rate("--rates", one) for one in wanted))
    make_out_folder(out)
    results = describe_run("ddp", quick=quick) | measure(chosen)
    present(results, out / "ddp.json", output, plot=plot, print_results=print_tables)


def measure(scale: DdpScale) -> dict[str, Any]:
    """Measure all parts.

    Returns:
        `settings`, and for each part its `network` and its `rows`, or for `ready` the curve. A row has what was varied,
        the `seconds` of each turn, their `mean` and their standard `deviation`.
    """
    each = scale.repeats + 2  # turns, with those that only warm up
    places = [(rate, world) for rate in scale.rates for world in scale.worlds]
    parts = {
        "pieces": Part(
            "all-reduce in pieces", 2.5e-7 * scale.total * len(scale.pieces) * each, partial(_pieces, scale)
        ),
        "ready": Part("times of gradients", 5 + 0.3 * each, partial(_ready, scale)),
        "buckets": Part("sizes of buckets", 1.2 * each * (1 + len(scale.buckets_mib)), partial(_buckets, scale)),
        "no_sync": Part("no_sync", 0.8 * scale.cycle * each * len(scale.every), partial(_no_sync, scale)),
        "accuracy": Part(
            "accuracy with no_sync", 0.01 * scale.steps * scale.seeds * len(scale.every), partial(_accuracy, scale)
        ),
        "sizes": Part("sizes of models", 0.5 * each * len(scale.sizes), partial(_sizes, scale)),
    }
    for rate, world in places:
        label = f"{counted(world, 'rank')} at {rate}"
        parts[label] = Part(label, (4 + 0.4 * each) * world, partial(_world, scale, rate, world))
    measured = run_parts("ddp", parts)
    worlds = [measured.pop(f"{counted(world, 'rank')} at {rate}") for rate, world in places]
    return {"settings": asdict(scale), **measured, "scaling": [row for rows in worlds for row in rows]}


def _pieces(scale: DdpScale, advance: Advance) -> dict[str, Any]:
    settings = {"total": scale.total, "pieces": scale.pieces, "repeats": scale.repeats}
    return _on_ranks("all_reduce", settings, 2, "", advance)


def _ready(scale: DdpScale, advance: Advance) -> dict[str, Any]:
    settings = {"model": scale.model, "shape": scale.shape, "repeats": scale.repeats}
    result: dict[str, Any] = run_ranks(f"{_TASKS}:gradients_ready", settings, [Host()], advance=advance)
    return result


def _buckets(scale: DdpScale, advance: Advance) -> dict[str, Any]:
    ways = [[{"backend": name, "bucket_mib": mib} for name in _BACKENDS] for mib in scale.buckets_mib]
    return _steps(scale, [[{"backend": "noop"}], *ways], 1, advance)


def _no_sync(scale: DdpScale, advance: Advance) -> dict[str, Any]:
    ways = [[{"backend": name, "every": every} for name in _BACKENDS] for every in scale.every]
    return _steps(scale, ways, scale.cycle, advance)


def _accuracy(scale: DdpScale, advance: Advance) -> list[dict[str, Any]]:
    """Return the accuracy with each number of steps between two all-reduces, after the same samples."""
    settings = {"model": scale.trained, "data": scale.samples, "every": scale.every, "steps": scale.steps}
    settings |= {"seeds": scale.seeds, "batch_size": 8, "lr": 0.02}
    with network(2, shared_memory=True) as net:  # the line does not matter for it
        rows = run_ranks(f"{_TASKS}:accuracies", settings, net.hosts, advance=advance)
    return [
        {**row, "accuracy": fmean(row["accuracies"]), "accuracy_deviation": pstdev(row["accuracies"])} for row in rows
    ]


def _sizes(scale: DdpScale, advance: Advance) -> dict[str, Any]:
    ways = [[{"backend": name, "parameters": size} for name in ("noop", *_BACKENDS)] for size in scale.sizes]
    settings = {"model": scale.sized, "shape": scale.sized_shape, "ways": ways}
    turns = {"turns": scale.repeats, "iterations": 1}
    return _on_ranks("steps", {**settings, **turns}, 2, scale.rate, advance)


def _steps(scale: DdpScale, ways: Sequence[Any], iterations: int, advance: Advance) -> dict[str, Any]:
    """Measure the ways on two ranks behind lines of the scale's rate."""
    settings = {"model": scale.model, "shape": scale.shape, "ways": ways}
    turns = {"turns": scale.repeats, "iterations": iterations}
    return _on_ranks("steps", {**settings, **turns}, 2, scale.rate, advance)


def _world(scale: DdpScale, rate: str, world: int, advance: Advance) -> list[dict[str, Any]]:
    ways = [[{"backend": name} for name in ("noop", *_BACKENDS, "dgc")]]
    settings = {"model": scale.small_model, "shape": scale.small_shape, "ways": ways}
    turns = {"turns": scale.repeats, "iterations": 1}
    measured = _on_ranks("steps", {**settings, **turns}, world, rate, advance)
    return [{"ranks": world, **row, "network": measured["network"]} for row in measured["rows"]]


def _on_ranks(task: str, settings: Mapping[str, Any], ranks: int, rate: str, advance: Advance) -> dict[str, Any]:
    """Run the task on `ranks` ranks.

    Without a rate, they share one host, and the ring uses its memory.
    """
    with network(ranks, rate, shared_memory=not rate) as net:
        rows = run_ranks(f"{_TASKS}:{task}", settings, net.hosts, advance=advance)
    return {"network": net.facts(), "rows": [_with_mean(row) for row in rows]}


def _with_mean(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "mean": fmean(row["seconds"]), "deviation": pstdev(row["seconds"])}


def plot(results: Mapping[str, Any], path: Path) -> None:
    """Draw the results into the PNG `path`."""
    settings, rates = results["settings"], {row["network"]["rate"]: row["network"] for row in results["scaling"]}

    def curves(rows: Sequence[Mapping[str, Any]], key: str, names: Sequence[str] = _BACKENDS) -> list[Series]:
        found = [(name, [row for row in rows if row["backend"] == name]) for name in names]
        return [
            Series(
                _NAMES[name],
                [row["mean"] for row in mine],
                [row["deviation"] for row in mine],
                [row[key] for row in mine],
            )
            for name, mine in found
        ]

    ready = results["ready"]
    millions = [count / 1e6 for count in ready["parameters"]]
    buckets = results["buckets"]["rows"]
    alone = next(row["mean"] for row in buckets if row["backend"] == "noop")
    total = f"{settings['total'] / 1e6:g} M"
    panels: list[Panel] = [
        Curves(
            f"All-reduce of {total} float32 values in pieces, 2 ranks on one host",
            "values in a piece",
            "seconds",
            curves(results["pieces"]["rows"], "piece"),
            log_x=True,
            log_y=True,
            ticks=settings["pieces"],
            tick_label=_count,
        ),
        Curves(
            f"When gradients are ready, {settings['model'].rpartition(':')[2]}",
            "millions of parameters that have a gradient",
            "seconds since the backward pass began",
            [
                Series(name, ready[key], None, millions)
                for name, key in (("median", "seconds"), ("fastest", "lowest"), ("slowest", "highest"))
            ],
        ),
        Curves(
            f"A step with buckets of each size, 2 ranks, {_line(results['buckets']['network'])}",
            "bucket size, MiB",
            "seconds",
            curves(buckets, "bucket_mib"),
            log_x=True,
            ticks=settings["buckets_mib"],
            reference=(alone, "no communication"),
        ),
        Curves(
            f"A step with an all-reduce every n steps, 2 ranks, {_line(results['no_sync']['network'])}",
            "n",
            "seconds",
            curves(results["no_sync"]["rows"], "every"),
            log_x=True,
            ticks=settings["every"],
        ),
        Curves(
            f"Accuracy with an all-reduce every n steps, {counted(settings['seeds'], 'seed')}",
            "n",
            "% of the test samples",
            [_accuracies(results["accuracy"])],
            log_x=True,
            ticks=settings["every"],
        ),
        Curves(
            f"A step of models of each size, 2 ranks, {_line(results['sizes']['network'])}",
            "parameters",
            "seconds",
            curves(results["sizes"]["rows"], "parameters", ("noop", *_BACKENDS)),
            log_x=True,
            log_y=True,
            ticks=settings["sizes"],
            tick_label=_count,
        ),
    ]
    for rate, net in rates.items():
        rows = [row for row in results["scaling"] if row["network"]["rate"] == rate]
        series = curves(rows, "ranks", tuple(_NAMES))
        ticks = settings["worlds"]
        title = f"A step of {settings['small_model'].rpartition(':')[2]}, {_line(net)}"
        panels.append(Curves(title, "ranks", "seconds", series, log_x=True, log_y=True, ticks=ticks))
    plot_panels(panels, path)


def _accuracies(rows: Sequence[Mapping[str, Any]]) -> Series:
    means, deviations = ([100 * row[key] for row in rows] for key in ("accuracy", "accuracy_deviation"))
    return Series("accuracy", means, deviations, [row["every"] for row in rows])


_NAMES = {"gloo": "Gloo", "fedring": "fedring", "dgc": "fedring, DGC 0.1 %", "noop": "no communication"}


def _line(net: Mapping[str, Any]) -> str:
    return net["rate"] if net["limit"] != UNSHAPED else "loopback without a limit"


def _count(values: float) -> str:
    """Format a number of values, such as "500 K"."""
    return f"{values / 1e6:g} M" if values >= 1e6 else f"{values / 1e3:g} K"


def print_tables(results: Mapping[str, Any]) -> None:
    """Print the results as tables."""
    settings, columns = results["settings"], ("Gloo>", "fedring>", "fedring/Gloo>")
    total = f"{settings['total'] / 1e6:g} M float32 values, 2 ranks on one host"
    print_table(
        f"All-reduce of {total}", ("piece>", *columns), _side_by_side(results["pieces"]["rows"], "piece", _count)
    )
    ready = results["ready"]
    times = [(f"{share:.0%}", duration(_time_of(ready, share))) for share in (0.25, 0.5, 0.75, 1.0)]
    print_table(f"Gradients of {settings['model']}", ("of the parameters have one>", "after>"), times)
    net = results["buckets"]["network"]
    rows = _side_by_side(results["buckets"]["rows"], "bucket_mib", str)
    print_table(f"A step of {settings['model']}, 2 ranks, {_line(net)}", ("bucket, MiB>", *columns), rows)
    net, found = results["no_sync"]["network"], {str(row["every"]): with_deviation(row) for row in results["accuracy"]}
    rows = [(*row, found[row[0]]) for row in _side_by_side(results["no_sync"]["rows"], "every", str)]
    title = f"A step of {settings['model']}, 2 ranks, {_line(net)}, and the accuracy of {settings['trained']}"
    print_table(title, ("all-reduce every>", *columns, "accuracy>"), rows)
    net, rows = results["sizes"]["network"], _side_by_side(results["sizes"]["rows"], "parameters", _count)
    print_table(f"A step of a perceptron, 2 ranks, {_line(net)}", ("parameters>", *columns), rows)
    table: dict[tuple[str, int], dict[str, Mapping[str, Any]]] = {}
    for row in results["scaling"]:
        table.setdefault((_line(row["network"]), row["ranks"]), {})[row["backend"]] = row
    scaling = [
        (line, str(ranks), *(_mean(by[name]) for name in _NAMES), f"{by['fedring']['mean'] / by['gloo']['mean']:.2f}")
        for (line, ranks), by in table.items()
    ]
    title = f"A step of {settings['small_model']}"
    print_table(title, ("line", "ranks>", *(f"{name}>" for name in _NAMES.values()), "fedring/Gloo>"), scaling)


def _side_by_side(rows: Sequence[Mapping[str, Any]], key: str, label: Callable[[Any], str]) -> list[tuple[str, ...]]:
    """Return a row of times for each value of the key.

    A row has the times of Gloo and of the ring, and their ratio.
    """
    table: dict[Any, dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        if key in row:
            table.setdefault(row[key], {})[row["backend"]] = row
    return [
        (label(value), _mean(by["gloo"]), _mean(by["fedring"]), f"{by['fedring']['mean'] / by['gloo']['mean']:.2f}")
        for value, by in table.items()
    ]


def _mean(row: Mapping[str, Any]) -> str:
    return f"{duration(row['mean'])} ± {duration(row['deviation'])}"


def _time_of(ready: Mapping[str, Any], share: float) -> float:
    """Return when a share of the parameters has gradients, in seconds."""
    wanted = share * ready["parameters"][-1]
    moments = zip(ready["parameters"], ready["seconds"], strict=True)
    return next(float(seconds) for count, seconds in moments if count >= wanted)


main = Command(ddp, "", "--quick", "--rate 100mbit --rates 10mbit,100mbit,1gbit --out ddp-slow")

if __name__ == "__main__":
    sys.exit(main())
