"""flctl help: topics, and the help of every verb."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from fedring.control.failure import Failure
from fedring.daemon.exits import Exit

EXIT_CODES: Mapping[Exit, str] = {
    Exit.OK: "it worked",
    Exit.FAILED: "the operation failed: a job failed or was stopped, a port does not serve, doctor found a problem, "
    "or a state folder or a backup is damaged",
    Exit.USAGE: "the command line is wrong, or names something that the server refuses or does not have",
    Exit.UNAVAILABLE: "fl-server cannot be reached",
    Exit.TRY_AGAIN: "not possible now; the same call may work later",
    Exit.NOT_ALLOWED: "you are not allowed to do this",
    Exit.CONFIG: "a configuration or a job, or something that it names, is wrong; "
    "or a state folder is in use, or is not what the verb needs",
}


def help_(
    ctx: typer.Context,
    topic: Annotated[
        list[str] | None, typer.Argument(metavar="[TOPIC]", help="exit-codes, or the name of a verb.")
    ] = None,
) -> None:
    """Explain a verb, or the topic exit-codes."""
    if topic == ["exit-codes"]:
        return print(exit_codes())
    context = ctx.find_root()
    for word in topic or []:
        group: Any = context.command  # a verb, or a group of them
        command = group.get_command(context, word) if hasattr(group, "get_command") else None
        if command is None:
            raise Failure(f"there is no help on {' '.join(topic or [])!r}: see `flctl --help`", Exit.USAGE)
        context = command.make_context(word, [], parent=context, resilient_parsing=True)
    print(context.get_help())


def exit_codes() -> str:
    """Return the meaning of every exit code, one on each line."""
    lines = [f"{code:>4}  {meaning}" for code, meaning in EXIT_CODES.items()]
    return "\n".join(["Exit codes of flctl:", "", *lines, f"{Exit.INTERRUPTED:>4}  interrupted with Ctrl-C"])
