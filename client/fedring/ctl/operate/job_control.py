"""flctl start-round, run and stop: start, follow and end jobs."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from fedring.control import figures
from fedring.control.calls import Control, Events, check_completed
from fedring.control.failure import Failure, Unreachable
from fedring.control.job_file import check_job
from fedring.control.signing import sign_job
from fedring.control.trackers import Log, tracker
from fedring.ctl.access import connect
from fedring.ctl.completion import job_ids, job_keys
from fedring.ctl.operate.conclusion import conclude
from fedring.ctl.operate.event_display import display
from fedring.ctl.operate.job_names import HELP, find_job
from fedring.ctl.operate.round_names import round_title
from fedring.ctl.options import DEFAULT_SERVER, KeyOption, OutputOption, ServerOption
from fedring.ctl.output import Output, print_json, say, to_dict, warn
from fedring.daemon.config import COMMAND_LINE, ConfigError, merge, parse_overrides, read_document
from fedring.daemon.exits import Exit
from fedring.daemon.wording import counted, listed
from fedring.rpc.probe import Listener, listener_at
from fedring.train.jobs.start import FRESH, NEWEST
from fedring.v1 import control_pb2 as pb

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...", help="Keys of the job, such as epochs=2 or lr=0.1.", autocompletion=job_keys
    ),
]
_ASK_SECONDS = 0.2  # between two questions whether a server has started

Start = Callable[[Control], pb.StartReply]


def start_round(
    overrides: Overrides = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Show the progress of the round, and return when it has ended.")
    ] = False,
    key: KeyOption = "",
    server: ServerOption = DEFAULT_SERVER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Start one round of the default job, with the given keys.

    The job is the server's. The round starts from the newest version of the model, unless you give another start, such
    as start=fresh.
    """
    job = {"start": NEWEST, **job_of(None, overrides or [])}
    if job.get("rounds", 1) != 1:
        raise Failure(
            f"start-round runs one round, not {job['rounds']}: leave rounds out, or give a file to `flctl run`",
            Exit.USAGE,
        )
    _start(server, lambda control: control.start_round(job, key=key), wait=wait, output=output)


def run(
    job_file: Annotated[Path, typer.Argument(metavar="JOB", help="The job, as a .toml or .json file.")],
    overrides: Overrides = None,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Show the progress of the job, and return when it has ended.")
    ] = True,
    track: Annotated[
        str,
        typer.Option(
            metavar="WHERE",
            help="Write the metrics of each round to tensorboard=FOLDER, mlflow=EXPERIMENT or wandb=PROJECT.",
        ),
    ] = "",
    patience: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="How long to wait for an fl-server that is starting.")
    ] = 60.0,
    sign: Annotated[
        bool,
        typer.Option(
            "--sign",
            envvar="FLCTL_SIGN",
            help="Sign the job with the key of --tls-key, for sites that follow only signed jobs.",
        ),
    ] = False,
    key: KeyOption = "",
    server: ServerOption = DEFAULT_SERVER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Queue a job, and show its progress.

    The job goes on if you interrupt flctl. The job starts fresh, with a new model, unless its file or the command line
    says otherwise: start=newest goes on from the newest version of its model, start=best from the best one, start=11
    from version 11.

    With --sign, the job has all of its keys, and takes none of the server's defaults. Its table [bounds] says what may
    change while it runs. It starts fresh, or from the number of a version.
    """
    job = {"start": FRESH, **job_of(job_file, overrides or [])}
    if track and not wait:
        raise Failure("--track writes while flctl waits: leave --no-wait out", Exit.USAGE)
    with tracker(track) if track else nullcontext() as log:
        with connect(server) as control:
            _wait_for_server(control, patience)
        _start(server, _signed(job, key) if sign else _plain(job, key), wait=wait, output=output, log=log)


def stop(
    round_only: Annotated[bool, typer.Option("--round", help="End only the round; its job goes on.")] = False,
    job: Annotated[
        str,
        typer.Option(
            "--job",
            metavar="JOB",
            help=f"The job to stop: {HELP}. Without it, the job that runs, if there is only one.",
            autocompletion=job_ids,
        ),
    ] = "",
    server: ServerOption = DEFAULT_SERVER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Stop a job with its round, or only the round in progress."""
    with connect(server) as control:
        job_id = find_job(control, job)
        reply = control.stop_round(job_id) if round_only else control.stop_job(job_id)
        round_ = round_title(control, reply.round) if reply.round and output is Output.TABLE else ""
    if output is Output.JSON:
        print_json(to_dict(reply))
    elif round_only:
        say(f"{round_} ended" if round_ else "no round was open")
    else:
        say(f"job {reply.job_id} stopped" + (f", with {round_}" if round_ else ""))


def job_of(path: Path | None, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the keys of a job from a file and arguments.

    The arguments have the form `key=value`.

    Args:
        path: The file, if there is one.
        overrides: The arguments, which take precedence over the file.

    Raises:
        ConfigError: The file is wrong.
        Failure: An argument is wrong.
    """
    table = read_document(path) if path else {}
    if path:
        check_job(table, where=str(path))
    try:
        given = parse_overrides(overrides)
        merged = merge(table, given)
        check_job({key: merged[key] for key in given}, where=COMMAND_LINE)
    except ConfigError as error:
        raise Failure(f"{error}", Exit.USAGE) from error
    return merged


def _plain(job: Mapping[str, Any], key: str) -> Start:
    return lambda control: control.start_job(job, key=key)


def _signed(job: Mapping[str, Any], key: str) -> Start:
    return lambda control: control.start_signed(sign_job(control, job), key=key)


def _wait_for_server(control: Control, seconds: float) -> None:
    """Wait for a server that has not started yet.

    Raises:
        Unreachable: Nothing answered in time, or it is no server that could be used.
    """
    deadline = 0.0  # until there was a first answer: "nobody listens"
    while True:
        try:
            control.status()
            return
        except Unreachable:
            late = bool(deadline and time.monotonic() >= deadline)
            # A server that starts listens before it answers, and looks like a stranger for that moment.
            starts = (Listener.NOBODY, Listener.PLAINTEXT) if deadline else (Listener.NOBODY,)
            if not seconds or late or listener_at(control.address) not in starts:
                raise
            if not deadline:
                deadline = time.monotonic() + seconds
                waits = f"waiting for fl-server at {control.address}, which does not answer yet"
                warn(f"{waits} (for {seconds:g} s at most; Ctrl-C ends)")
            time.sleep(_ASK_SECONDS)


def _start(server: str, start: Start, *, wait: bool, output: Output, log: Log | None = None) -> None:
    with connect(server) as control:
        events = control.events() if wait else None
        reply = start(control)
        if reply.warning:
            warn(f"warning: {reply.warning}")
        if events is not None:
            if reply.after:
                warn(f"job {reply.job_id} waits{_after(reply)}")
            _follow(control, reply, events, output, log)
        elif output is Output.JSON:
            print_json(to_dict(reply))
        else:
            known = "was started before with this key" if reply.already else "queued"
            say(f"job {reply.job_id} {known}{_after(reply)}")


def _after(reply: pb.StartReply) -> str:
    """Return a clause on the jobs that a job waits for."""
    names = listed([*map(str, reply.after)])
    return f", after job {names}: see `flctl jobs`" if reply.after else ""


def _follow(control: Control, reply: pb.StartReply, events: Events, output: Output, log: Log | None) -> None:
    job_id = reply.job_id
    job = control.job(job_id)
    # A job that an earlier call has started with the same key may have ended before the events began.
    followed = control.follow_job(job_id, None if reply.already else events)
    begun = control.rounds(job_id=job_id, limit=1) if reply.already else []
    failed: list[str] = []  # evaluations
    try:
        label = f"job {job_id} {job.name}".strip()
        with display(output, rounds=job.rounds, label=label, newest=next(iter(begun), None)) as show:
            for event in followed:
                show(event)
                failed += [event.text] if event.kind == "evaluation_failed" else []
                if log and event.kind == "round_evaluated" and event.HasField("state"):
                    log(figures.row(event.state))
    except KeyboardInterrupt:
        sentence = f"job {job_id} goes on: `flctl watch` shows it, and `flctl stop` ends it"
        raise Failure(sentence, Exit.INTERRUPTED) from None
    job = control.job(job_id)
    check_completed(job)
    if output is Output.TABLE:
        say(*outcome_lines(control, job, failed))


def outcome_lines(control: Control, job: pb.Job, failed: Sequence[str]) -> list[str]:
    """Return lines for people about a completed job.

    Args:
        control: A connection to its server.
        job: The job.
        failed: The texts of its evaluations that failed, oldest first.
    """
    lines = [conclude(control, job), job.reason]
    if failed:
        lines.append(f"{counted(len(failed), 'evaluation')} failed or lacked figures; the newest: {failed[-1]}")
    return [line for line in lines if line]
