"""flctl try: a job with real daemons on this machine."""

import fcntl
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from fedring.control.failure import Failure
from fedring.ctl.completion import job_keys
from fedring.ctl.fleet import Fleet
from fedring.ctl.local.experiment import BEST, Experiment, Result, run_with_progress
from fedring.ctl.local.presets import PRESETS, DataRootOption, Dataset, Mode, check_data_root, preset_job
from fedring.ctl.operate.event_display import display, progress_on_stderr
from fedring.ctl.operate.job_control import job_of
from fedring.ctl.options import OutputOption, make_out_folder
from fedring.ctl.output import (
    Output,
    duration,
    number,
    percent,
    print_json,
    print_table,
    quality,
    say,
    size,
    stderr_console,
)
from fedring.ctl.own_code import find_code, names_by_module
from fedring.daemon.config import explain, merge
from fedring.daemon.exits import Exit
from fedring.daemon.signals import wait
from fedring.extras import require
from fedring.train.jobs.job import Job
from fedring.train.jobs.pipeline_table import Pipeline
from fedring.train.jobs.start import FRESH

PRIVATE = "private"
CONSENT = "consent"
BUILT_IN = (*map(str, Dataset), PRIVATE, CONSENT)
"""The names of the built-in jobs. The last two show secure aggregation and consent, and have courses of their own."""

_CLIENTS = 3  # unless the job, or the command line, says otherwise


def try_(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[JOB] [KEY=VALUE]...",
            help=f"The job, as a .toml or .json file, or one of the built-in jobs {', '.join(BUILT_IN)} "
            "(digits is the default); and keys of the job, such as epochs=2 or lr=0.1.",
            autocompletion=job_keys,
            show_default=False,
        ),
    ] = None,
    sites: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="DIR...",
            help="A folder for each client, its data_root: all words behind it that are no job and no KEY=VALUE.",
        ),
    ] = None,
    clients: Annotated[
        int | None,
        typer.Option(
            min=1, max=64, help="Clients, among whom one data set is divided.", show_default="what suits the job"
        ),
    ] = None,
    data_root: DataRootOption = None,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder for the models, the report, the plot, logs and state.")
    ] = Path("try"),
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the server, its page and the clients running afterwards, until Ctrl-C.")
    ] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Run a job with a real server and clients on this machine.

    It starts fl-server and one fl-client for each of --sites, or as many as --clients says, on free loopback ports,
    runs the job, and stops them. Without a job it trains on handwritten digits that are built in. Your own functions
    are found in the folder of the job, in the current one, or where they are installed, and need no mark: these daemons
    trust what your job names. Afterwards --out holds model.safetensors, best.safetensors (of the best round),
    report.json, rounds.png, and the logs and the state of all daemons.

    The job private shows secure aggregation: a client is killed on the way, and the server's state is searched for
    updates. Of keys, it takes rounds only. The job consent shows sites that approve jobs, an operator who signs them,
    and logs that cannot be rewritten. It takes no keys.
    """
    name, keys, folders = sort_words(words or [], sites or [])
    if folders and clients:
        raise Failure("--sites has a client for each folder: leave --clients out", Exit.USAGE)
    if folders and data_root:
        raise Failure("--sites names the folders of the clients' data: leave --data-root out", Exit.USAGE)
    for folder in folders:
        if not folder.is_dir():
            raise Failure(f"--sites {folder} is not a folder", Exit.CONFIG)
    if data_root is not None and not data_root.is_dir():
        raise Failure(f"--data-root {data_root} is not a folder", Exit.CONFIG)
    if name == PRIVATE:
        others = {"--sites": folders, "--data-root": data_root, "--keep": keep}
        return _private(clients, job_of(None, keys), out, output, others)
    if name == CONSENT:
        options = {"--sites": folders, "--data-root": data_root, "--keep": keep}
        return _consent(out, output, {**options, "--clients": clients, **dict.fromkeys(job_of(None, keys), True)})
    require("server")
    require("bench")
    experiment = _experiment(name, keys, folders, clients, data_root)
    make_out_folder(out)
    with _reserved(out):
        _run(experiment, out, label=name if name in BUILT_IN else experiment.job.name, keep=keep, output=output)


def sort_words(words: Sequence[str], sites: Sequence[Path]) -> tuple[str, list[str], list[Path]]:
    """Return the job, the keys, and the folders of the sites.

    Of an option with several values, click reads the first one only; the others are among the words.
    """
    keys = [word for word in words if "=" in word]
    plain = [word for word in words if "=" not in word]
    jobs = [word for word in plain if word in BUILT_IN or word.endswith((".toml", ".json"))]
    others = [word for word in plain if word not in jobs]
    if len(jobs) > 1:
        raise Failure(f"{jobs[0]} and {jobs[1]} are two jobs: give one", Exit.USAGE)
    if others and not sites:
        advice = f"name a .toml or .json file, or one of {', '.join(BUILT_IN)}"
        raise Failure(f"{others[0]} is no job and no KEY=VALUE: {advice}", Exit.USAGE)
    return next(iter(jobs), str(Dataset.DIGITS)), keys, [*sites, *map(Path, others)]


def _experiment(
    name: str, words: Sequence[str], sites: Sequence[Path], clients: int | None, data_root: Path | None
) -> Experiment:
    """Return the job and its clients, after all checks.

    Raises:
        Failure: The job is wrong, needs other clients, or names code that is not there.
    """
    wanted = len(sites) or clients or 0
    if name in BUILT_IN:
        dataset = Dataset(name)
        check_data_root(dataset, data_root)
        keys, usual, beside = _built_in(dataset, job_of(None, words), wanted), PRESETS[dataset].clients, Path()
    else:
        keys, usual, beside = job_of(Path(name), words), _CLIENTS, Path(name).parent
    count = wanted or _workers(keys) or keys.get("min_clients", usual)
    everyone = {"min_clients": count}
    if name in BUILT_IN:
        everyone["min_clients_to_aggregate"] = keys.get("min_clients", count)
    try:
        job = Job.model_validate({"start": FRESH, **everyone, "barrier_timeout_seconds": 120.0, **keys})
    except ValidationError as error:
        raise Failure(explain(error, {}, Job), Exit.CONFIG) from error
    _check_clients(job, count, sites)
    folders = tuple(dict.fromkeys((beside.resolve(), Path.cwd())))
    for top, place in find_code(job, folders).items():
        names = ", ".join(names_by_module(job)[top])
        stderr_console().print(f"the daemons trust {names} of {place}", soft_wrap=True)
    return Experiment(
        job,
        count,
        data_root.absolute() if data_root else None,
        web=True,
        sites=tuple(site.resolve() for site in sites),
        code=folders,
    )


def _built_in(dataset: Dataset, given: Mapping[str, Any], clients: int) -> dict[str, Any]:
    """Return the keys of a built-in job, with the given ones."""
    mode, hook = Mode(given.get("mode", Mode.FEDERATED)), given.get("data_parallel", {}).get("hook", "none")
    stages = {"pipeline": {"stages": clients or 2}} if mode is Mode.PIPELINE else {}
    return merge(preset_job(dataset, mode, hook) | stages, given)


def _workers(keys: Mapping[str, Any]) -> int:
    """Return the clients that a pipeline needs; 0 = it is none."""
    if keys.get("mode") != Mode.PIPELINE:
        return 0
    return Pipeline.model_validate(keys.get("pipeline", {})).workers


def _check_clients(job: Job, count: int, sites: Sequence[Path]) -> None:
    """Check that the job can run on so many clients.

    Raises:
        Failure: It would wait for others for ever.
    """
    least = max(job.min_clients, job.training.workers, job.sample_clients)
    if least > count:
        more = "name more folders with --sites" if sites else f"set --clients {least}"
        raise Failure(
            f"the job needs {least} clients, and there {'is 1' if count == 1 else f'are {count}'}: {more}, or change "
            "min_clients, sample_clients or the stages of the job",
            Exit.CONFIG,
        )
    if job.training.grouped and sites:
        raise Failure(
            f"the clients of a {job.mode} job share each batch, so all need the same samples: give --clients and "
            "--data-root in the place of --sites",
            Exit.CONFIG,
        )
    if job.clients:
        raise Failure(
            f"the job wants clients with the labels {job.clients}, and those of flctl try have none: leave clients out",
            Exit.CONFIG,
        )


@contextmanager
def _reserved(out: Path) -> Iterator[None]:
    """Keep another flctl try out of the folder while this one runs.

    Raises:
        Failure: Another one uses it.
    """
    folder = os.open(out, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise Failure(f"another flctl try uses --out {out}: wait for its end, or give another folder") from None
    finally:
        os.close(folder)


def _private(
    clients: int | None, keys: Mapping[str, Any], out: Path, output: Output, others: Mapping[str, Any]
) -> None:
    from fedring.ctl.local.private_demo import CLIENTS, ROUNDS, check_size, private_demo  # imports torch

    wrong = [*(name for name, value in others.items() if value), *(key for key in keys if key != "rounds")]
    if wrong:
        raise Failure(f"{wrong[0]} does not belong to the job private: leave it out", Exit.USAGE)
    count, rounds = clients or CLIENTS, keys.get("rounds", ROUNDS)
    if sentence := check_size(count, rounds):
        raise Failure(sentence, Exit.USAGE)
    make_out_folder(out)
    with _reserved(out):
        private_demo(count, rounds, out, output)


def _consent(out: Path, output: Output, others: Mapping[str, Any]) -> None:
    from fedring.ctl.local.consent_demo import consent_demo  # imports cryptography

    if wrong := next((name for name, value in others.items() if value), ""):
        raise Failure(f"{wrong} does not belong to the job consent: leave it out", Exit.USAGE)
    require("server")
    make_out_folder(out)
    with _reserved(out):
        consent_demo(out, output, os.environ)


def _run(experiment: Experiment, out: Path, *, label: str, keep: bool, output: Output) -> None:
    """Run the experiment, plot its rounds into `out`, and print its report.

    Args:
        experiment: What to run.
        out: Folder of the report, the models, the plot, logs and state.
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
            say(*result.outcome)
            _print_report(label, report)
            files = ["report.json", "model.safetensors", *([BEST] if (out / BEST).exists() else []), "rounds.png"]
            stderr_console().print(f"{', '.join(files)} and the logs are in {out}")
        if keep:
            _wait(fleet)

    shown = progress_on_stderr if output is Output.JSON else partial(display, output)
    run_with_progress(experiment, out, label=label, progress_of=shown, before_end=before_end)


def _wait(fleet: Fleet) -> None:
    """Wait until Ctrl-C or a daemon's end, which is a Failure."""
    died = threading.Event()
    fleet.on_death(died.set)
    place = f"the page is at {fleet.web}, and flctl reaches the server with -s {fleet.control}"
    with suppress(KeyboardInterrupt):
        stderr_console().print(f"the server and the clients go on until Ctrl-C: {place}", soft_wrap=True)
        wait(died)
        raise fleet.failure() or Failure("a daemon has ended")


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
