"""flctl bench data-parallel: deep gradient compression beside dense gradients, on real daemons."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer

from fedring.ctl.experiment import Experiment, Result, make_job, run_experiment
from fedring.ctl.failure import Failure
from fedring.ctl.options import OutputOption
from fedring.ctl.output import Output, duration, percent, print_json, print_table, size, stderr_console
from fedring.ctl.paths import make_folder
from fedring.ctl.presets import Dataset, Mode, check_data_root, preset_job
from fedring.ctl.progress import people_display
from fedring.daemon.exits import Exit
from fedring.train.hooks import split_hooks
from fedring.train.parallel import HOOKS

_KEYS = {"batch_size": 64, "epochs": 1, "lr": 0.05, "momentum": 0.9, "seed": 0}


def data_parallel(
    data_root: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the data sets.")] = None,
    dataset: Annotated[Dataset, typer.Option(help="All but digits need --data-root.")] = Dataset.MNIST,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs; the model is evaluated after each.")] = 5,
    workers: Annotated[int, typer.Option(min=2, max=64, help="Client daemons.")] = 2,
    subset: Annotated[int, typer.Option(min=0, help="Samples of an epoch, over all workers; 0 = all.")] = 0,
    hooks: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(HOOKS)}.")] = "none,dgc",
    ratio: Annotated[float, typer.Option(help="Share that topk sends, and dgc after its warm-up.")] = 0.001,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where data-parallel.json, plots and runs go.")] = Path(
        "bench-out"
    ),
    output: OutputOption = Output.TABLE,
) -> None:
    """Train once per hook, and compare bytes, accuracy, and the longest and mean communication of a step."""
    names = split_hooks(hooks)
    if not names or len(set(names)) != len(names):
        raise Failure("--hooks needs names, each once, separated by commas", Exit.USAGE)
    keys = {**preset_job(dataset, Mode.DATA_PARALLEL), **_KEYS, "rounds": epochs, "subset_size": subset}
    check_data_root(dataset, data_root)
    make_folder(out)
    root = data_root.absolute() if data_root else None
    results: dict[str, Any] = {"dataset": str(dataset), "workers": workers, "ratio": ratio, **_KEYS, "epochs": epochs}
    results["hooks"] = []
    for name in names:
        table = {"hook": name, "ratio": ratio, "warmup_epochs": 1}
        job = make_job(workers, {**keys, "name": f"bench {name}", "data_parallel": table})
        results["hooks"].append(_run(name, Experiment(job, workers, root), out / name))
    (out / "data-parallel.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    _plot(results["hooks"], out)
    if output is Output.JSON:
        return print_json(results)
    _print(results)
    stderr_console().print(f"data-parallel.json, the plots and every run are in {out}")


def summary(hook: str, result: Result) -> dict[str, Any]:
    """What one hook came to: a worker's bytes in all and a step after the first epoch, and its waits."""
    report = result.report()
    epochs = [list(row["workers"].values()) for row in report["rounds"]]
    everything = [worker for workers in epochs for worker in workers]
    later = [worker for workers in epochs[1:] or epochs for worker in workers]  # past the warm-up
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


def _run(name: str, experiment: Experiment, directory: Path) -> dict[str, Any]:
    directory.mkdir(parents=True, exist_ok=True)
    with people_display(rounds=experiment.job.rounds, label=name) as show:
        return summary(name, run_experiment(experiment, directory, show))


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
    print_table(f"{title}; bytes of one worker, a step's bytes after the first epoch", columns, rows)


def _plot(rows: Sequence[Mapping[str, Any]], directory: Path) -> None:
    from fedring.ctl.plots import Bars, plot_bars  # matplotlib takes a second to import

    names = [row["hook"] for row in rows]

    def chart(title: str, file: str, key: str, label: Any) -> Bars:
        values = [row[key] for row in rows]
        return Bars(title, f"data-parallel-{file}.png", names, values, [label(value) for value in values])

    right = [100 * (row["accuracy"] or 0.0) for row in rows]
    accuracy = Bars(
        "Accuracy after the last epoch, %",
        "data-parallel-accuracy.png",
        names,
        right,
        [f"{value:.2f}" for value in right],
        low=max(0.0, min(right) - 1.0),
    )
    charts = [
        chart("Sent by a worker", "bytes", "bytes_sent", size),
        accuracy,
        chart("Longest communication of a step", "longest", "wait_seconds_max", duration),
        chart("Mean communication of a step", "mean", "wait_seconds_mean", duration),
    ]
    plot_bars(charts, directory, "data-parallel.png")
