"""A view that changes in place, in the cell of a notebook.

IPython is no requirement: whoever runs a notebook has imported it already. Elsewhere, there is no view.
"""

import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

Clock = Callable[[], float]

_PAUSE = 0.25  # seconds between two updates, because rounds may be quick and pages slow
_REST = 9  # times as long as it took to make the last one, because a job may have thousands of rounds


class LiveView:
    """HTML in the output of the running cell.

    Args:
        put: Shows a text of HTML, in the place of the one before.
        clock: Seconds, which only rise.
    """

    def __init__(self, put: Callable[[str], None], clock: Clock = time.monotonic) -> None:
        self._put, self._clock, self._next = put, clock, 0.0

    def update(self, html: Callable[[], str | None], *, last: bool = False) -> None:
        """Show a new state.

        Args:
            html: Makes it, and is only called if it is shown; None = there is none now.
            last: It is shown although another one was shown a moment ago.
        """
        began = self._clock()
        if began < self._next and not last:
            return
        text, ended = html(), self._clock()
        self._next = ended + max(_PAUSE, _REST * (ended - began))
        if text is not None:
            self._put(text)


def live_view() -> LiveView | None:
    """Return a view in the running cell; None outside of notebooks."""
    ipython = sys.modules.get("IPython")  # A kernel has imported it, and nobody else needs it.
    shell: Any = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    if getattr(shell, "kernel", None) is None:
        return None
    display: Any = import_module("IPython.display")
    handle: Any = None

    def put(html: str) -> None:
        nonlocal handle
        shown = display.HTML(html)
        if handle is None:
            handle = display.display(shown, display_id=True)
        else:
            handle.update(shown)

    return LiveView(put)
