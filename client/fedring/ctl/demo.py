"""flctl demo: a real server and real clients on this machine, from nothing to a trained model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from fedring.ctl.experiment import Experiment, make_job, run_experiment
from fedring.ctl.failure import Failure
from fedring.ctl.options import OutputOption
from fedring.ctl.output import Output, duration, number, percent, print_json, print_table, size, stderr_console
from fedring.ctl.paths import make_folder
from fedring.ctl.presets import PRESETS, Dataset, Mode, check_data_root, preset_job
from fedring.ctl.progress import people_display
from fedring.daemon.exits import Exit
from fedring.train.data_parallel_table import HOOKS

_TRAINING, _SENDING, _SAMPLES, _GROUP, _STAGES = "Training", "Sending", "Samples", "Data-parallel", "Pipeline"
_ONLY_OF = {  # options without a meaning in the other modes
    Mode.FEDERATED: ("encoding", "partition", "alpha"),
    Mode.DATA_PARALLEL: ("hook", "ratio"),
    Mode.PIPELINE: ("schedule", "micro_batches"),
}


def demo(
    dataset: Annotated[Dataset, typer.Option(help="All but digits need --data-root.")] = Dataset.DIGITS,
    data_root: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the data sets.")] = None,
    mode: Annotated[
        Mode, typer.Option(help="Each client by itself, all as workers that share batches, or as stages.")
    ] = Mode.FEDERATED,
    clients: Annotated[int | None, typer.Option(min=1, max=64, help="Client daemons.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds of the job.")] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where report, model, plot, logs and state go.")] = Path(
        "demo"
    ),
    epochs: Annotated[int | None, typer.Option(rich_help_panel=_TRAINING, help="Passes a round.")] = None,
    batch_size: Annotated[int | None, typer.Option(rich_help_panel=_TRAINING, help="Samples a step.")] = None,
    lr: Annotated[float | None, typer.Option(rich_help_panel=_TRAINING, help="Learning rate.")] = None,
    momentum: Annotated[float | None, typer.Option(rich_help_panel=_TRAINING, help="Of the optimizer.")] = None,
    seed: Annotated[int | None, typer.Option(rich_help_panel=_TRAINING, help="Of model, parts and drawings.")] = None,
    encoding: Annotated[
        str | None, typer.Option(rich_help_panel=_SENDING, help="fp32, int8, fp32_sparse, sq8, packed, uniform, ...")
    ] = None,
    keep_ratio: Annotated[
        float | None, typer.Option(rich_help_panel=_SENDING, help="Share that sparse encodings keep.")
    ] = None,
    chunk: Annotated[int | None, typer.Option(rich_help_panel=_SENDING, help="Values that share a scale.")] = None,
    step: Annotated[float | None, typer.Option(rich_help_panel=_SENDING, help="Quantisation step of uniform.")] = None,
    download_encoding: Annotated[
        str | None, typer.Option(rich_help_panel=_SENDING, help="How models are sent: full, or an encoding.")
    ] = None,
    subset: Annotated[
        int | None, typer.Option(rich_help_panel=_SAMPLES, help="Samples a client draws each round; 0 = all it has.")
    ] = None,
    partition: Annotated[
        str | None, typer.Option(rich_help_panel=_SAMPLES, help="none, iid, shards or dirichlet.")
    ] = None,
    alpha: Annotated[float | None, typer.Option(rich_help_panel=_SAMPLES, help="Of dirichlet; small = skewed.")] = None,
    hook: Annotated[
        str | None, typer.Option(rich_help_panel=_GROUP, help=f"How gradients are sent: {', '.join(HOOKS)}.")
    ] = None,
    ratio: Annotated[
        float | None, typer.Option(rich_help_panel=_GROUP, help="Share of the gradient that dgc and topk send.")
    ] = None,
    schedule: Annotated[
        str | None, typer.Option(rich_help_panel=_STAGES, help="gpipe, 1f1b or pipedream; each client is a stage.")
    ] = None,
    micro_batches: Annotated[
        str | None, typer.Option(rich_help_panel=_STAGES, help="Parts of a batch; auto = the fastest number.")
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Train a model here and now, with real daemons on free ports.

    Leaves report.json, model.safetensors, rounds.png, logs and state below --out. Ctrl-C ends everything it started.
    What is not given is what fits the data set.
    """
    given = {
        "rounds": rounds,
        "epochs": epochs,
        "batch_size": batch_size,
        "lr": lr,
        "momentum": momentum,
        "seed": seed,
        "encoding": encoding,
        "keep_ratio": keep_ratio,
        "chunk": chunk,
        "step": step,
        "download_encoding": download_encoding,
        "subset_size": subset,
        "partition": partition,
        "alpha": alpha,
    }
    count = clients or (2 if mode is Mode.PIPELINE else PRESETS[dataset].clients)
    tables: dict[str, dict[str, Any]] = {
        "data_parallel": {"hook": hook, "ratio": ratio},
        "pipeline": {"stages": count, "schedule": schedule, "micro_batches": _number(micro_batches)},
    }
    _check_mode(mode, {**given, **tables["data_parallel"], **tables["pipeline"]})
    keys = preset_job(dataset, mode) | {key: value for key, value in given.items() if value is not None}
    if mode is not Mode.FEDERATED:
        keys[mode] = {key: value for key, value in tables[mode].items() if value is not None}
    experiment = Experiment(make_job(count, keys), count, data_root.absolute() if data_root else None, web=True)
    check_data_root(dataset, data_root)
    make_folder(out)
    run_demo(experiment, out, label=str(dataset), output=output)


def run_demo(experiment: Experiment, out: Path, *, label: str, output: Output) -> None:
    """The experiment has run, and its report is on stdout and, with a plot, in `out`."""
    with people_display(rounds=experiment.job.rounds, label=label) as show:
        result = run_experiment(experiment, out, show)
    report = result.report()
    from fedring.ctl.plots import plot_rounds  # matplotlib takes a second to import

    plot_rounds(report, out / "rounds.png")
    if output is Output.JSON:
        return print_json(report)
    _print_report(label, report)
    stderr_console().print(f"report.json, model.safetensors, rounds.png and logs are in {out}")


def _check_mode(mode: Mode, given: Mapping[str, Any]) -> None:
    """Failure if an option is given that only another mode knows."""
    for owner, names in _ONLY_OF.items():
        for name in names:
            if owner is not mode and given[name] is not None:
                option = f"--{name.replace('_', '-')}"
                raise Failure(f"{option} belongs to --mode {owner}, not to {mode}: leave it out", Exit.USAGE)


def _number(text: str | None) -> int | str | None:
    """What a number of micro-batches is said by."""
    return int(text) if text is not None and text.isdecimal() else text


def _print_report(label: str, report: Mapping[str, Any]) -> None:
    rows = [
        (
            str(row["round"]),
            str(row["clients"]),
            percent(row["accuracy"]),
            number(row["loss"]),
            duration(row["seconds"]),
            duration(row["train_seconds_max"]),
            size(row["upload_bytes"]),
            size(row["download_bytes"]),
        )
        for row in report["rounds"]
    ]
    if "workers" in report["rounds"][-1]:
        return _print_profile(label, report)
    columns = ("round>", "clients>", "accuracy>", "loss>", "time>", "training>", "upload/client>", "download/client>")
    title = f"{label}: {report['parameters']:,} parameters, accuracy {percent(report['accuracy'])}"
    print_table(title, columns, rows)


def _print_profile(label: str, report: Mapping[str, Any]) -> None:
    """What the workers of each round did, added up; times are means."""
    rows = []
    for row in report["rounds"]:
        workers = list(row["workers"].values())
        if not workers:  # an abandoned round
            continue
        rate = sum(worker["samples_per_second"] for worker in workers if not worker.get("stage"))  # each sample once
        sent = sum(worker["bytes_sent"] for worker in workers)
        means = {key: sum(worker[key] for worker in workers) / len(workers) for key in ("seconds", "wait_seconds")}
        rows.append(
            (
                str(row["round"]),
                str(row["clients"]),
                percent(row["accuracy"]),
                number(row["loss"]),
                duration(row["seconds"]),
                duration(means["seconds"]),
                duration(means["wait_seconds"]),
                f"{rate:,.0f}",
                size(round(sent / len(workers))),
            )
        )
    columns = (
        "round>",
        "workers>",
        "accuracy>",
        "loss>",
        "time>",
        "training>",
        "waiting>",
        "samples/s>",
        "sent/worker>",
    )
    title = f"{label}: {report['parameters']:,} parameters, accuracy {percent(report['accuracy'])}"
    print_table(title, columns, rows)
