"""flctl watch: show events while they happen."""

import sys
from collections import deque
from contextlib import suppress

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from fedring.control.calls import Control
from fedring.control.failure import Unreachable
from fedring.ctl.access import connect
from fedring.ctl.operate.event_display import json_line, plain_line
from fedring.ctl.operate.lists import ROUND_COLUMNS, round_row
from fedring.ctl.options import DEFAULT_SERVER, OutputOption, ServerOption
from fedring.ctl.output import Output, make_table, stdout_console
from fedring.daemon.wording import counted
from fedring.v1 import control_pb2 as pb

_ROUNDS, _LINES = 12, 5


def watch(server: ServerOption = DEFAULT_SERVER, output: OutputOption = Output.TABLE) -> None:
    """Show rounds, clients and accuracy live, until Ctrl-C.

    Where stdout is no terminal, each event is a line.
    """
    with connect(server) as control:
        if output is Output.TABLE and sys.stdout.isatty():
            return _watch_live(control)
        line = json_line if output is Output.JSON else plain_line
        for event in control.watch():
            print(line(event), flush=True)


class Board:
    """The screen of `flctl watch`: the newest rounds, and the last events."""

    def __init__(self, address: str, status: pb.Status) -> None:
        self.address = address
        self.status = status
        self.rounds: dict[int, pb.Round] = {}
        self.lines: deque[str] = deque(maxlen=_LINES)
        if status.HasField("round"):
            self.rounds[status.round.round] = status.round

    def show(self, event: pb.Event) -> None:
        """Take the event into account."""
        if event.HasField("state"):
            self.rounds[event.round] = event.state
            for number in sorted(self.rounds)[:-_ROUNDS]:
                del self.rounds[number]
        self.lines.append(plain_line(event))

    def render(self) -> RenderableType:
        """Return the content of the screen now."""
        now = self.status
        job = now.job
        work = f"job {job.job_id} {job.name}, {counted(job.rounds, 'round')}" if now.HasField("job") else "no job"
        title = f"{self.address}   {counted(now.clients_watching, 'client')}   model {now.model_version}   {work}"
        rows = [round_row(self.rounds[number]) for number in sorted(self.rounds, reverse=True)]
        return Group(make_table(title, ROUND_COLUMNS, rows), *(Text(line, style="dim") for line in self.lines))


def _watch_live(control: Control) -> None:
    board = Board(control.address, control.status())
    with Live(board.render(), console=stdout_console(), auto_refresh=False) as live:
        for event in control.watch():
            if event.kind != "update_accepted":  # it does not change the status, and there are many of them
                with suppress(Unreachable):  # it may be restarting: then the events end, too, and that is waited for
                    board.status = control.status()
            board.show(event)
            live.update(board.render(), refresh=True)
