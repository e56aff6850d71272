"""Waiting that ends: what does not come fails the test, with the stacks and the last words of every daemon."""

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any, NoReturn, TypeVar

import pytest

from fedring.ctl import fleet as shipped
from fedring.ctl.control import Events
from fedring.v1 import control_pb2 as pb
from tests.fleets import Control, Fleet

SECONDS = 150.0
SILENCE = 15.0
"""Seconds after which a silent client or peer is lost: a busy machine's stalls are shorter."""
NOTICED = 30.0
"""Seconds within which a loss is noticed; only deadlines that are much longer would end the wait for a lost one."""
_LINES = 60

T = TypeVar("T")


class FaultyFleet(Fleet):
    """A fleet some of whose daemons will be lost."""

    silence = SILENCE


def patiently(fleet: shipped.Fleet, what: str, call: Callable[[], T]) -> T:
    """What `call` returns; the test fails if that takes longer than SECONDS."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:  # noqa: BLE001  # handed to the one who waits
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    if not wait([outcome], SECONDS).done:
        _fail(fleet, what)
    return outcome.result()


class Story:
    """A job that was started, and what the server tells of it, event by event."""

    def __init__(self, fleet: shipped.Fleet, control: Control, spec: dict[str, Any]) -> None:
        events: Events = control.events()
        self.job_id = control.start_job(spec).job_id
        self._fleet = fleet
        self._events: Iterator[pb.Event] = control.follow_job(self.job_id, events)

    def until(self, kind: str) -> pb.Event:
        """The next event of this kind."""
        found = (event for event in self._events if event.kind == kind)
        event = patiently(self._fleet, kind, lambda: next(found, None))
        assert event is not None, f"the job ended without {kind}"
        return event


def _fail(fleet: shipped.Fleet, what: str) -> NoReturn:
    daemons = [fleet.server, *fleet.clients]
    for daemon in daemons:
        if daemon.running:
            daemon.send(signal.SIGUSR1)  # all stacks go to its log
    fleet.stop()
    words = "\n".join(f"{daemon.name}:\n{daemon.tail(_LINES)}" for daemon in daemons)
    pytest.fail(f"{what} did not come within {SECONDS:g} s\n{words}", pytrace=False)
