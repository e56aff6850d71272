"""The boundary around the code that jobs name.

A model, a data set, a loss, an optimizer, a trainer, an evaluator or a rule may raise anything. `argparse` raises
SystemExit, and `except KeyboardInterrupt: raise` is everywhere. Neither may end a daemon: only the signals of those who
run it may. So every call of such code is inside of `job_code`, and the handlers of signals raise exceptions marked with
`Asked`. The errors of fedring itself are marked with `OwnError`.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_MOST_TEXT = 100  # characters of the argument of sys.exit()


class OwnError(Exception):
    """Marks the errors of fedring itself, whose text says all.

    Any other error that a job's code lets out is the code's, and only its type and its text together say what it is.
    `fedring.train.errors.failure_detail` tells them apart.
    """


class CodeEnded(RuntimeError):
    """The code of a job has tried to end the process."""

    reason = "train_error"


class Asked:
    """Marks an exception that a signal's handler raises."""


class AskedToStop(KeyboardInterrupt, Asked):
    """Somebody has asked the program to stop."""


class AskedToExit(SystemExit, Asked):
    """Somebody has asked the program to end, with this exit code."""


@contextmanager
def job_code() -> Iterator[None]:
    """Call the code of a job inside of this context.

    Raises:
        CodeEnded: If it raises SystemExit or KeyboardInterrupt. Those of a signal pass.
    """
    with _marked_interrupts() as came:
        try:
            yield
        except (SystemExit, KeyboardInterrupt) as error:
            if came or isinstance(error, Asked):
                raise
            raise CodeEnded(_sentence(error)) from error


@contextmanager
def _marked_interrupts() -> Iterator[list[int]]:
    """Let Ctrl-C raise AskedToStop, where Python's own handler would raise KeyboardInterrupt.

    Yields the signals that have come so far. Only the main thread is interrupted.
    """
    came: list[int] = []
    default = signal.default_int_handler
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not default:
        yield came
        return

    def stop(number: int, frame: FrameType | None) -> None:
        came.append(number)
        raise AskedToStop

    signal.signal(signal.SIGINT, stop)
    try:
        yield came
    finally:
        if signal.getsignal(signal.SIGINT) is stop:  # The job's code may have set another one.
            signal.signal(signal.SIGINT, default)


def _sentence(error: SystemExit | KeyboardInterrupt) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "the job's code raised KeyboardInterrupt: only those who run this program may end it"
    code = "" if error.code is None else f"{error.code!r:.{_MOST_TEXT}}"
    return f"the job's code called sys.exit({code}): let it return, or raise an error that says what is wrong"
