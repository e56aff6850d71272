"""Daemons of one run, its job, and its results.

`flctl try` and the benchmarks in `tests/bench` use this module, so that a figure means the same wherever it was
measured.
"""

import json
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedring.control.calls import Control
from fedring.control.failure import Failure
from fedring.ctl.fleet import Fleet
from fedring.ctl.operate.event_display import Show
from fedring.ctl.output import Output, print_json, stderr_console
from fedring.daemon.exits import Exit
from fedring.job_code import AskedToExit
from fedring.rpc.channel import open_sync_channel
from fedring.rpc.tls import PLAINTEXT, Tls
from fedring.v1 import control_pb2 as pb

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def running_fleet(
    directory: Path,
    server: Mapping[str, Any],
    clients: Sequence[Mapping[str, Any]],
    *,
    env: Mapping[str, str] | None = None,
    operator: Tls = PLAINTEXT,
    code: Sequence[Path] = (),
    place: Callable[[Fleet], None] = lambda fleet: None,
) -> Iterator[tuple[Fleet, Control]]:
    """Run a server and clients on this host within `with`.

    They are stopped when the block ends, also by SIGTERM or SIGHUP.

    Args:
        directory: Folder of the daemons' state and logs.
        server: Configuration keys of the server.
        clients: Configuration keys of each client.
        env: Environment variables of all daemons.
        operator: Certificates with which the control port is called.
        code: Folders in which the daemons find modules, after all others.
        place: Called before the daemons start, to say where each of them runs.
    """
    made = Fleet(directory, server, clients, env=env, code=code)
    place(made)
    with (
        ended_by_signals(),
        made as fleet,
        Control(fleet.control, channel=open_sync_channel(fleet.control, operator)) as control,
    ):
        yield fleet, control


def run_job(fleet: Fleet, control: Control, job: Mapping[str, Any], show: Show | None = None) -> list[pb.Round]:
    """Run a job to its end, and return its rounds, oldest first.

    Args:
        fleet: The daemons that run the job.
        control: A connection to the fleet's server.
        job: Keys of the job.
        show: Called with each event of the job.

    Raises:
        Failure: The job did not complete, or a daemon ended before it.
    """
    try:
        events = control.events()
        fleet.on_death(events.cancel)
        job_id = control.start_job(job).job_id
        for event in control.follow_job(job_id, events, patience_seconds=0):
            if show:
                show(event)
    except Failure as failure:
        raise fleet.failure() or failure from failure
    ended = control.job(job_id)
    if ended.state != "completed":
        reason = f": {ended.reason}" if ended.reason else ""
        raise Failure(f"the job {ended.state}{reason}; see the logs in {fleet.directory / 'logs'}")
    return sorted(control.rounds(job_id=job_id, limit=ended.rounds), key=lambda round_: round_.round)


def unique_names(option: str, words: Iterable[str]) -> list[str]:
    """Return the names of a comma-separated option.

    They are without spaces and empty words.

    Raises:
        Failure: There is no name, or one is given twice.
    """
    names = [word.strip() for word in words if word.strip()]
    if not names or len(set(names)) != len(names):
        raise Failure(f"{option} needs names, each once, separated by commas", Exit.USAGE)
    return names


def present(
    results: Mapping[str, Any],
    path: Path,
    output: Output,
    *,
    plot: Callable[[Mapping[str, Any], Path], None],
    print_results: Callable[[Mapping[str, Any]], None],
) -> None:
    """Write the results as JSON and PNG, and print them.

    The PNG has the same name as the JSON file `path`, and stands beside it.

    Args:
        results: What has been measured.
        path: The file; what may be in it is replaced.
        output: How to print.
        plot: Draws the results into the PNG that it is given.
        print_results: Prints the results as tables.
    """
    path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    picture = path.with_suffix(".png")
    plot(results, picture)
    if output is Output.JSON:
        return print_json(results)
    print_results(results)
    stderr_console().print(f"{path.name} and {picture.name} are in {path.parent}")


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Unwind the stack on SIGTERM and SIGHUP, as on Ctrl-C.

    So child processes are stopped.
    """

    def unwind(number: int, frame: object) -> None:
        raise AskedToExit(128 + number)

    old = {number: signal.signal(number, unwind) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
