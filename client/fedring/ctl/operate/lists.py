"""flctl status, clients, rounds and models: show fl-server's state."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from fedring.control import figures
from fedring.control.failure import Failure
from fedring.control.server import Job
from fedring.ctl.access import connect
from fedring.ctl.completion import client_ids, job_ids, model_versions, round_names
from fedring.ctl.operate.job_names import HELP as JOB
from fedring.ctl.operate.job_names import find_job
from fedring.ctl.operate.model_names import HELP, find_version
from fedring.ctl.operate.round_kinds import histogram, outcome_of, progress_of, shares
from fedring.ctl.operate.round_names import find_round, round_name
from fedring.ctl.options import DEFAULT_SERVER, MOST_ROWS, LimitOption, OutputOption, ServerOption, check_out_file
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
    to_dict,
)
from fedring.daemon.exits import Exit
from fedring.daemon.wording import counted
from fedring.train.jobs.labels import shown
from fedring.v1 import control_pb2 as pb
from fedring.v1 import federation_pb2 as fb

ROUND_COLUMNS = (
    "round>",
    "phase",
    "from>",
    "clients>",
    "accuracy>",
    "loss>",
    "time>",
    "upload/client>",
    "download/client>",
    "reason",
)
_IN_COLUMNS = {"eval/accuracy", "eval/loss"}


def status(server: ServerOption = DEFAULT_SERVER, output: OutputOption = Output.TABLE) -> None:
    """Show fl-server's job, round, clients and model now."""
    with connect(server) as control:
        now = control.status()
    if output is Output.JSON:
        return print_json(to_dict(now))
    running = list(now.running) or ([now.job] if now.HasField("job") else [])  # an older server tells one
    open_rounds = list(now.rounds) if len(now.rounds) > 1 else [now.round] if now.HasField("round") else []
    queued = counted(now.jobs_queued, "job")
    if now.jobs_queued and now.max_running_jobs:
        queued += f", as at most {now.max_running_jobs} run at once"
    leads = now.leadership.here or not now.HasField("leadership")
    rows = [
        ("server", f"{now.version}, run {now.run_id}, up {duration(now.uptime_seconds)}"),
        *([("leads", _lead_sentence(now.leadership))] if now.HasField("leadership") else []),
        ("serves", f"no: {now.not_serving}" if now.not_serving else "yes"),
        *(("job", _job_sentence(job)) for job in running),
        *([] if running else [("job", "none is running")]),
        ("queued", queued),
        *(("round", _round_sentence(each)) for each in open_rounds),
        *([] if open_rounds else [("round", "none yet")]),
        *(row for each in open_rounds for row in progress_of(each).items()),
        ("clients", f"{now.clients_watching} in session" if leads else "known to the leader"),
        ("model", f"version {now.model_version}" if now.model_version else "none yet"),
        ("refused", ", ".join(f"{count} {reason}" for reason, count in sorted(now.refused.items()) if count) or "none"),
    ]
    print_table(f"fl-server at {server}", ("what", "now"), rows)


def _lead_sentence(lead: pb.Leadership) -> str:
    sentence = f"{lead.leader}, since {lead.since}, term {lead.term}"
    if lead.here:
        return f"{sentence}; waiting: {', '.join(lead.standbys) or 'no other server'}"
    return f"{sentence}; flctl starts and stops there: --server {lead.control}"


def _job_sentence(job: pb.Job) -> str:
    sentence = f"{job.job_id} {job.name}, {job.rounds_done} of {counted(job.rounds, 'round')} done"
    return sentence + (f", start {start_of(job)}" if job.start else "")


def clients(
    context: typer.Context,
    limit: LimitOption = 100,
    search: Annotated[str, typer.Option(help="Show only clients whose id contains this text.")] = "",
    state: Annotated[
        Literal["", "watching", "joined", "away"],
        typer.Option(help="Show only clients in this state.", show_default="any"),
    ] = "",
    skip: Annotated[
        int, typer.Option(min=0, max=MOST_ROWS, help="Leave out this many at the beginning: the pages before.")
    ] = 0,
    server: ServerOption = DEFAULT_SERVER,
    output: OutputOption = Output.TABLE,
) -> None:
    """List the clients, with the activity of each."""
    if _is_group(context, "clients"):
        return
    with connect(server) as control:
        page = control.client_page(limit=limit, search=search, state=state, skip=skip)
    known = page.clients
    if output is Output.JSON:
        clients = [to_dict(client) | {"activity": activity(client.activity)} for client in known]
        return print_json({"clients": clients, "total": page.total})
    rows = [
        (
            client.client_id,
            client.state,
            _work(client),
            percent(client.progress) if client.activity else "-",
            str(client.updates),
            client.last_seen_at,
            client.address,
            client.software,
            shown(client.labels),
        )
        for client in known
    ]
    columns = ("client", "state", "does", "progress>", "updates>", "last seen", "address", "software", "labels")
    whole = counted(len(rows), "client")
    title = whole if page.total <= len(rows) else f"{len(rows)} of {counted(page.total, 'client')}, from {skip + 1} on"
    print_table(title, columns, rows)


def forget(
    client_id: Annotated[
        str,
        typer.Argument(
            metavar="ID", help="The client's client_id; it must not be in session.", autocompletion=client_ids
        ),
    ],
    server: ServerOption = DEFAULT_SERVER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Forget a client that will not come back.

    Its updates and its evaluations are forgotten, too. If it does come back, the server cannot tell it whether its last
    update was accepted.
    """
    with connect(server) as control:
        forgotten = control.forget_client(client_id)
    if output is Output.JSON:
        return print_json(to_dict(forgotten))
    say(f"{forgotten.client_id} is forgotten, with {counted(forgotten.updates, 'update')}")


def privacy(
    delta: Annotated[
        float,
        typer.Option(min=0, max=1, help="The probability that epsilon may fail; 0 = that of the newest job with [dp]."),
    ] = 0.0,
    server: ServerOption = DEFAULT_SERVER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show how much of the clients' privacy the published models have spent.

    Epsilon bounds what all models together reveal about any one client, to somebody who knows everything else.
    """
    with connect(server) as control:
        spent = control.privacy(delta)
    if output is Output.JSON:
        return print_json(to_dict(spent))
    rows = [
        (str(job.job_id), job.name or "-", str(job.rounds), f"{job.noise_multiplier:g}", f"{job.epsilon:.3g}")
        for job in spent.jobs
    ]
    rows.append(("all", "", str(spent.rounds), "", f"{spent.epsilon:.3g}"))
    print_table(
        f"privacy spent, for delta = {spent.delta:g}", ("job", "name", "rounds>", "noise multiplier>", "epsilon>"), rows
    )
    if spent.rounds_without:
        without = counted(spent.rounds_without, "round")
        say(f"besides, {without} of jobs without [dp] published models whose privacy nothing bounds")


def jobs(
    context: typer.Context,
    limit: LimitOption = 20,
    server: ServerOption = DEFAULT_SERVER,
    output: OutputOption = Output.TABLE,
) -> None:
    """List the jobs, newest first, with the start of each."""
    if _is_group(context, "jobs"):
        return
    with connect(server) as control:
        known = control.jobs(limit=limit)
    if output is Output.JSON:
        return print_json(to_dict(pb.JobList(jobs=known)))
    rows = [
        (
            str(job.job_id),
            job.name,
            f"{job.state}, place {job.place}" if job.place else job.state,
            f"{job.rounds_done}/{job.rounds}",
            start_of(job),
            job.created_at,
            job.reason,
        )
        for job in known
    ]
    print_table(counted(len(rows), "job"), ("job>", "name", "state", "rounds>", "start", "created", "reason"), rows)


def move(
    job: Annotated[str, typer.Argument(metavar="JOB", help=f"The queued job: {JOB}.", autocompletion=job_ids)],
    before: Annotated[
        str,
        typer.Option("--before", metavar="JOB", help="The job that it is to be ahead of.", autocompletion=job_ids),
    ] = "",
    first: Annotated[bool, typer.Option("--first", help="Let it be the next one.")] = False,
    last: Annotated[bool, typer.Option("--last", help="Let it be behind all others.")] = False,
    server: ServerOption = DEFAULT_SERVER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Move a queued job to another place in the queue.

    A job queues behind those of at least its priority, which is a key of jobs; this puts it elsewhere.
    """
    if sum((bool(before), first, last)) != 1:
        raise Failure("say where to: --first, --last, or --before JOB", Exit.USAGE)
    with connect(server) as control:
        queue = control.move_job(find_job(control, job), before=find_job(control, before), last=last)
    if output is Output.JSON:
        return print_json(to_dict(pb.JobList(jobs=queue)))
    rows = [(str(each.place), str(each.job_id), each.name, str(each.priority)) for each in queue]
    print_table(f"{counted(len(rows), 'job')} in the queue", ("place>", "job>", "name", "priority>"), rows)


def rounds(
    name: Annotated[
        str,
        typer.Argument(
            metavar="[ROUND]",
            help="Show only this round, with its clients: 3.12 is round 12 of job 3, as in the list. A number alone "
            "counts the rounds of the job that --job names, or else of the server.",
            autocompletion=round_names,
        ),
    ] = "",
    limit: LimitOption = 20,
    of_job: Annotated[
        str, typer.Option("--job", metavar="JOB", help=f"Only rounds of this job: {JOB}.", autocompletion=job_ids)
    ] = "",
    metric: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Show this metric, too, such as eval/f1; may be given several times."),
    ] = None,
    server: ServerOption = DEFAULT_SERVER,
    output: OutputOption = Output.TABLE,
) -> None:
    """List the rounds, newest first, or show one round.

    One round comes with its metrics, and the times and bytes of each client.
    """
    with connect(server) as control:
        job = find_job(control, of_job, ended=True)
        if name:
            return _show_round(find_round(control, name, job), output)
        known = control.rounds(limit=limit, job_id=job)
        best = Job(control, job).best() if job and output is Output.TABLE else None
    if output is Output.JSON:
        return print_json(to_dict(pb.RoundList(rounds=known)))
    names = metric or []
    settings = sorted(set().union(*(round_.settings for round_ in known)))
    rows = [
        (*round_row(round_), *(_setting(round_, name) for name in settings), *(_figure(round_, name) for name in names))
        for round_ in known
    ]
    print_table(counted(len(known), "round"), (*ROUND_COLUMNS, *(f"{name}>" for name in (*settings, *names))), rows)
    for line in filter(None, [*histogram(known), shares(known)]):
        say(line)
    others = sorted(set().union(*(round_.metrics for round_ in known)) - set(names) - _IN_COLUMNS)
    if others:
        stderr_console().print(f"further metrics, for --metric: {', '.join(others)}")
    if best:
        job_round, version = best["job_round"], best["model_version"]
        stderr_console().print(f"the best round of job {job} is {job}.{job_round}: it published model {version}")


def models(
    context: typer.Context,
    limit: LimitOption = 20,
    server: ServerOption = DEFAULT_SERVER,
    output: OutputOption = Output.TABLE,
) -> None:
    """List the model versions that the server keeps, newest first."""
    if not _is_group(context, "models"):
        list_models(limit, server, output)


def list_models(
    limit: LimitOption = 20, server: ServerOption = DEFAULT_SERVER, output: OutputOption = Output.TABLE
) -> None:
    """List the model versions, as `flctl models` does."""
    with connect(server) as control:
        known = control.models(limit=limit)
    if output is Output.JSON:
        return print_json(to_dict(pb.ModelList(models=known)))
    rows = [
        (
            str(model.version),
            round_name(model.job_id, model.job_round),
            percent(model.accuracy if model.HasField("accuracy") else None),
            number(model.loss if model.HasField("loss") else None),
            "best" if model.best_of_job else "",
            f"{model.parameters:,}",
            size(model.bytes),
            model.digest.removeprefix("blake3-")[:12],
            model.created_at,
        )
        for model in known
    ]
    columns = (
        "version>",
        "round>",
        "accuracy>",
        "loss>",
        "of its job",
        "parameters>",
        "size>",
        "digest",
        "created",
    )
    print_table(counted(len(rows), "model"), columns, rows)


def export_model(
    version: Annotated[
        str, typer.Argument(metavar="VERSION", help=f"The version: {HELP}.", autocompletion=model_versions)
    ],
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="The .safetensors file to write; its folder must exist.")
    ],
    exact: Annotated[
        bool, typer.Option("--exact", help="Add what download_encoding has left out of the version.")
    ] = False,
    server: ServerOption = DEFAULT_SERVER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Write a model version to a safetensors file.

    It has the dtypes of the model. If the job has a lossy download_encoding, its versions are what clients train from:
    base plus encoded difference. They differ from the clients' mean by what the encoding leaves out. With --exact, the
    file holds the mean itself.
    """
    check_out_file(out)
    with connect(server) as control:
        header = control.export_model(find_version(control, version), out, exact=exact)
    written = out.stat().st_size
    if output is Output.JSON:
        row = {"version": header.version, "digest": header.model_digest, "file": str(out), "bytes": written}
        return print_json(row)
    say(f"version {header.version}, {size(written)}, is in {out}")


def _is_group(context: typer.Context, group: str) -> bool:
    """Return whether a verb of the group follows, which does the work.

    Raises:
        Failure: An option stands before that verb, where it would be ignored.
    """
    verb = context.invoked_subcommand
    for name in context.params if verb else ():
        # Compared by its name, since typer may bring its own copy of click.
        if (source := context.get_parameter_source(name)) is not None and source.name == "COMMANDLINE":
            raise Failure(
                f"--{name.replace('_', '-')} belongs behind {verb}: see flctl {group} {verb} --help", Exit.USAGE
            )
    return bool(verb)


def round_row(round_: pb.Round) -> Sequence[str]:
    """Return the cells of a round, one for each of ROUND_COLUMNS."""
    return (
        round_name(round_.job_id, round_.job_round),
        round_.phase,
        str(round_.base_version or "-"),
        f"{round_.delivered}/{round_.selected}",
        percent(figures.accuracy(round_)),
        number(figures.loss(round_)),
        duration(round_.seconds),
        size(figures.upload_per_client(round_)),
        size(figures.download_per_client(round_)),
        round_.reason or (counted(len(round_.warnings), "warning") if round_.warnings else ""),
    )


def start_of(job: pb.Job) -> str:
    """Return the start that a job asked for, and its version."""
    if not job.start_version or job.start == str(job.start_version):
        return job.start
    return f"{job.start}: {job.start_version}"


def activity(value: int) -> str:
    """Return a client's activity as a word."""
    names = {int(number): name.removeprefix("ACTIVITY_").lower() for name, number in fb.Activity.items()}
    return names.get(value, str(value)) if value else "idle"


def _work(client: pb.Client) -> str:
    """Return a client's activity, and why it is not ready."""
    what = activity(client.activity)
    if not client.late_since:
        jobs = f" for job {', '.join(map(str, client.jobs))}" if client.jobs else ""
        return f"{what}{jobs}" + (f"; busy: {client.busy}" if client.busy else "")
    return f"{what} for job {client.late_job}, whose round {client.late_round} ended {client.late_since}: not ready"


def _show_round(round_: pb.Round, output: Output) -> None:
    if output is Output.JSON:
        return print_json(to_dict(round_))
    title = f"round {round_.job_round} of job {round_.job_id} (number {round_.round} of the server)"
    print_table(title, ROUND_COLUMNS, [round_row(round_)])
    if round_.settings:
        settings = [(name, _setting(round_, name)) for name in sorted(round_.settings)]
        print_table("settings of this round", ("key", "value>"), settings)
    if round_.metrics:
        print_table("metrics", ("metric", "value>"), [(name, _figure(round_, name)) for name in sorted(round_.metrics)])
    rows = [
        (
            client.client_id,
            f"{client.num_samples:,}",
            client.encoding,
            duration(client.train_seconds),
            duration(client.download_seconds),
            duration(client.upload_seconds),
            size(client.download_bytes),
            size(client.upload_bytes),
        )
        for client in round_.clients
    ]
    why = dict.fromkeys(round_.stalled, "stalled") | dict.fromkeys(round_.stragglers, "straggler")
    missing = [(name, "-", why.get(name, "-"), *["-"] * 5) for name in round_.missing]
    columns = ("client", "samples>", "encoding", "training>", "download>", "upload>", "received>", "sent>")
    print_table(f"{len(rows)} delivered, {len(missing)} missing", columns, [*rows, *missing])
    if round_.clipped:
        say(f"shortened to a norm of {round_.update_clip:.6g}: {', '.join(round_.clipped)}")
    for warning in round_.warnings:
        say(f"warning: {warning}")
    for line in outcome_of(round_):
        say(line)
    if round_.liars:
        say(f"sent wrong shares (bad_share), and left out from now on: {', '.join(round_.liars)}")
    if round_.left_out:
        say(f"left out for wrong shares in an earlier round: {', '.join(round_.left_out)}")
    if round_.capped:
        say(f"counted for max_samples: {', '.join(round_.capped)}")


def _figure(round_: pb.Round, name: str) -> str:
    return f"{round_.metrics[name]:.6g}" if name in round_.metrics else "-"


def _setting(round_: pb.Round, name: str) -> str:
    return f"{round_.settings[name]:.6g}" if name in round_.settings else "-"


def _round_sentence(round_: pb.Round) -> str:
    name = f"{round_.job_round} of job {round_.job_id}"
    if round_.phase == "waiting":
        return f"{name} waits for clients"
    sentence = f"{name} {round_.phase}, {round_.delivered} of {counted(round_.selected, 'client')} delivered"
    if round_.eval_total:
        sentence += f", {quality(figures.accuracy(round_), figures.loss(round_))}"
    return sentence + (f", {round_.reason}" if round_.reason else "")
