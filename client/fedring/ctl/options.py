"""The options that verbs share, and the checks of their values."""

from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Any

import typer

from fedring.control.failure import Failure
from fedring.ctl.output import Output
from fedring.daemon.exits import Exit
from fedring.rpc.address import check_address
from fedring.untrusted import parse_json

DEFAULT_SERVER = "127.0.0.1:8444"
MOST_ROWS = 10**9
"""The largest number of rows that can be asked for."""


def checked_address(option: typer.CallbackParam, address: str) -> str:
    """Return the address that was given for the option.

    Raises:
        Failure: It is no address.
    """
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
        callback=checked_address,
        help="Address of fl-server's control port, its control_listen.",
    ),
]
OutputOption = Annotated[
    Output, typer.Option("--output", "-o", envvar="FLCTL_OUTPUT", help="Print tables for people, or JSON for programs.")
]
KeyOption = Annotated[
    str,
    typer.Option(
        "--key",
        metavar="TEXT",
        help="Idempotency key: a second call with the same key and job starts nothing; by default it is new.",
    ),
]
LimitOption = Annotated[int, typer.Option("--limit", "-n", min=1, max=MOST_ROWS, help="Most rows to show.")]


def make_out_folder(path: Path) -> None:
    """Make the folder of --out, and check that it is writable.

    Raises:
        Failure: There can be no such folder, or no files in it.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Failure(f"--out {path} cannot be a folder: {error.strerror or error}", Exit.USAGE) from error
    _check_writable(path, path)


def check_out_file(path: Path) -> None:
    """Check that the file of --out can be written.

    Its folder must exist.

    Raises:
        Failure: It cannot.
    """
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


def keywords(model_args: str) -> dict[str, Any]:
    """Return the keyword arguments in the text of --model-args.

    Raises:
        Failure: It is no JSON object.
    """
    try:
        table = parse_json(model_args)
        if not isinstance(table, dict):
            raise ValueError('it must be an object, such as {"hidden": 64}')
        return table
    except ValueError as error:
        raise Failure(
            f"--model-args {model_args[:200]!r} is not JSON of keyword arguments: {error}", Exit.USAGE
        ) from error
