"""flctl bench federated: encodings side by side, on real daemons, with training in one place as the ceiling."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

import typer

from fedring.ctl.bench.central import train_centrally
from fedring.ctl.bench.experiment import Experiment, Result, make_job, run_experiment
from fedring.ctl.bench.presets import Dataset, check_data_root, preset_job
from fedring.ctl.failure import Failure
from fedring.ctl.operate import round_figures
from fedring.ctl.operate.event_display import people_display
from fedring.ctl.options import OutputOption, make_out_folder
from fedring.ctl.output import Output, duration, percent, print_json, print_table, size, stderr_console
from fedring.daemon.exits import Exit

_ENCODINGS = "fp32,int8,fp32_sparse,sq8,packed,uniform"
_KEYS = {"batch_size": 64, "epochs": 1, "lr": 0.05, "momentum": 0.9, "seed": 0}


def federated(
    data_root: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the data sets.")] = None,
    dataset: Annotated[Dataset, typer.Option(help="All but digits need --data-root.")] = Dataset.MNIST,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each run.")] = 10,
    clients: Annotated[int, typer.Option(min=1, max=64, help="Client daemons.")] = 2,
    subset: Annotated[int, typer.Option(min=0, help="Samples a client draws each round; 0 = all it has.")] = 6000,
    encodings: Annotated[str, typer.Option(help="Comma-separated.")] = _ENCODINGS,
    central: Annotated[bool, typer.Option(help="Train on all data in one place, too.")] = True,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where federated.json, plots and runs go.")] = Path(
        "bench-out"
    ),
    output: OutputOption = Output.TABLE,
) -> None:
    """Train once per encoding, and compare bytes, communication time, round time and accuracy."""
    names = [name.strip() for name in encodings.split(",") if name.strip()]
    if not names or len(set(names)) != len(names):
        raise Failure("--encodings needs names, each once, separated by commas", Exit.USAGE)
    keys = {**preset_job(dataset), **_KEYS, "rounds": rounds, "subset_size": subset}
    root = data_root.absolute() if data_root else None
    experiments = {
        name: Experiment(make_job(clients, {**keys, "name": f"bench {name}", "encoding": name}), clients, root)
        for name in names
    }
    check_data_root(dataset, data_root)
    make_out_folder(out)
    results = {"dataset": str(dataset), "clients": clients, "rounds": rounds, "subset_size": subset} | _KEYS
    results["encodings"] = [_run(name, experiment, out / name) for name, experiment in experiments.items()]
    results["central"] = _run_centrally(experiments[names[0]]) if central else None
    (out / "federated.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    _plot(results, out)
    if output is Output.JSON:
        return print_json(results)
    _print(results)
    stderr_console().print(f"federated.json, the plots and every run are in {out}")


def summary(encoding: str, result: Result) -> dict[str, Any]:
    """What one encoding came to: per client and round, mean bytes and median seconds."""
    report = result.report()
    published = [round_ for round_ in result.rounds if round_.phase == "published"]
    return {
        "encoding": encoding,
        "accuracy": report["accuracy"],
        "accuracies": [row["accuracy"] for row in report["rounds"]],
        "upload_bytes": fmean(round_figures.upload_per_client(round_) for round_ in published),
        "download_bytes": fmean(round_figures.download_per_client(round_) for round_ in published),
        "communication_seconds": median(round_figures.communication_seconds(round_) for round_ in published),
        "round_seconds": median(round_.seconds for round_ in published),
        "train_seconds_max": median(round_.train_seconds_max for round_ in published),
        "model_sha256": report["model_sha256"],
    }


def _run(name: str, experiment: Experiment, directory: Path) -> dict[str, Any]:
    directory.mkdir(parents=True, exist_ok=True)
    with people_display(rounds=experiment.job.rounds, label=name) as show:
        return summary(name, run_experiment(experiment, directory, show))


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
    print_table(f"{title}; mean bytes and median times a round", columns, rows)


def _plot(results: Mapping[str, Any], directory: Path) -> None:
    from fedring.ctl.bench.plots import Bars, plot_bars  # matplotlib takes a second to import

    rows: Sequence[Mapping[str, Any]] = results["encodings"]
    names = [row["encoding"] for row in rows]

    def chart(title: str, file: str, values: list[float], labels: list[str], **more: Any) -> Bars:
        return Bars(title, f"federated-{file}.png", names, values, labels, **more)

    sent = [row["upload_bytes"] for row in rows]
    talked = [row["communication_seconds"] for row in rows]
    took = [row["round_seconds"] for row in rows]
    right = [100 * (row["accuracy"] or 0.0) for row in rows]
    ceiling = 100 * results["central"]["accuracy"] if results["central"] else None
    seen: list[float] = [*right, ceiling or right[0]]
    low = max(0.0, min(seen) - 1.0)
    reference = (ceiling, f"all data in one place: {ceiling:.2f} %") if ceiling else None
    charts = [
        chart("Upload per client and round", "bytes", sent, [size(value) for value in sent]),
        chart("Communication per client and round", "communication", talked, [duration(value) for value in talked]),
        chart("Time per round", "time", took, [duration(value) for value in took]),
        chart(
            "Accuracy after the last round, %",
            "accuracy",
            right,
            [f"{value:.2f}" for value in right],
            low=low,
            reference=reference,
        ),
    ]
    plot_bars(charts, directory, "federated.png")
