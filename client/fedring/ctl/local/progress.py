"""The progress bar of long measurements."""

import sys

from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from fedring.ctl.output import stderr_console


def progress_bar(*columns: ProgressColumn, speed_seconds: float = 30.0) -> Progress:
    """Return a bar on stderr with the done share and times.

    It shows the time that is left; nothing if stderr is no terminal.

    Args:
        columns: What it also shows, between the share and the times.
        speed_seconds: From how many of the last seconds the time that is left is estimated.
    """
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        *columns,
        TimeElapsedColumn(),
        TimeRemainingColumn(compact=True, elapsed_when_finished=True),
        TextColumn("left"),
        console=stderr_console(),
        disable=not sys.stderr.isatty(),
        speed_estimate_period=speed_seconds,
    )
