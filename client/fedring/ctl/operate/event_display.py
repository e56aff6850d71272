"""A job's events while it runs, in one of three displays.

These are a progress bar, lines for people, or JSON lines for programs.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TextIO

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedring.control import figures
from fedring.ctl.output import Output, quality, size, stderr_console, to_dict
from fedring.daemon.logs import visible
from fedring.daemon.wording import counted
from fedring.v1 import control_pb2 as pb

Show = Callable[[pb.Event], None]
_OVER = ("published", "abandoned")
_LINES = (
    "round_evaluated",
    "round_abandoned",
    "job_ended",
    "client_lost",
    "group_lost",
    "other_samples",
    "update_refused",
)
_TOLD_ONCE = ("evaluation_failed", "other_samples")


def display(output: Output, *, rounds: int, label: str, newest: pb.Round | None = None) -> AbstractContextManager[Show]:
    """Return the display of a verb whose output is the job itself.

    JSON lines on stdout if `output` asks for them, a bar on stderr if that is a terminal, else plain lines on stdout.

    Args:
        output: How the verb prints.
        rounds: Rounds of the job.
        label: Title of the bar.
        newest: The newest round of a job that has begun before; None = it has none yet.

    Returns:
        A context manager; its value is called with each event.
    """
    if output is Output.JSON:
        return _lines(json_line, sys.stdout)
    return _bar(rounds, label, newest) if sys.stderr.isatty() else _lines(plain_line, sys.stdout)


def progress_on_stderr(*, rounds: int, label: str) -> AbstractContextManager[Show]:
    """Return a progress display for a verb that uses stdout otherwise.

    It is a bar, or a line for each round.
    """
    return _bar(rounds, label) if sys.stderr.isatty() else _lines(_round_line, sys.stderr)


def json_line(event: pb.Event) -> str:
    """Return the event as one JSON object."""
    return json.dumps(to_dict(event))


def plain_line(event: pb.Event) -> str:
    """Return the event as one line for people."""
    return visible(f"{event.at} {event.text or event.kind}".strip())


def _round_line(event: pb.Event) -> str:
    """Return a line for an event that ends something.

    It is empty for others.
    """
    return plain_line(event) if event.kind in _LINES else ""


@contextmanager
def _bar(rounds: int, label: str, newest: pb.Round | None = None) -> Iterator[Show]:
    """Show a progress bar on stderr, with accuracy and bytes per client."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[summary]}", markup=False),
        TimeElapsedColumn(),
        TimeRemainingColumn(compact=True),
        TextColumn("left"),
    )
    with Progress(*columns, console=stderr_console()) as progress:
        ended = _ended(newest) if newest else 0
        task = progress.add_task(visible(label), total=rounds, completed=ended, summary="waiting for clients")
        told: set[tuple[str, str]] = set()

        def show(event: pb.Event) -> None:
            # The bar has no room for a sentence. What happens in each round is told once for each client.
            if event.kind in _TOLD_ONCE and (event.kind, event.client_id) not in told:
                told.add((event.kind, event.client_id))
                progress.console.print(event.text, markup=False, highlight=False, soft_wrap=True)
            if event.HasField("state"):
                summary = visible(event.text) if event.kind == "round_waits" else _summary(event.state)
                progress.update(task, completed=_ended(event.state), summary=summary)

        yield show


def _ended(newest: pb.Round) -> int:
    """Return the number of ended rounds, by a job's newest one."""
    # One that sites had not approved is opened again, with the same number.
    over = newest.phase in _OVER and newest.reason != "not_approved"
    return newest.job_round if over else max(0, newest.job_round - 1)


def _summary(state: pb.Round) -> str:
    parts = [f"{state.phase}, {state.delivered} of {counted(state.selected, 'update')}"]
    if state.eval_total:
        parts = [quality(figures.accuracy(state), figures.loss(state))]
    if state.clients:
        up, down = figures.upload_per_client(state), figures.download_per_client(state)
        parts.append(f"↑ {size(up)} ↓ {size(down)} per client")
    return "  ".join(parts)


@contextmanager
def _lines(line: Callable[[pb.Event], str], stream: TextIO) -> Iterator[Show]:
    def show(event: pb.Event) -> None:
        if text := line(event):
            print(text, file=stream, flush=True)

    yield show
