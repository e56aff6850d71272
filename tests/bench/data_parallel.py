"""Compare gradient compression with dense gradients on real daemons."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Annotated, Any

import typer

from fedring.ctl.local.charts import Bars, Series, plot_panels
from fedring.ctl.local.experiment import Experiment, Result, make_job, run_with_progress
from fedring.ctl.local.presets import DataRootOption, Dataset, DatasetOption, Mode, check_data_root, preset_job
from fedring.ctl.local.runner import present, unique_names
from fedring.ctl.options import OutputOption, make_out_folder
from fedring.ctl.output import Output, duration, print_table, size
from fedring.daemon.wording import counted
from fedring.train.jobs.data_parallel_table import HOOKS
from fedring.train.names.hooks import split_hooks
from tests.bench.lab.command import Command
from tests.bench.lab.lines import RateOption, SeedsOption, lines
from tests.bench.lab.networks import line_of
from tests.bench.lab.parts import QuickOption, describe_run, with_deviation

_KEYS = {"batch_size": 64, "epochs": 1, "lr": 0.05, "momentum": 0.9, "seed": 0}


def data_parallel(
    data_root: DataRootOption = None,
    dataset: DatasetOption = Dataset.MNIST,
    epochs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Epochs of training with each hook; the model is evaluated after each epoch.",
            show_default="5, with --quick 2",
        ),
    ] = None,
    workers: Annotated[int, typer.Option(min=2, max=64, help="Client daemons to start, one for each worker.")] = 2,
    subset: Annotated[
        int | None,
        typer.Option(
            min=0, help="Samples of an epoch, over all workers; 0 = all.", show_default="0, with --quick 12000"
        ),
    ] = None,
    hooks: Annotated[
        str, typer.Option(help=f"Hooks to compare, separated by commas: {', '.join(HOOKS)}.")
    ] = "none,dgc",
    ratio: Annotated[
        float, typer.Option(help="Share of the gradient that topk sends, and dgc after its warm-up; 0 to 1.")
    ] = 0.001,
    seeds: SeedsOption = None,
    rate: RateOption = "",
    quick: QuickOption = False,
    out: Annotated[
        Path,
        typer.Option(
            metavar="DIR", help="Folder for data-parallel.json, data-parallel.png and the files of every run."
        ),
    ] = Path("bench-out"),
    output: OutputOption = Output.TABLE,
) -> None:
    """Train with each hook, and compare cost and accuracy.

    The comparison shows bytes, accuracy, and the longest and mean communication of a step, over several seeds.
    """
    names = unique_names("--hooks", split_hooks(hooks))
    rounds = epochs if epochs is not None else 2 if quick else 5
    samples = subset if subset is not None else 12_000 if quick and dataset is not Dataset.DIGITS else 0
    keys = {**preset_job(dataset, Mode.DATA_PARALLEL), **_KEYS, "rounds": rounds, "subset_size": samples}
    keys["max_abandoned"] = 1  # an epoch that is missing would end the comparison with a division by zero, or unfairly
    check_data_root(dataset, data_root)
    root = data_root.absolute() if data_root else None
    count, chosen = seeds or (1 if quick else 3), (epochs, subset) != (None, None)
    with lines(workers, rate) as behind:
        make_out_folder(out)
        results = describe_run("data-parallel", quick=quick, chosen=chosen) | {"network": behind.network.facts()}
        results |= {"dataset": str(dataset), "workers": workers, "ratio": ratio, **_KEYS, "epochs": rounds}
        rows: list[dict[str, Any]] = []
        results |= {"seeds": count, "subset_size": samples, "hooks": rows}
        for number, name in enumerate(names, 1):
            table = {"hook": name, "ratio": ratio, "warmup_epochs": 1}
            runs = []
            for seed in range(count):
                job = make_job(workers, {**keys, "name": f"bench {name}", "data_parallel": table, "seed": seed})
                experiment = Experiment(job, workers, root, server=behind.server, place=behind.place)
                label = f"{name}, {number} of {len(names)}, seed {seed + 1} of {count}"
                runs.append(run_with_progress(experiment, out / name / f"seed-{seed}", label=label))
            rows.append(summary(name, runs))
    present(results, out / "data-parallel.json", output, plot=_plot, print_results=_print)


def summary(hook: str, runs: Sequence[Result]) -> dict[str, Any]:
    """Return the row of one hook, over the trainings with all seeds.

    Bytes are those of one worker, in a training and per step after the first epoch, in which dgc warms up. Waits are
    the mean and the longest time that a worker spent on the communication of one step; `by_worker` has those of each.
    Accuracies are means over the seeds; `by_seed` has those of each.
    """
    reports = [result.report() for result in runs]
    trainings = [[list(row["workers"].values()) for row in report["rounds"]] for report in reports]
    epochs = [epoch for training in trainings for epoch in training]
    everything = [worker for workers in epochs for worker in workers]
    # Those after the warm-up of each training.
    later = [worker for training in trainings for workers in training[1:] or training for worker in workers]
    steps = sum(worker["steps"] for worker in everything)
    last = [report["accuracy"] for report in reports]
    rounds = zip(*(report["rounds"] for report in reports), strict=True)
    return {
        "hook": hook,
        "accuracy": fmean(last),
        "accuracy_deviation": pstdev(last),
        "accuracies": [fmean(row["accuracy"] for row in rows) for rows in rounds],
        "by_seed": [{"accuracy": one["accuracy"], "model_sha256": one["model_sha256"]} for one in reports],
        "bytes_sent": sum(worker["bytes_sent"] for worker in everything) / len(epochs[0]) / len(runs),
        "bytes_per_step": sum(worker["bytes_sent"] for worker in later) / sum(worker["steps"] for worker in later),
        "wait_seconds_mean": sum(worker["wait_seconds"] for worker in everything) / steps,
        "wait_seconds_max": max(worker["longest_wait_seconds"] for worker in everything),
        "by_worker": _by_worker([row["workers"] for report in reports for row in report["rounds"]], len(runs)),
        "samples_per_second": fmean(sum(worker["samples_per_second"] for worker in workers) for workers in epochs),
    }


def _by_worker(epochs: Sequence[Mapping[str, Mapping[str, float]]], trainings: int) -> dict[str, dict[str, float]]:
    """Return each worker's sent bytes, and its waits in a step.

    The bytes are of a training; the waits are the mean and the longest.
    """
    parts: dict[str, list[Mapping[str, float]]] = {}
    for epoch in epochs:
        for name, worker in epoch.items():
            parts.setdefault(name, []).append(worker)
    return {
        name: {
            "bytes_sent": sum(part["bytes_sent"] for part in mine) / trainings,
            "wait_seconds_mean": sum(part["wait_seconds"] for part in mine)
            / max(1, sum(part["steps"] for part in mine)),
            "wait_seconds_max": max(part["longest_wait_seconds"] for part in mine),
        }
        for name, mine in sorted(parts.items())
    }


def _print(results: Mapping[str, Any]) -> None:
    rows = [
        (
            row["hook"] if number == 0 else "",
            with_deviation(row) if number == 0 else "",
            worker,
            size(figures["bytes_sent"]),
            duration(figures["wait_seconds_max"]),
            duration(figures["wait_seconds_mean"]),
            f"{figures['wait_seconds_max'] / figures['wait_seconds_mean']:.1f}"
            if figures["wait_seconds_mean"]
            else "-",
            size(row["bytes_per_step"]) if number == 0 else "",
            f"{row['samples_per_second']:,.0f}" if number == 0 else "",
        )
        for row in results["hooks"]
        for number, (worker, figures) in enumerate(row["by_worker"].items())
    ]
    waits = ("longest wait>", "mean wait>", "longest/mean>")
    columns = ("hook", "accuracy>", "worker", "sent>", *waits, "sent/step, after warm-up>", "samples/s>")
    title = f"{results['dataset']}, {counted(results['workers'], 'worker')}, {counted(results['epochs'], 'epoch')}"
    title += f", {counted(results['seeds'], 'seed')}, {line_of(results['network'])}"
    print_table(f"{title}; a wait is what a worker spends on the communication of a step", columns, rows)


def _plot(results: Mapping[str, Any], path: Path) -> None:
    rows = results["hooks"]
    names = [row["hook"].replace("(", "\n(") for row in rows]
    workers = sorted(rows[0]["by_worker"])[:7]

    def by_worker(key: str) -> list[Series]:
        return [Series(worker, [row["by_worker"].get(worker, {}).get(key, 0.0) for row in rows]) for worker in workers]

    accuracies = [100 * (row["accuracy"] or 0.0) for row in rows]
    low = max(0.0, min(accuracies) - 1.0)
    accuracy = Series("accuracy", accuracies, [100 * row["accuracy_deviation"] for row in rows])
    panels = [
        Bars("Sent by each worker", "bytes", names, by_worker("bytes_sent"), size, log=True),
        Bars("Accuracy after the last epoch", "% of the test samples", names, [accuracy], "{:.2f}".format, low=low),
        Bars("Longest communication of a step", "seconds", names, by_worker("wait_seconds_max"), duration),
        Bars("Mean communication of a step", "seconds", names, by_worker("wait_seconds_mean"), duration),
    ]
    plot_panels(panels, path)


main = Command(
    data_parallel, "--data-root data", "--dataset digits --epochs 3 --workers 3", "--data-root data --rate 100mbit"
)

if __name__ == "__main__":
    sys.exit(main())
