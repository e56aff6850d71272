"""The command line of a benchmark, with the exit codes and the errors of flctl."""

import sys
from collections.abc import Callable, Sequence

import typer

from fedring.ctl.main import run
from fedring.ctl.verbs import add_verb


class Command:
    """A benchmark as a program: `python -m tests.bench.NAME`.

    Args:
        bench: The function that measures; typer makes the options of its parameters.
        *examples: Arguments that the help shows.
    """

    def __init__(self, bench: Callable[..., None], *examples: str) -> None:
        self.name = f"python -m tests.bench.{bench.__name__}"
        self.app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
        add_verb(self.app, bench.__name__, bench, *(f"{self.name} {given}".strip() for given in examples))

    def __call__(self, arguments: Sequence[str] | None = None) -> int:
        """Run the benchmark, and return the exit code; by default with the arguments of the command line."""
        return run(self.app, self.name, sys.argv[1:] if arguments is None else arguments)
