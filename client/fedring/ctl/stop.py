"""flctl stop."""

from typing import Annotated

import typer

from fedring.ctl.access import connect
from fedring.ctl.failure import Failure
from fedring.ctl.options import DEFAULT_SERVER, OutputOption, ServerOption
from fedring.ctl.output import Output, print_json, to_dict
from fedring.daemon.exits import Exit


def stop(
    round_only: Annotated[bool, typer.Option("--round", help="End the round alone; the job goes on.")] = False,
    job: Annotated[int, typer.Option("--job", metavar="ID", min=0, help="The job to stop; 0 = the running one.")] = 0,
    server: ServerOption = DEFAULT_SERVER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Stop a job and its round, or with --round only the round in progress."""
    if round_only and job:
        raise Failure("--round ends the round in progress, whatever its job: leave --job out", Exit.USAGE)
    with connect(server) as control:
        reply = control.stop_round() if round_only else control.stop_job(job)
    if output is Output.JSON:
        print_json(to_dict(reply))
    elif round_only:
        print(f"round {reply.round} of job {reply.job_id} ended" if reply.round else "no round was open")
    else:
        print(f"job {reply.job_id} stopped" + (f", and its round {reply.round}" if reply.round else ""))
