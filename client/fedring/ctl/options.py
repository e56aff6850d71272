"""The options that verbs share, each described once."""

from typing import Annotated

import typer

from fedring.ctl.failure import Failure
from fedring.ctl.output import Output
from fedring.daemon.exits import Exit
from fedring.rpc.address import check_address

DEFAULT_SERVER = "127.0.0.1:8444"


def checked(option: typer.CallbackParam, address: str) -> str:
    """The option's address; Failure if it is none."""
    try:
        return address if address == option.default else check_address(address)
    except ValueError as error:
        raise Failure(f"{option.opts[0]}: {error}", Exit.USAGE) from error


ServerOption = Annotated[
    str,
    typer.Option(
        "--server",
        "-s",
        envvar="FLCTL_SERVER",
        metavar="HOST:PORT",
        callback=checked,
        help="fl-server's control port.",
    ),
]
OutputOption = Annotated[
    Output, typer.Option("--output", "-o", envvar="FLCTL_OUTPUT", help="For people, or for programs.")
]
KeyOption = Annotated[
    str,
    typer.Option("--key", metavar="TEXT", help="Idempotency key: the same job again starts nothing.  [default: new]"),
]
LimitOption = Annotated[int, typer.Option("--limit", "-n", min=1, help="Newest rows to show.")]
