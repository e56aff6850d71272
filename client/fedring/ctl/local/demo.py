"""flctl demo: train with a real server and clients on this machine."""

import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from fedring.control.failure import Failure
from fedring.ctl.fleet import Fleet
from fedring.ctl.local.experiment import Experiment, Result, make_job, run_with_progress
from fedring.ctl.local.presets import (
    PRESETS,
    DataRootOption,
    Dataset,
    DatasetOption,
    Mode,
    check_data_root,
    preset_job,
)
from fedring.ctl.options import OutputOption, make_out_folder
from fedring.ctl.output import Output, duration, number, percent, print_json, print_table, quality, size, stderr_console
from fedring.daemon.exits import Exit
from fedring.daemon.signals import wait
from fedring.extras import require
from fedring.train.jobs.data_parallel_table import HOOKS

_TRAINING, _SENDING, _SAMPLES, _GROUP, _STAGES = "Training", "Sending", "Samples", "Data-parallel", "Pipeline"
_ONLY_IN = {  # options that have no meaning in the other modes
    Mode.FEDERATED: ("encoding", "partition", "alpha"),
    Mode.DATA_PARALLEL: ("hook", "ratio"),
    Mode.PIPELINE: ("schedule", "micro_batches"),
}


def demo(
    dataset: DatasetOption = Dataset.DIGITS,
    data_root: DataRootOption = None,
    mode: Annotated[
        Mode,
        typer.Option(
            help="How the clients train: each on its own samples (federated), on parts of one batch (data_parallel), "
            "or each on a stage of the model (pipeline)."
        ),
    ] = Mode.FEDERATED,
    clients: Annotated[int | None, typer.Option(min=1, max=64, help="Client daemons to start.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds of the job.")] = None,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder for the report, the model, the plot, logs and state.")
    ] = Path("demo"),
    epochs: Annotated[
        int | None, typer.Option(rich_help_panel=_TRAINING, help="Passes over a client's samples in a round.")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(rich_help_panel=_TRAINING, help="Samples of a step.")] = None,
    lr: Annotated[float | None, typer.Option(rich_help_panel=_TRAINING, help="Learning rate.")] = None,
    momentum: Annotated[
        float | None, typer.Option(rich_help_panel=_TRAINING, help="Momentum of the optimizer.")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(rich_help_panel=_TRAINING, help="Seed of the model, the partition and the choice of samples."),
    ] = None,
    encoding: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_SENDING, help="Encoding of updates: fp32, int8, fp32_sparse, sq8, packed, uniform, ..."
        ),
    ] = None,
    keep_ratio: Annotated[
        float | None,
        typer.Option(rich_help_panel=_SENDING, help="Share of the values that sparse encodings send; 0 to 1."),
    ] = None,
    chunk: Annotated[
        int | None, typer.Option(rich_help_panel=_SENDING, help="Values that share one scale when they are quantised.")
    ] = None,
    step: Annotated[
        float | None, typer.Option(rich_help_panel=_SENDING, help="Quantisation step of the encoding uniform.")
    ] = None,
    download_encoding: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_SENDING, help="How models are sent to clients: full, or the encoding of their changes."
        ),
    ] = None,
    subset: Annotated[
        int | None,
        typer.Option(rich_help_panel=_SAMPLES, help="Samples that a client trains on in a round; 0 = all that it has."),
    ] = None,
    partition: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_SAMPLES, help="How samples are divided among clients: none, iid, shards or dirichlet."
        ),
    ] = None,
    alpha: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=_SAMPLES, help="Parameter of dirichlet: the smaller, the more the clients' data differ."
        ),
    ] = None,
    hook: Annotated[
        str | None, typer.Option(rich_help_panel=_GROUP, help=f"How gradients are sent: {', '.join(HOOKS)}.")
    ] = None,
    ratio: Annotated[
        float | None,
        typer.Option(rich_help_panel=_GROUP, help="Share of the gradient that dgc and topk send; 0 to 1."),
    ] = None,
    schedule: Annotated[
        str | None, typer.Option(rich_help_panel=_STAGES, help="Order of the stages' work: gpipe, 1f1b or pipedream.")
    ] = None,
    micro_batches: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_STAGES, help="Micro-batches of a batch; auto = try several numbers, and use the fastest."
        ),
    ] = None,
    private: Annotated[
        bool,
        typer.Option(
            "--private",
            help="Show secure aggregation instead: a client is killed on the way, and the server's state is searched "
            "for updates. Only --clients, --rounds, --out and --output belong to it.",
        ),
    ] = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the server, its page and the clients running afterwards, until Ctrl-C.")
    ] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Train a model with a real server and clients on this machine.

    They use free ports. Afterwards --out holds report.json, model.safetensors, rounds.png, logs and state. Ctrl-C stops
    everything that was started. Options that you leave out have values that suit the data set.
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
    if private:
        others = {**given, "mode": mode if mode is not Mode.FEDERATED else None, "data_root": data_root, "hook": hook}
        others |= {"ratio": ratio, "schedule": schedule, "micro_batches": micro_batches, "keep": keep or None}
        return _private(clients, rounds, out, output, others)
    count = clients or (2 if mode is Mode.PIPELINE else PRESETS[dataset].clients)
    tables: dict[str, dict[str, Any]] = {
        "data_parallel": {"hook": hook, "ratio": ratio},
        "pipeline": {"stages": count, "schedule": schedule, "micro_batches": _number_or_word(micro_batches)},
    }
    _check_mode(mode, {**given, **tables["data_parallel"], **tables["pipeline"]})
    require("server")
    require("bench")
    keys = preset_job(dataset, mode, hook or "none") | {key: value for key, value in given.items() if value is not None}
    if mode is not Mode.FEDERATED:
        keys[mode] = keys.get(mode, {}) | {key: value for key, value in tables[mode].items() if value is not None}
    experiment = Experiment(make_job(count, keys), count, data_root.absolute() if data_root else None, web=True)
    check_data_root(dataset, data_root)
    make_out_folder(out)
    run_demo(experiment, out, label=str(dataset), keep=keep, output=output)


def _private(clients: int | None, rounds: int | None, out: Path, output: Output, others: Mapping[str, Any]) -> None:
    from fedring.ctl.local.private_demo import CLIENTS, ROUNDS, check_size, private_demo  # imports torch

    clients, rounds = clients or CLIENTS, rounds or ROUNDS
    for name, value in others.items():
        if value is not None and name != "rounds":
            raise Failure(f"--{name.replace('_', '-')} does not belong to --private: leave it out", Exit.USAGE)
    if wrong := check_size(clients, rounds):
        raise Failure(wrong, Exit.USAGE)
    make_out_folder(out)
    private_demo(clients, rounds, out, output)


def run_demo(experiment: Experiment, out: Path, *, label: str, keep: bool, output: Output) -> None:
    """Run the experiment, plot its rounds into `out`, and print its report.

    Args:
        experiment: What to run.
        out: Folder of the report, the model, the plot, logs and state.
        label: Title of the progress bar and of the table.
        keep: Whether the daemons go on until Ctrl-C.
        output: How the report is printed.

    Raises:
        Failure: The job did not complete, or a daemon ended before it.
    """

    def before_end(result: Result, fleet: Fleet) -> None:
        from fedring.ctl.local.charts import plot_rounds  # matplotlib takes a second to import

        report = result.report()
        plot_rounds(report, out / "rounds.png")
        if output is Output.JSON:
            print_json(report)
        else:
            _print_report(label, report)
            stderr_console().print(f"report.json, model.safetensors, rounds.png and the logs are in {out}")
        if keep:
            _wait(fleet)

    run_with_progress(experiment, out, label=label, before_end=before_end)


def _wait(fleet: Fleet) -> None:
    """Wait until Ctrl-C, or until a daemon ends, which is a Failure."""
    died = threading.Event()
    fleet.on_death(died.set)
    place = f"the page is at {fleet.web}, and flctl reaches the server with -s {fleet.control}"
    with suppress(KeyboardInterrupt):
        stderr_console().print(f"the server and the clients go on until Ctrl-C: {place}", soft_wrap=True)
        wait(died)
        raise fleet.failure() or Failure("a daemon has ended")


def _check_mode(mode: Mode, given: Mapping[str, Any]) -> None:
    """Raise a Failure if an option belongs to another mode only."""
    for owner, names in _ONLY_IN.items():
        for name in names:
            if owner is not mode and given[name] is not None:
                option = f"--{name.replace('_', '-')}"
                raise Failure(f"{option} belongs to --mode {owner}, not to {mode}: leave it out", Exit.USAGE)


def _number_or_word(text: str | None) -> int | str | None:
    return int(text) if text is not None and text.isdecimal() else text


def _print_report(label: str, report: Mapping[str, Any]) -> None:
    if "workers" in report["rounds"][-1]:
        return _print_profile(label, report)
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
    columns = ("round>", "clients>", "accuracy>", "loss>", "time>", "training>", "upload/client>", "download/client>")
    print_table(_title(label, report), columns, rows)


def _print_profile(label: str, report: Mapping[str, Any]) -> None:
    """Print the joint work of each round's workers.

    It is their total rate, and their mean times and bytes.
    """
    rows, sent_by_one = [], 0.0
    for row in report["rounds"]:
        workers = list(row["workers"].values())
        if not workers:  # an abandoned round
            continue
        # Every sample passes through each stage, so only those of stage 0 count.
        rate = sum(worker["samples_per_second"] for worker in workers if not worker.get("stage"))
        sent = sum(worker["bytes_sent"] for worker in workers)
        sent_by_one += sent / len(workers)
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
    print_table(f"{_title(label, report)}, {size(round(sent_by_one))} sent per worker", columns, rows)


def _title(label: str, report: Mapping[str, Any]) -> str:
    figure = quality(report["accuracy"], report["loss"])
    return ", ".join(filter(None, (f"{label}: {report['parameters']:,} parameters", figure)))
