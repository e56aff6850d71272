"""flctl: the operator's command line."""

import errno
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # before grpc is imported: it must not write to stderr itself

import typer

from fedring.ctl import verbs
from fedring.daemon import program
from fedring.daemon.exits import Exit
from fedring.version import VERSION

_app = typer.Typer(
    name="flctl",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings=verbs.HELP_NAMES,
    epilog="Start here:\n\nflctl try\n\nflctl help run\n\nflctl help exit-codes",
)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MOVABLE = ("-s", "--server", "-o", "--output", "--tls-ca", "--tls-cert", "--tls-key", "--token-file")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"flctl {VERSION}")
        raise typer.Exit


@_app.callback()
def _flctl(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Operate an fl-server: jobs, rounds, models, and clients' access.

    `flctl try` needs no configuration: it starts a server and clients on this machine and trains a small model.

    The options --server, --output, --tls-ca, --tls-cert, --tls-key and --token-file of a verb may also stand before it.
    """


flctl = verbs.program(_app)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run flctl with some arguments, and return the exit code.

    By default they are those of the command line.
    """
    return run(flctl, "flctl", _behind_the_verb(sys.argv[1:] if arguments is None else arguments))


def run(command: Callable[..., Any], name: str, arguments: Sequence[str]) -> int:
    """Run a program with arguments, and return the exit code.

    What fails is one sentence on stderr.
    """
    try:
        return program.run(command, name, arguments)
    except Exception as error:
        if (told := _sentence(error)) is None:
            raise
        text, code = told
        print(f"{name}: {text}", file=sys.stderr)
        return code


def _behind_the_verb(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with options before the verb moved behind it.

    They are options of verbs, and belong to the end.
    """
    rest, moved = list(arguments), list[str]()
    while rest and rest[0].partition("=")[0] in _MOVABLE:
        count = 1 if "=" in rest[0] else 2
        moved, rest = moved + rest[:count], rest[count:]
    end = rest.index("--") if "--" in rest else len(rest)
    return [*rest[:end], *moved, *rest[end:]] if rest else list(arguments)


def _sentence(error: Exception) -> tuple[str, Exit] | None:
    """Return the text and the exit code for an expected error."""
    from fedring.control.failure import Failure  # imports grpc
    from fedring.daemon.config import ConfigError  # imports pydantic
    from fedring.daemon.logs import visible
    from fedring.extras import missing

    if isinstance(error, Failure):
        text, code = str(error), error.exit_code
    elif isinstance(error, ConfigError):
        text, code = str(error), Exit.CONFIG
    elif isinstance(error, OSError) and error.filename is not None:
        # of a file that a verb could not check before: the disk is full, or a folder has its name
        text, code = f"{error.filename}: {error.strerror}", Exit.FAILED
    elif isinstance(error, OSError) and error.errno in _FULL:
        text, code = f"cannot write any more: {error.strerror}", Exit.FAILED
    elif sentence := missing(error):
        text, code = sentence, Exit.CONFIG
    else:
        return None
    return "\n".join(map(visible, text.split("\n"))), code


if __name__ == "__main__":
    sys.exit(main())
