"""Compare encodings on real daemons.

Training in one place is the upper bound.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Annotated, Any

import typer

from fedring.control import figures
from fedring.ctl.local.charts import Bars, Series, plot_panels
from fedring.ctl.local.experiment import Experiment, Result, make_job, run_with_progress
from fedring.ctl.local.presets import DataRootOption, Dataset, DatasetOption, check_data_root, preset_job
from fedring.ctl.local.ranks import Advance
from fedring.ctl.local.runner import present, unique_names
from fedring.ctl.options import OutputOption, make_out_folder
from fedring.ctl.output import Output, duration, print_table, size
from fedring.daemon.wording import counted
from fedring.offers import named
from fedring.train import Plan
from fedring.train.batches import size_of
from fedring.train.device import pick_device
from fedring.train.evaluation import evaluate
from fedring.train.jobs.job import Job
from fedring.train.loop import train
from fedring.train.names.offered import collect
from fedring.train.names.seam import build_model
from fedring.v1 import control_pb2 as pb
from tests.bench.lab.command import Command
from tests.bench.lab.lines import RateOption, SeedsOption, lines
from tests.bench.lab.networks import line_of
from tests.bench.lab.parts import Part, QuickOption, describe_run, run_parts, with_deviation

_ENCODINGS = "fp32,int8,fp32_sparse,sq8,packed,uniform"
_KEYS = {"batch_size": 64, "epochs": 1, "lr": 0.05, "momentum": 0.9, "seed": 0}


def federated(
    data_root: DataRootOption = None,
    dataset: DatasetOption = Dataset.MNIST,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="Rounds of training with each encoding.", show_default="10, with --quick 3"),
    ] = None,
    clients: Annotated[int, typer.Option(min=1, max=64, help="Client daemons to start.")] = 2,
    subset: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Samples that a client trains on in a round; 0 = all that it has.",
            show_default="6000, with --quick 1000",
        ),
    ] = None,
    encodings: Annotated[str, typer.Option(help="Encodings to compare, separated by commas.")] = _ENCODINGS,
    central: Annotated[bool, typer.Option(help="Also train on all data in one place, for comparison.")] = True,
    seeds: SeedsOption = None,
    rate: RateOption = "",
    quick: QuickOption = False,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder for federated.json, federated.png and the files of every run.")
    ] = Path("bench-out"),
    output: OutputOption = Output.TABLE,
) -> None:
    """Train with each encoding, and compare cost and accuracy.

    The comparison shows bytes, communication time, round time and accuracy over several seeds.
    """
    names = unique_names("--encodings", encodings.split(","))
    scale = {
        "rounds": rounds if rounds is not None else 3 if quick else 10,
        "subset_size": subset if subset is not None else 1000 if quick else 6000,
    }
    count, chosen = seeds or (1 if quick else 3), (rounds, subset) != (None, None)
    keys = {**preset_job(dataset), **_KEYS, **scale}
    root = data_root.absolute() if data_root else None
    jobs = {
        name: [make_job(clients, {**keys, "name": f"bench {name}", "encoding": name, "seed": s}) for s in range(count)]
        for name in names
    }
    check_data_root(dataset, data_root)
    with lines(clients, rate) as behind:
        make_out_folder(out)
        described = describe_run("federated", quick=quick, chosen=chosen) | {"network": behind.network.facts()}
        results = {**described, "dataset": str(dataset), "clients": clients, **scale, **_KEYS, "seeds": count}
        rows: list[dict[str, Any]] = []
        results["encodings"] = rows
        for name, trainings in jobs.items():
            runs = []
            for seed, job in enumerate(trainings):
                experiment = Experiment(job, clients, root, server=behind.server, place=behind.place)
                label = f"{name}, {len(rows) + 1} of {len(names)}, seed {seed + 1} of {count}"
                runs.append(run_with_progress(experiment, out / name / f"seed-{seed}", label=label))
            rows.append(summary(name, runs))
        results["central"] = _run_centrally(jobs[names[0]], clients, root) if central else None
    present(results, out / "federated.json", output, plot=_plot, print_results=_print)


def summary(encoding: str, runs: Sequence[Result]) -> dict[str, Any]:
    """Return the row of one encoding, over the trainings with all seeds.

    Bytes are means per client and round, times are medians, and `round_seconds_deviation` is the standard deviation
    over the rounds. `by_client` has the bytes and the communication of each client. Accuracies are means over the
    seeds; `by_seed` has those of each.
    """
    reports = [result.report() for result in runs]
    published = [round_ for result in runs for round_ in result.rounds if round_.phase == "published"]
    seconds = [round_.seconds for round_ in published]
    last = [report["accuracy"] for report in reports]
    rounds = zip(*(report["rounds"] for report in reports), strict=True)
    return {
        "encoding": encoding,
        "accuracy": fmean(last),
        "accuracy_deviation": pstdev(last),
        "accuracies": [fmean(row["accuracy"] for row in rows) for rows in rounds],
        "by_seed": [{"accuracy": one["accuracy"], "model_sha256": one["model_sha256"]} for one in reports],
        "upload_bytes": fmean(figures.upload_per_client(round_) for round_ in published),
        "download_bytes": fmean(figures.download_per_client(round_) for round_ in published),
        "communication_seconds": median(figures.communication_seconds(round_) for round_ in published),
        "round_seconds": median(seconds),
        "round_seconds_deviation": pstdev(seconds),
        "train_seconds_max": median(round_.train_seconds_max for round_ in published),
        "by_client": _by_client(published),
    }


def _by_client(rounds: Sequence[pb.Round]) -> dict[str, dict[str, float]]:
    """Return each client's bytes and communication over the rounds.

    These are the mean bytes, the median communication, and its standard deviation.
    """
    parts: dict[str, list[pb.RoundClient]] = {}
    for round_ in rounds:
        for client in round_.clients:
            if client.num_samples:
                parts.setdefault(client.client_id, []).append(client)
    return {
        name: {
            "upload_bytes": fmean(part.upload_bytes for part in mine),
            "download_bytes": fmean(part.download_bytes for part in mine),
            "communication_seconds": median(part.upload_seconds + part.download_seconds for part in mine),
            "communication_seconds_deviation": pstdev(part.upload_seconds + part.download_seconds for part in mine),
        }
        for name, mine in sorted(parts.items())
    }


def _run_centrally(jobs: Sequence[Job], clients: int, data_root: Path | None) -> dict[str, Any]:
    total = sum(job.rounds for job in jobs)

    def measure(advance: Advance) -> dict[str, Any]:
        done = 0

        def show(number: int, accuracy: float) -> None:
            nonlocal done
            done += 1
            advance(done / total)

        runs = [train_centrally(job, clients, data_root=data_root, show=show) for job in jobs]
        last = [run["accuracy"] for run in runs]
        curves = zip(*(run["accuracies"] for run in runs), strict=True)
        return {
            "accuracy": fmean(last),
            "accuracy_deviation": pstdev(last),
            "accuracies": [fmean(values) for values in curves],
            "train_seconds": fmean(run["train_seconds"] for run in runs),
        }

    result: dict[str, Any] = run_parts("federated", {"central": Part("all data in one place", 1.0, measure)})["central"]
    return result


def train_centrally(
    job: Job, clients: int, *, data_root: Path | None, show: Callable[[int, float], None]
) -> dict[str, Any]:
    """Train the job's model on all clients' samples of each round.

    Args:
        job: The job that the clients run.
        clients: Number of clients.
        data_root: Folder of the data sets.
        show: Called after each round with its number and the accuracy on the test samples, from 0 to 1.

    Returns:
        `accuracy` of the last round, `accuracies` of all, and `train_seconds`, the time without evaluation.
    """
    device = pick_device("auto")
    names = {"model": job.model, "data": job.data, "loss": job.loss, "optimizer": job.optimizer}
    offered = collect(named(**names), root=data_root)
    split = offered.get("data", job.data)(data_root, False)
    loss, optimizer = offered.get("loss", job.loss), offered.get("optimizer", job.optimizer)
    model = build_model(job.model, job.model_args, job.seed, offered).to(device)
    accuracies: list[float] = []
    seconds = 0.0
    for number in range(1, job.rounds + 1):
        settings = job.settings_of(number)
        plan = Plan(
            epochs=settings.epochs,
            batch_size=job.batch_size,
            lr=settings.lr,
            momentum=job.momentum,
            subset_size=min(clients * settings.subset_size, size_of(split.train)),
            seed=job.seed + number,
        )
        seconds += train(model, split.train, plan, loss=loss, optimizer_factory=optimizer, device=device).seconds
        counts = evaluate(model, split.test, loss=loss, device=device)
        assert counts.accuracy is not None  # all data sets of the presets have classes
        accuracies.append(counts.accuracy)
        show(number, accuracies[-1])
    return {"accuracy": accuracies[-1], "accuracies": accuracies, "train_seconds": seconds}


def _print(results: Mapping[str, Any]) -> None:
    rows = [
        (
            row["encoding"],
            with_deviation(row),
            size(row["upload_bytes"]),
            size(row["download_bytes"]),
            " / ".join(duration(client["communication_seconds"]) for client in row["by_client"].values()),
            duration(row["round_seconds"]),
            duration(row["train_seconds_max"]),
        )
        for row in results["encodings"]
    ]
    if results["central"]:
        rows.append(("central", with_deviation(results["central"]), "-", "-", "-", "-", "-"))
    clients = "communication of each client>"
    columns = ("encoding", "accuracy>", "upload/client>", "download/client>", clients, "round>", "training>")
    title = f"{results['dataset']}, {counted(results['clients'], 'client')}, {counted(results['rounds'], 'round')}"
    title += f", {counted(results['seeds'], 'seed')}, {line_of(results['network'])}"
    print_table(f"{title}; mean bytes and median times of a round", columns, rows)


def _plot(results: Mapping[str, Any], path: Path) -> None:
    rows: Sequence[Mapping[str, Any]] = results["encodings"]
    names = [row["encoding"] for row in rows]

    def by_client(key: str, *, deviations: bool = False) -> list[Series]:
        tables = {client: [row["by_client"].get(client, {}) for row in rows] for client in rows[0]["by_client"]}
        return [
            Series(
                client,
                [figures.get(key, 0.0) for figures in table],
                [figures.get(f"{key}_deviation", 0.0) for figures in table] if deviations else None,
            )
            for client, table in sorted(tables.items())
        ]

    times = Series("round", [row["round_seconds"] for row in rows], [row["round_seconds_deviation"] for row in rows])
    uploads = Series("upload", [row["upload_bytes"] for row in rows])
    accuracies = [100 * (row["accuracy"] or 0.0) for row in rows]
    central = 100 * results["central"]["accuracy"] if results["central"] else None
    lowest = min([*accuracies, central or accuracies[0]])
    panels = [
        Bars("Upload per client and round", "bytes", names, [uploads], size),
        Bars(
            "Communication in a round, median and deviation",
            "seconds",
            names,
            by_client("communication_seconds", deviations=True)[:7],
            duration,
        ),
        Bars("Time of a round, median and deviation", "seconds", names, [times], duration),
        Bars(
            f"Accuracy after the last round, {counted(results['seeds'], 'seed')}",
            "% of the test samples",
            names,
            [Series("accuracy", accuracies, [100 * row["accuracy_deviation"] for row in rows])],
            "{:.2f}".format,
            low=max(0.0, lowest - 1.0),
            reference=(central, f"all data in one place: {central:.2f} %") if central else None,
        ),
    ]
    plot_panels(panels, path)


main = Command(
    federated, "--data-root data", "--dataset digits --subset 0 --rounds 3", "--data-root data --rate 100mbit"
)

if __name__ == "__main__":
    sys.exit(main())
