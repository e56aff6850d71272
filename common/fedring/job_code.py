"""The boundary around the code that jobs name.

A model, a data set, a loss, an optimizer, a trainer, an evaluator or a rule may raise anything. `argparse` raises
SystemExit, and `except KeyboardInterrupt: raise` is everywhere. Neither may end a daemon: only the signals of those who
run it may. So every call of such code is inside of `job_code`, and the handlers of signals raise exceptions marked with
`Asked`. The errors of fedring itself are marked with `OwnError`.
"""

import signal
import threading
from collections.abc import Callable
from functools import wraps
from types import FrameType
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

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


_marked = False
"""Whether a context of the main thread marks the interrupts of Ctrl-C."""


class _JobCode:
    """The context that `job_code` returns.

    A class, since a simulation enters it thousands of times a second.
    """

    __slots__ = ("_came", "_stop")

    def __enter__(self) -> None:
        global _marked
        self._came = False
        self._stop: Callable[[int, FrameType | None], None] | None = None
        # Inside of another one, interrupts are marked already. Only the main thread is interrupted.
        if _marked or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # Ctrl-C would raise KeyboardInterrupt
            self._stop, _marked = self._interrupt, True
            signal.signal(signal.SIGINT, self._stop)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        global _marked
        if self._stop is not None:
            _marked = False
            if signal.getsignal(signal.SIGINT) is self._stop:  # The job's code may have set another one.
                signal.signal(signal.SIGINT, signal.default_int_handler)
        if isinstance(error, SystemExit | KeyboardInterrupt) and not (self._came or isinstance(error, Asked)):
            raise CodeEnded(_sentence(error)) from error

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        """Return the function, called inside of a context of its own."""

        @wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> T:
            with _JobCode():
                return function(*args, **kwargs)

        return called

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._came = True
        raise AskedToStop


def job_code() -> _JobCode:
    """Call the code of a job inside of this context.

    It decorates functions, too.

    Raises:
        CodeEnded: If it raises SystemExit or KeyboardInterrupt. Those of a signal pass.
    """
    return _JobCode()


def _sentence(error: SystemExit | KeyboardInterrupt) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "the job's code raised KeyboardInterrupt: only those who run this program may end it"
    code = "" if error.code is None else f"{error.code!r:.{_MOST_TEXT}}"
    return f"the job's code called sys.exit({code}): let it return, or raise an error that says what is wrong"
