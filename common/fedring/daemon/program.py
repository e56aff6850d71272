"""The command line of a program: each mistake is one line.

The three programs share it. It imports nothing of typer or click, whose errors it knows by their attributes: typer
brings its own copy of click, or not, as its version has it.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

from fedring.daemon.exits import Exit

_NEAR = 0.75  # how similar an option must be to be suggested, from 0 to 1
_PAIRS = "KEY=VALUE"  # in the name of an argument that takes keys


def run(command: Callable[..., Any], name: str, arguments: Sequence[str]) -> int:
    """Run a program of typer's, and return its exit code.

    A mistake on the command line, and Ctrl-C, are one line on stderr. Other exceptions are the caller's.

    Args:
        command: The program.
        name: Its name.
        arguments: Those of the command line.
    """
    try:
        code = command(list(arguments), prog_name=name, standalone_mode=False)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) or end.code is None else Exit.FAILED
    except Exception as error:
        if type(error).__name__ == "Abort":  # what Ctrl-C becomes in some versions of click
            code = Exit.INTERRUPTED
        elif (tell := getattr(error, "format_message", None)) is None:
            raise
        else:
            if type(error).__name__ == "NoArgsIsHelpError":
                error.show()  # type: ignore[attr-defined]  # it is the help
            else:
                print(f"{name}: {_sentence(error, tell(), arguments)}", file=sys.stderr)
            code = getattr(error, "exit_code", Exit.USAGE)
    if code == Exit.INTERRUPTED:
        _tell_interrupted(name)
    return code if isinstance(code, int) else Exit.OK


@contextmanager
def interruptible(name: str) -> Iterator[None]:
    """End the program with one line if Ctrl-C interrupts imports.

    Args:
        name: The name of the program.

    Raises:
        SystemExit: In the place of KeyboardInterrupt.
    """
    try:
        yield
    except KeyboardInterrupt:
        _tell_interrupted(name)
        raise SystemExit(Exit.INTERRUPTED) from None


def _tell_interrupted(name: str) -> None:
    print(f"{name}: interrupted", file=sys.stderr)


def _sentence(error: Any, text: str, arguments: Sequence[str]) -> str:
    """Return the sentence about a mistake, with the remedy."""
    text = f"{text[:1].lower()}{text[1:]}".rstrip(".").replace("Value error, ", "")
    context = getattr(error, "ctx", None)
    if context is None:
        return text
    option = getattr(error, "option_name", "") or ""
    near = get_close_matches(option, getattr(error, "possibilities", None) or (), 1, _NEAR)
    if near:
        return f"no such option: {option}: did you mean {near[0]}?"
    verbs = getattr(context.command, "commands", None)
    if option and verbs:
        return f"{text}: name one of {', '.join(verbs)}, and give it behind that"
    keys = any(_PAIRS in (getattr(each, "metavar", None) or "") for each in context.command.params)
    if option:
        text = f"no such option: {option}"
    if option.startswith("--") and keys:
        return f"{text}: keys are given without dashes, as in {_as_key(option, arguments)}"
    return f"{text}: see {context.command_path} --help"


def _as_key(option: str, arguments: Sequence[str]) -> str:
    """Return an option and its value as key=value."""
    key, value = option.removeprefix("--").replace("-", "_"), ""
    for at, argument in enumerate(arguments):
        given, equals, behind = argument.partition("=")
        if given == option:
            value = behind if equals else next(iter(arguments[at + 1 :]), "")
    return f"{key}={value or 'VALUE'}"
