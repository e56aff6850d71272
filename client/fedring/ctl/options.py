"""The options that verbs share, each described once."""

from typing import Annotated

import typer

from fedring.ctl.output import Output

DEFAULT_SERVER = "127.0.0.1:8444"

ServerOption = Annotated[
    str,
    typer.Option("--server", "-s", envvar="FLCTL_SERVER", metavar="HOST:PORT", help="fl-server's control port."),
]
OutputOption = Annotated[
    Output, typer.Option("--output", "-o", envvar="FLCTL_OUTPUT", help="For people, or for programs.")
]
KeyOption = Annotated[
    str,
    typer.Option("--key", metavar="TEXT", help="Idempotency key: the same job again starts nothing.  [default: new]"),
]
LimitOption = Annotated[int, typer.Option("--limit", "-n", min=1, help="Newest rows to show.")]
