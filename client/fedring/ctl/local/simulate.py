"""flctl simulate: thousands of clients in a few local processes.

There is no network.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import TextColumn

from fedring.control.failure import Failure
from fedring.ctl.local.presets import DataRootOption
from fedring.ctl.local.progress import progress_bar
from fedring.ctl.local.runner import ended_by_signals
from fedring.ctl.operate.job_control import Overrides, job_of
from fedring.ctl.options import OutputOption, make_out_folder
from fedring.ctl.output import Output, duration, number, percent, print_json, print_table, quality, size, stderr_console
from fedring.daemon.exits import Exit
from fedring.daemon.wording import counted
from fedring.extras import require
from fedring.train.metrics import is_evaluated

_ROWS = 20
"""The most rounds that the table shows: the last one, and others at equal distances."""


def simulate(
    job_file: Annotated[Path, typer.Argument(metavar="JOB", help="The job, as a .toml or .json file.")],
    overrides: Overrides = None,
    clients: Annotated[int, typer.Option(help="Clients to simulate.")] = 100,
    per_round: Annotated[
        int | None,
        typer.Option(help="Clients that are drawn for a round.", show_default="the job's sample_clients"),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Processes that train clients.", show_default="one for each core")
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(help="Threads of torch in each worker.", show_default="the worker's share of the cores"),
    ] = None,
    data_root: DataRootOption = None,
    device: Annotated[str, typer.Option(help="Where to train: auto, cpu, cuda or cuda:N.")] = "auto",
    engine: Annotated[
        str,
        typer.Option(
            help="How clients are trained: local (one by one, in processes of this machine), batched (many at once), "
            "auto (batched, or local if the job cannot be batched) or ray (one by one, on a Ray cluster)."
        ),
    ] = "local",
    labels: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE,...",
            help="Labels of the clients, for the job's [[override]]. Give several, and the clients take them in turns; "
            'with "", a client has none.',
        ),
    ] = None,
    batch_mb: Annotated[
        int, typer.Option(help="The most memory of the clients that a worker trains at once, in MB.")
    ] = 512,
    timing: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="How long clients take, as a .toml or .json file: rounds go by virtual time (virtual.png).",
        ),
    ] = None,
    beside: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="The --out of an earlier simulation with --timing, for the same virtual.png."),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the report, the model and the plot.")] = Path(
        "simulation"
    ),
    seed: Annotated[
        int | None,
        typer.Option(help="Seed of the model, the partition and all choices.", show_default="the job's seed"),
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Run a federated job with simulated clients, without a server.

    The clients take turns in a few processes. The clients have the ids client-0, client-1 and so on, and each has its
    part of the job's data. The models are those that real daemons would make. Afterwards --out holds report.json,
    model.safetensors and rounds.png.
    """
    require("bench")
    from fedring.simulation import simulate as run  # imports torch, which most verbs do not need

    job = job_of(job_file, overrides or [])
    if beside and timing is None:
        raise Failure("--beside needs --timing: without it, nothing takes time", Exit.USAGE)
    others = {str(folder): _timed_report(folder) for folder in beside or []}
    make_out_folder(out)
    (out / "report.json").unlink(missing_ok=True)  # of an earlier simulation
    with ended_by_signals(), _progress(str(job.get("name", job_file.stem))) as show:
        report = run(
            job,
            clients=clients,
            per_round=per_round,
            workers=workers,
            threads=threads,
            data_root=data_root,
            device=device,
            engine=engine,
            labels=[_labels_in(text) for text in labels or []],
            batch_mb=batch_mb,
            timing=timing,
            seed=seed,
            out=out,
            show=show,
        )
    from fedring.ctl.local.charts import plot_over_time, plot_rounds  # matplotlib takes a second to import

    plot_rounds(report, out / "rounds.png")
    if timing is not None:
        plot_over_time({**others, str(out): report}, out / "virtual.png")
    if output is Output.JSON:
        print_json(report)
    else:
        _print(report)
        plots = "rounds.png" if timing is None else "rounds.png, virtual.png"
        stderr_console().print(f"report.json, model.safetensors and {plots} are in {out}")
    warnings = [warning for row in report["rounds"] for warning in row.get("warnings", ())]
    if warnings and not any(is_evaluated(row["metrics"]) for row in report["rounds"]):
        raise Failure(f"none of the models was evaluated: {warnings[-1]}".rstrip("."))
    if warnings:
        text = f"{counted(len(warnings), 'warning')} on evaluations; the newest: {warnings[-1]}"
        stderr_console().print(text, markup=False, highlight=False, soft_wrap=True)


def _timed_report(folder: Path) -> Mapping[str, Any]:
    """Return the report of an earlier simulation with a timing.

    Raises:
        Failure: There is none.
    """
    try:
        report: Mapping[str, Any] = json.loads((folder / "report.json").read_bytes())
        for row in report["rounds"]:
            _ = float(row["virtual"]["ended"]), float(row["accuracy"] or 0.0), float(row["loss"] or 0.0)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Failure(f"--beside {folder} holds no report.json of a simulation with --timing", Exit.USAGE) from error
    return report


def _labels_in(text: str) -> dict[str, str]:
    """Return the labels that a text such as "gpu=yes,site=eu" names.

    Raises:
        Failure: It does not have that form.
    """
    pairs = [part.strip().partition("=") for part in text.split(",") if part.strip()]
    if wrong := next((name for name, equals, _ in pairs if not equals), ""):
        raise Failure(f"--labels {wrong!r} is not of the form NAME=VALUE", Exit.USAGE)
    return {name: value for name, _, value in pairs}


@contextmanager
def _progress(label: str) -> Iterator[Callable[[float, dict[str, Any] | None], None]]:
    """Show a bar on stderr with the last round's result.

    Nothing is shown if stderr is no terminal.
    """
    with progress_bar(TextColumn("{task.fields[summary]}", markup=False)) as progress:
        task = progress.add_task(label, total=1.0, summary="loading")

        def show(share: float, row: dict[str, Any] | None) -> None:
            result = f"round {row['round']}  {quality(row['accuracy'], row['loss'])}" if row else "round 1"
            progress.update(task, completed=share, summary=result)

        yield show


def _print(report: Mapping[str, Any]) -> None:
    rows: list[Mapping[str, Any]] = report["rounds"]
    step = -(-len(rows) // _ROWS)
    table = [
        (
            str(row["round"]),
            str(row["clients"]),
            percent(row["accuracy"]),
            number(row["loss"]),
            duration(row["seconds"]),
            size(row["upload_bytes"]),
        )
        for row in rows[::-1][::step][::-1]
    ]
    facts = (
        f"{report['clients']:,} client{'' if report['clients'] == 1 else 's'}",
        quality(report["accuracy"], report["loss"]),
        f"{duration(report['virtual_seconds'])} of virtual time" if "virtual_seconds" in report else "",
        f"{report['updates_per_second']:,.0f} updates/s",
    )
    columns = ("round>", "clients>", "accuracy>", "loss>", "time>", "upload/client>")
    print_table(", ".join(filter(None, facts)), columns, table)
    if without := report["clients_without_samples"]:
        stderr_console().print(f"{without:,} of the clients have no samples, and were not drawn")
