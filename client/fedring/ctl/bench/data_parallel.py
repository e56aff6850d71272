"""flctl bench data-parallel: compare gradient compression with dense gradients on real daemons."""

from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer

from fedring.ctl.bench.experiment import Experiment, Result, make_job, run_with_progress
from fedring.ctl.bench.presets import DataRootOption, Dataset, DatasetOption, Mode, check_data_root, preset_job
from fedring.ctl.bench.runner import present, unique_names
from fedring.ctl.options import OutputOption, make_out_folder
from fedring.ctl.output import Output, duration, percent, print_table, size
from fedring.train.data_parallel_table import HOOKS
from fedring.train.hooks import split_hooks

_KEYS = {"batch_size": 64, "epochs": 1, "lr": 0.05, "momentum": 0.9, "seed": 0}


def data_parallel(
    data_root: DataRootOption = None,
    dataset: DatasetOption = Dataset.MNIST,
    epochs: Annotated[
        int, typer.Option(min=1, help="Epochs of training with each hook; the model is evaluated after each epoch.")
    ] = 5,
    workers: Annotated[int, typer.Option(min=2, max=64, help="Client daemons to start, one for each worker.")] = 2,
    subset: Annotated[int, typer.Option(min=0, help="Samples of an epoch, over all workers; 0 = all.")] = 0,
    hooks: Annotated[
        str, typer.Option(help=f"Hooks to compare, separated by commas: {', '.join(HOOKS)}.")
    ] = "none,dgc",
    ratio: Annotated[
        float, typer.Option(help="Share of the gradient that topk sends, and dgc after its warm-up; 0 to 1.")
    ] = 0.001,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder for data-parallel.json, the plots and the files of every run.")
    ] = Path("bench-out"),
    output: OutputOption = Output.TABLE,
) -> None:
    """Train once with each hook, and compare bytes, accuracy, and the longest and mean communication of a step."""
    names = unique_names("--hooks", split_hooks(hooks))
    keys = {**preset_job(dataset, Mode.DATA_PARALLEL), **_KEYS, "rounds": epochs, "subset_size": subset}
    keys["max_abandoned"] = 1  # an epoch that is missing would end the comparison with a division by zero, or unfairly
    check_data_root(dataset, data_root)
    make_out_folder(out)
    root = data_root.absolute() if data_root else None
    results: dict[str, Any] = {"dataset": str(dataset), "workers": workers, "ratio": ratio, **_KEYS, "epochs": epochs}
    results["hooks"] = []
    for name in names:
        table = {"hook": name, "ratio": ratio, "warmup_epochs": 1}
        job = make_job(workers, {**keys, "name": f"bench {name}", "data_parallel": table})
        result = run_with_progress(Experiment(job, workers, root), out / name, label=name)
        results["hooks"].append(summary(name, result))
    present(results, out / "data-parallel.json", output, plot=_plot, print_results=_print)


def summary(hook: str, result: Result) -> dict[str, Any]:
    """Return the row of one hook.

    Bytes are those of one worker, in total and per step after the first epoch, in which dgc warms up. Waits are the
    mean and the longest time that a worker spent on the communication of one step.
    """
    report = result.report()
    epochs = [list(row["workers"].values()) for row in report["rounds"]]
    everything = [worker for workers in epochs for worker in workers]
    later = [worker for workers in epochs[1:] or epochs for worker in workers]  # after the warm-up
    steps = sum(worker["steps"] for worker in everything)
    return {
        "hook": hook,
        "accuracy": report["accuracy"],
        "accuracies": [row["accuracy"] for row in report["rounds"]],
        "bytes_sent": sum(worker["bytes_sent"] for worker in everything) / len(epochs[0]),
        "bytes_per_step": sum(worker["bytes_sent"] for worker in later) / sum(worker["steps"] for worker in later),
        "wait_seconds_mean": sum(worker["wait_seconds"] for worker in everything) / steps,
        "wait_seconds_max": max(worker["longest_wait_seconds"] for worker in everything),
        "samples_per_second": fmean(sum(worker["samples_per_second"] for worker in workers) for workers in epochs),
        "model_sha256": report["model_sha256"],
    }


def _print(results: Mapping[str, Any]) -> None:
    rows = [
        (
            row["hook"],
            percent(row["accuracy"]),
            size(row["bytes_sent"]),
            size(row["bytes_per_step"]),
            duration(row["wait_seconds_max"]),
            duration(row["wait_seconds_mean"]),
            f"{row['samples_per_second']:,.0f}",
        )
        for row in results["hooks"]
    ]
    columns = ("hook", "accuracy>", "sent/worker>", "sent/step>", "longest wait>", "mean wait>", "samples/s>")
    title = f"{results['dataset']}, {results['workers']} workers, {results['epochs']} epochs"
    print_table(f"{title}; bytes of one worker, and of its steps after the first epoch", columns, rows)


def _plot(results: Mapping[str, Any], directory: Path) -> None:
    from fedring.ctl.bench.plots import Bars, plot_bars  # matplotlib takes a second to import

    rows = results["hooks"]
    names = [row["hook"] for row in rows]

    def chart(title: str, file: str, key: str, label: Callable[[float], str]) -> Bars:
        values = [row[key] for row in rows]
        return Bars(title, f"data-parallel-{file}.png", names, values, [label(value) for value in values])

    accuracies = [100 * (row["accuracy"] or 0.0) for row in rows]
    accuracy = Bars(
        "Accuracy after the last epoch, %",
        "data-parallel-accuracy.png",
        names,
        accuracies,
        [f"{value:.2f}" for value in accuracies],
        low=max(0.0, min(accuracies) - 1.0),
    )
    charts = [
        chart("Sent by a worker", "bytes", "bytes_sent", size),
        accuracy,
        chart("Longest communication of a step", "longest", "wait_seconds_max", duration),
        chart("Mean communication of a step", "mean", "wait_seconds_mean", duration),
    ]
    plot_bars(charts, directory, "data-parallel.png")
