"""The options that verbs share, each described once."""

from pathlib import Path
from tempfile import TemporaryFile
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


def make_out_folder(path: Path) -> None:
    """The folder that --out names is there, and files can be made in it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Failure(f"--out {path} cannot be a folder: {error.strerror or error}", Exit.USAGE) from error
    _check_writable(path, path)


def check_out_file(path: Path) -> None:
    """The file that --out names can be written: in a folder that is there."""
    if path.is_dir():
        raise Failure(f"--out {path} is a folder: name a file in it", Exit.USAGE)
    if not path.parent.is_dir():
        raise Failure(f"--out {path}: there is no folder {path.parent}: make it, or name another file", Exit.USAGE)
    _check_writable(path, path.parent)


def _check_writable(path: Path, folder: Path) -> None:
    try:
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        sentence = f"--out {path}: no file can be made in the folder {folder}: {error.strerror or error}"
        raise Failure(sentence, Exit.USAGE) from error
