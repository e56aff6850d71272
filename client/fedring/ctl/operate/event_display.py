"""A job's events as they come: a progress bar, lines for people, or lines for programs."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TextIO

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fedring.ctl.operate import round_figures
from fedring.ctl.output import Output, percent, size, stderr_console, to_dict
from fedring.v1 import control_pb2 as pb

Show = Callable[[pb.Event], None]
_ROUND_ENDS = ("round_published", "round_abandoned")


def display(output: Output, *, rounds: int, label: str) -> AbstractContextManager[Show]:
    """What shows the events of a job of so many rounds: JSON lines on stdout, a bar on a terminal, or plain lines."""
    if output is Output.JSON:
        return _lines(json_line, sys.stdout)
    return bar(rounds, label) if sys.stderr.isatty() else _lines(plain_line, sys.stdout)


def people_display(*, rounds: int, label: str) -> AbstractContextManager[Show]:
    """The same for a verb whose data is something else: on stderr alone."""
    return bar(rounds, label) if sys.stderr.isatty() else _lines(round_line, sys.stderr)


def json_line(event: pb.Event) -> str:
    """The event as one JSON object."""
    return json.dumps(to_dict(event))


def plain_line(event: pb.Event) -> str:
    """The event as one line for people."""
    return f"{event.at} {event.text or event.kind}".strip()


def round_line(event: pb.Event) -> str:
    """The line of an event that ends something; empty for the others."""
    if event.kind in ("round_evaluated", "round_abandoned", "job_ended", "client_lost", "group_lost", "update_refused"):
        return plain_line(event)
    return ""


@contextmanager
def bar(rounds: int, label: str) -> Iterator[Show]:
    """A progress bar on stderr: rounds, accuracy, bytes per client."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[told]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=stderr_console()) as progress:
        task = progress.add_task(label, total=rounds, told="waiting for clients")
        ended: set[int] = set()

        def show(event: pb.Event) -> None:
            if event.kind in _ROUND_ENDS:
                ended.add(event.round)
            if event.HasField("state"):
                told = event.text if event.kind == "round_waits" else _told(event.state)
                progress.update(task, completed=len(ended), told=told)

        yield show


def _told(state: pb.Round) -> str:
    parts = [f"{state.phase}, {state.delivered} of {state.selected} in"]
    if state.eval_total:
        parts = [f"accuracy {percent(round_figures.accuracy(state))}"]
    if state.clients:
        up, down = round_figures.upload_per_client(state), round_figures.download_per_client(state)
        parts.append(f"↑ {size(up)} ↓ {size(down)} a client")
    return "  ".join(parts)


@contextmanager
def _lines(line: Callable[[pb.Event], str], stream: TextIO) -> Iterator[Show]:
    def show(event: pb.Event) -> None:
        if text := line(event):
            print(text, file=stream, flush=True)

    yield show
