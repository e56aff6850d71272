"""Speed, weight versions and memory of pipelines.

Model parallel is measured against one device, and pipelining against both. The times repeat PyTorch's tutorial
"Single-Machine Model Parallel Best Practices"; the weights are those of PipeDream (Narayanan et al. 2019).
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, pstdev
from typing import Annotated, Any

import typer

from fedring.ctl.local.charts import Bars, Panel, Series, plot_panels
from fedring.ctl.local.pipeline_memory import measure_stages
from fedring.ctl.local.presets import DataRootOption, Dataset, DatasetOption, Mode, check_data_root, preset_job
from fedring.ctl.local.ranks import Advance, run_ranks
from fedring.ctl.local.runner import present
from fedring.ctl.options import OutputOption, make_out_folder
from fedring.ctl.output import Output, duration, percent, print_table, size
from fedring.daemon.wording import counted
from tests.bench.lab.command import Command
from tests.bench.lab.curves import Curves
from tests.bench.lab.networks import network
from tests.bench.lab.parts import Part, QuickOption, describe_run, run_parts

_TASKS = "tests.bench.pipeline_steps"
_DEVICES = 2  # ranks of one thread each, which stand for the two devices of the tutorial
_ALONE, _FEDRING, _TORCH = "one device", "fedring", "torch"

WEIGHTS: Mapping[str, Mapping[str, Any]] = {
    "synchronous (1f1b)": {"schedule": "1f1b", "micro_batches": 4},
    "PipeDream, stashed": {"schedule": "pipedream", "micro_batches": 64},
    "PipeDream, vertical sync": {"schedule": "pipedream", "micro_batches": 64, "versions": "vertical"},
    "PipeDream-2BW": {"schedule": "pipedream", "micro_batches": 64, "versions": "macrobatch"},
}
"""The tables `pipeline` of jobs whose accuracies are compared; PipeDream flushes after 64 micro-batches."""

MEMORY: Mapping[str, Mapping[str, Any]] = {
    "gpipe": {"schedule": "gpipe"},
    "gpipe, recompute": {"schedule": "gpipe", "recompute": True},
    "1f1b": {"schedule": "1f1b"},
    "1f1b, recompute": {"schedule": "1f1b", "recompute": True},
    "PipeDream, stashed": {"schedule": "pipedream"},
    "PipeDream-2BW": {"schedule": "pipedream", "versions": "macrobatch"},
}
"""The tables `pipeline` of jobs whose memory is measured."""


@dataclass(frozen=True, slots=True)
class PipelineScale:
    """How much is measured."""

    model: str = "torchvision:resnet50"  # of the times and the memory
    shape: tuple[int, ...] = (48, 3, 64, 64)  # of a batch of its inputs
    splits: tuple[int, ...] = (1, 2, 4, 6, 8, 12, 16, 24, 48)  # samples of a micro-batch; each divides the batch
    turns: int = 5
    memory_stages: int = 4
    memory_micro_batches: int = 8
    stages: tuple[int, ...] = (2, 4)  # of the trainings whose accuracy is measured
    samples: int = 9_600  # of each of them
    seeds: int = 3
    lr: float = 0.02


QUICK = PipelineScale(
    model="torchvision:resnet18", shape=(24, 3, 64, 64), splits=(2, 6, 24), turns=2, stages=(2,), samples=1920, seeds=1
)


def pipeline(
    data_root: DataRootOption = None,
    dataset: DatasetOption = Dataset.MNIST,
    quick: QuickOption = False,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for pipeline.json and pipeline.png.")] = Path(
        "bench-out"
    ),
    output: OutputOption = Output.TABLE,
) -> None:
    """Measure pipelining: its speed, its accuracy, and its memory.

    The accuracy is that of PipeDream's weights; the memory is that of stages. The times are those of ResNet-50 in two
    processes with one thread each. The data set is for the accuracies only.
    """
    check_data_root(dataset, data_root)
    make_out_folder(out)
    described = describe_run("pipeline", quick=quick)
    results = described | measure(QUICK if quick else PipelineScale(), dataset, data_root)
    present(results, out / "pipeline.json", output, plot=plot, print_results=print_tables)


def measure(scale: PipelineScale, dataset: Dataset, data_root: Path | None) -> dict[str, Any]:
    """Measure all parts.

    Returns:
        `settings` and `dataset`; `split_sizes`, with the `seconds` of each turn, their `mean` and their standard
        `deviation`; `summary`, with what the tutorial concludes from them; `weights`, the accuracies of each table in
        WEIGHTS for each number of stages; and `memory`, the bytes of each stage for each table in MEMORY.
    """
    runs = len(WEIGHTS) * len(scale.stages) * scale.seeds
    parts = {
        "split_sizes": Part(
            "split sizes", 0.05 * scale.shape[0] * len(scale.splits) * (1 + scale.turns), partial(_splits, scale)
        ),
        "weights": Part(
            "weights of PipeDream", 10 + runs * scale.samples / 1200, partial(_weights, scale, dataset, data_root)
        ),
        "memory": Part("memory of stages", 2 * len(MEMORY), partial(_memory, scale)),
    }
    measured = run_parts("pipeline", parts)
    times = measured["split_sizes"]["rows"]
    return {"settings": asdict(scale), "dataset": str(dataset), **measured, "summary": summary(times, scale.shape[0])}


def summary(rows: Sequence[Mapping[str, Any]], batch: int) -> dict[str, Any]:
    """Return the figures of the tutorial's conclusion.

    Args:
        rows: The means of each way and split size.
        batch: Samples of a batch.

    Returns:
        Seconds of a step on one device, with the model on two devices (`model_parallel_seconds`: one micro-batch), and
        pipelined with the best split size; `overhead`, by which share model parallel is slower than one device; and
        `gain`, by which share pipelining is faster than one device, as the tutorial divides.
    """
    alone = next(row["mean"] for row in rows if row["way"] == _ALONE)
    ours = {row["split"]: row["mean"] for row in rows if row["way"] == _FEDRING}
    best = min(ours, key=lambda split: ours[split])
    return {
        "one_device_seconds": alone,
        "model_parallel_seconds": ours[batch],
        "pipelined_seconds": ours[best],
        "best_split": best,
        "overhead": ours[batch] / alone - 1,
        "gain": alone / ours[best] - 1,
    }


def _splits(scale: PipelineScale, advance: Advance) -> dict[str, Any]:
    settings = {"model": scale.model, "shape": scale.shape, "splits": scale.splits, "turns": scale.turns}
    with network(_DEVICES, shared_memory=True) as net:
        rows = run_ranks(f"{_TASKS}:split_sizes", settings, net.hosts, advance=advance)
    found = [{**row, "mean": fmean(row["seconds"]), "deviation": pstdev(row["seconds"])} for row in rows]
    return {"network": net.facts(), "rows": found}


def _weights(scale: PipelineScale, dataset: Dataset, data_root: Path | None, advance: Advance) -> list[dict[str, Any]]:
    preset = preset_job(dataset, Mode.PIPELINE)
    ways = [(name, stages, {**table, "stages": stages}) for stages in scale.stages for name, table in WEIGHTS.items()]
    settings = {
        "model": preset["model"],
        "model_args": preset.get("model_args", {}),
        "data": preset["data"],
        "data_root": str(data_root.absolute()) if data_root else None,
        "tables": [table for _, _, table in ways],
        "runs": [(number, seed) for number in range(len(ways)) for seed in range(scale.seeds)],
        "samples": scale.samples,
        "lr": scale.lr,
    }
    with network(_DEVICES, shared_memory=True) as net:
        found = run_ranks(f"{_TASKS}:trainings", settings, net.hosts, advance=advance)
    accuracies = [found[number * scale.seeds : (number + 1) * scale.seeds] for number in range(len(ways))]
    return [
        {
            "weights": name,
            "stages": stages,
            "accuracy": fmean(mine),
            "accuracy_deviation": pstdev(mine),
            "accuracies": mine,
        }
        for (name, stages, _), mine in zip(ways, accuracies, strict=True)
    ]


def _memory(scale: PipelineScale, advance: Advance) -> list[dict[str, Any]]:
    rows = []
    for number, (name, table) in enumerate(MEMORY.items(), 1):
        keys = {**table, "stages": scale.memory_stages, "micro_batches": scale.memory_micro_batches}
        kept = measure_stages(scale.model, "{}", keys, scale.shape)
        rows += [{"schedule": name, "stage": row["stage"], **{key: row[key] for key in _KEPT}} for row in kept]
        advance(number / len(MEMORY))
    return rows


_KEPT = ("parameters", "stashed", "optimizer", "activations")


def plot(results: Mapping[str, Any], path: Path) -> None:
    """Draw the results into the PNG `path`."""
    settings, found, times = results["settings"], results["summary"], results["split_sizes"]["rows"]
    model, batch = settings["model"].rpartition(":")[2], settings["shape"][0]
    rows = [
        next(row for row in times if row["way"] == way and row["split"] == split)
        for way, split in ((_ALONE, batch), (_FEDRING, batch), (_FEDRING, found["best_split"]))
    ]
    three = ["one device", "model parallel,\ntwo devices", f"pipelined,\nsplit size {found['best_split']}"]
    step = Series("step", [row["mean"] for row in rows], [row["deviation"] for row in rows])

    def curve(way: str, name: str) -> Series:
        mine = [row for row in times if row["way"] == way]
        means, deviations = [row["mean"] for row in mine], [row["deviation"] for row in mine]
        return Series(name, means, deviations, [row["split"] for row in mine])

    def accuracies(stages: int) -> Series:
        mine = [row for row in results["weights"] if row["stages"] == stages]
        means, deviations = ([100 * row[key] for row in mine] for key in ("accuracy", "accuracy_deviation"))
        return Series(counted(stages, "stage"), means, deviations)

    def kept(stage: int) -> list[float]:
        return [row["activations"] + row["stashed"] for row in results["memory"] if row["stage"] == stage]

    lowest = min(100 * (row["accuracy"] - row["accuracy_deviation"]) for row in results["weights"])
    stages = sorted({row["stage"] for row in results["memory"]})
    panels: list[Panel] = [
        Bars(f"A step of {model}, batch {batch}", "seconds", three, [step], duration),
        Curves(
            f"A step of {model}, by the samples of a micro-batch",
            "split size, samples",
            "seconds",
            [curve(_FEDRING, "fedring"), curve(_TORCH, "torch.distributed.pipelining")],
            log_x=True,
            ticks=settings["splits"],
            reference=(found["one_device_seconds"], "one device"),
        ),
        Bars(
            f"Accuracy on {results['dataset']}, {counted(settings['seeds'], 'seed')}",
            "% of the test samples",
            [name.replace(", ", ",\n").replace(" (", "\n(") for name in WEIGHTS],
            [accuracies(count) for count in settings["stages"]],
            "{:.2f}".format,
            low=max(0.0, lowest - 1.0),
        ),
        Bars(
            f"Activations and older weights of each stage, {model}",
            "bytes",
            [name.replace(", ", ",\n") for name in MEMORY],
            [Series(f"stage {stage}", kept(stage)) for stage in stages],
            size,
            log=True,
            annotated=False,
        ),
    ]
    plot_panels(panels, path, width=8)


def print_tables(results: Mapping[str, Any]) -> None:
    """Print the results as tables."""
    settings, found = results["settings"], results["summary"]
    model, batch = settings["model"], settings["shape"][0]
    rows = [
        ("one device", duration(found["one_device_seconds"]), "-"),
        ("model parallel", duration(found["model_parallel_seconds"]), f"{found['overhead']:+.0%} time"),
        (
            f"pipelined, split size {found['best_split']}",
            duration(found["pipelined_seconds"]),
            f"{found['gain']:+.0%} speed",
        ),
    ]
    print_table(f"A step of {model}, batch {batch}", ("", "mean>", "against one device>"), rows)
    times = {(row["way"], row["split"]): row for row in results["split_sizes"]["rows"]}
    lines = [
        (str(split), *(_mean(times.get((way, split))) for way in (_FEDRING, _TORCH))) for split in settings["splits"]
    ]
    print_table(
        "A step by split size", ("samples of a micro-batch>", "fedring>", "torch.distributed.pipelining>"), lines
    )
    weights = [
        (str(row["stages"]), row["weights"], f"{percent(row['accuracy'])} ± {100 * row['accuracy_deviation']:.2f}")
        for row in results["weights"]
    ]
    title = f"Accuracy on {results['dataset']}, {settings['samples']:,} samples, {counted(settings['seeds'], 'seed')}"
    print_table(title, ("stages>", "weights", "accuracy>"), weights)
    memory = [(row["schedule"], str(row["stage"]), *(size(row[key]) for key in _KEPT)) for row in results["memory"]]
    title = f"Memory of the stages of {model}, {settings['memory_micro_batches']} micro-batches"
    print_table(title, ("schedule", "stage>", *(f"{key}>" for key in _KEPT)), memory)


def _mean(row: Mapping[str, Any] | None) -> str:
    return f"{duration(row['mean'])} ± {duration(row['deviation'])}" if row else "-"


main = Command(pipeline, "--data-root data", "--dataset digits --quick")

if __name__ == "__main__":
    sys.exit(main())
