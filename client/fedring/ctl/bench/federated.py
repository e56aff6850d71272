"""flctl bench federated: compare encodings on real daemons, with training in one place as the upper bound."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

import typer

from fedring.control import figures
from fedring.ctl.bench.central import train_centrally
from fedring.ctl.bench.experiment import Experiment, Result, make_job, run_with_progress
from fedring.ctl.bench.presets import DataRootOption, Dataset, DatasetOption, check_data_root, preset_job
from fedring.ctl.bench.runner import present, unique_names
from fedring.ctl.options import OutputOption, make_out_folder
from fedring.ctl.output import Output, duration, percent, print_table, size, stderr_console

_ENCODINGS = "fp32,int8,fp32_sparse,sq8,packed,uniform"
_KEYS = {"batch_size": 64, "epochs": 1, "lr": 0.05, "momentum": 0.9, "seed": 0}


def federated(
    data_root: DataRootOption = None,
    dataset: DatasetOption = Dataset.MNIST,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of training with each encoding.")] = 10,
    clients: Annotated[int, typer.Option(min=1, max=64, help="Client daemons to start.")] = 2,
    subset: Annotated[
        int, typer.Option(min=0, help="Samples that a client trains on in a round; 0 = all that it has.")
    ] = 6000,
    encodings: Annotated[str, typer.Option(help="Encodings to compare, separated by commas.")] = _ENCODINGS,
    central: Annotated[bool, typer.Option(help="Also train on all data in one place, for comparison.")] = True,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder for federated.json, the plots and the files of every run.")
    ] = Path("bench-out"),
    output: OutputOption = Output.TABLE,
) -> None:
    """Train once with each encoding, and compare bytes, communication time, round time and accuracy."""
    names = unique_names("--encodings", encodings.split(","))
    keys = {**preset_job(dataset), **_KEYS, "rounds": rounds, "subset_size": subset}
    root = data_root.absolute() if data_root else None
    experiments = {
        name: Experiment(make_job(clients, {**keys, "name": f"bench {name}", "encoding": name}), clients, root)
        for name in names
    }
    check_data_root(dataset, data_root)
    make_out_folder(out)
    results = {"dataset": str(dataset), "clients": clients, "rounds": rounds, "subset_size": subset} | _KEYS
    results["encodings"] = [
        summary(name, run_with_progress(experiment, out / name, label=name)) for name, experiment in experiments.items()
    ]
    results["central"] = _run_centrally(experiments[names[0]]) if central else None
    present(results, out / "federated.json", output, plot=_plot, print_results=_print)


def summary(encoding: str, result: Result) -> dict[str, Any]:
    """Return the row of one encoding: mean bytes per client and round, and the median seconds of a round."""
    report = result.report()
    published = [round_ for round_ in result.rounds if round_.phase == "published"]
    return {
        "encoding": encoding,
        "accuracy": report["accuracy"],
        "accuracies": [row["accuracy"] for row in report["rounds"]],
        "upload_bytes": fmean(figures.upload_per_client(round_) for round_ in published),
        "download_bytes": fmean(figures.download_per_client(round_) for round_ in published),
        "communication_seconds": median(figures.communication_seconds(round_) for round_ in published),
        "round_seconds": median(round_.seconds for round_ in published),
        "train_seconds_max": median(round_.train_seconds_max for round_ in published),
        "model_sha256": report["model_sha256"],
    }


def _run_centrally(experiment: Experiment) -> dict[str, Any]:
    console = stderr_console()

    def show(number: int, accuracy: float) -> None:
        console.print(f"central {number} of {experiment.job.rounds}: accuracy {percent(accuracy)}")

    return train_centrally(experiment.job, experiment.clients, data_root=experiment.data_root, show=show)


def _print(results: Mapping[str, Any]) -> None:
    rows = [
        (
            row["encoding"],
            percent(row["accuracy"]),
            size(row["upload_bytes"]),
            size(row["download_bytes"]),
            duration(row["communication_seconds"]),
            duration(row["round_seconds"]),
            duration(row["train_seconds_max"]),
        )
        for row in results["encodings"]
    ]
    if results["central"]:
        rows.append(("central", percent(results["central"]["accuracy"]), "-", "-", "-", "-", "-"))
    columns = ("encoding", "accuracy>", "upload/client>", "download/client>", "communication>", "round>", "training>")
    title = f"{results['dataset']}, {results['clients']} clients, {results['rounds']} rounds"
    print_table(f"{title}; mean bytes and median times of a round", columns, rows)


def _plot(results: Mapping[str, Any], directory: Path) -> None:
    from fedring.ctl.bench.plots import Bars, plot_bars  # matplotlib takes a second to import

    rows: Sequence[Mapping[str, Any]] = results["encodings"]
    names = [row["encoding"] for row in rows]

    def chart(title: str, file: str, values: list[float], labels: list[str], **more: Any) -> Bars:
        return Bars(title, f"federated-{file}.png", names, values, labels, **more)

    uploads = [row["upload_bytes"] for row in rows]
    communication = [row["communication_seconds"] for row in rows]
    times = [row["round_seconds"] for row in rows]
    accuracies = [100 * (row["accuracy"] or 0.0) for row in rows]
    central = 100 * results["central"]["accuracy"] if results["central"] else None
    lowest = min([*accuracies, central or accuracies[0]])
    charts = [
        chart("Upload per client and round", "bytes", uploads, [size(value) for value in uploads]),
        chart(
            "Communication per client and round",
            "communication",
            communication,
            [duration(value) for value in communication],
        ),
        chart("Time per round", "time", times, [duration(value) for value in times]),
        chart(
            "Accuracy after the last round, %",
            "accuracy",
            accuracies,
            [f"{value:.2f}" for value in accuracies],
            low=max(0.0, lowest - 1.0),
            reference=(central, f"all data in one place: {central:.2f} %") if central else None,
        ),
    ]
    plot_bars(charts, directory, "federated.png")
