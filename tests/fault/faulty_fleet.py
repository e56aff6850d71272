"""Fleets whose daemons get lost, and waits that fail with the stacks and logs of all daemons instead of hanging."""

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any, NoReturn, TypeVar

import pytest

from fedring.control.calls import Events
from fedring.ctl import fleet as shipped
from fedring.v1 import control_pb2 as pb
from tests.fleets import Control, Fleet

SECONDS = 150.0
"""Seconds after which a wait fails."""
LOST_AFTER = 15.0
"""Seconds after which a silent client or peer is lost: longer than a busy machine keeps a process waiting."""
NOTICED_WITHIN = 30.0
"""Seconds within which a loss must be noticed; the deadlines of rounds and operations are much longer."""
_LINES = 60

T = TypeVar("T")


class FaultyFleet(Fleet):
    """A fleet in which the loss of a daemon is noticed after LOST_AFTER seconds."""

    silence = LOST_AFTER


def wait_for(fleet: shipped.Fleet, what: str, call: Callable[[], T]) -> T:
    """Return what `call` returns; fail the test if that takes longer than SECONDS.

    Args:
        fleet: its daemons' stacks and logs are shown on failure.
        what: names what is waited for, in the failure's message.
        call: runs in a thread of its own.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:  # noqa: BLE001  # handed to the waiting thread
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    if not wait([outcome], SECONDS).done:
        _fail(fleet, what)
    return outcome.result()


class StartedJob:
    """A job that this object has started, and the stream of its events."""

    def __init__(self, fleet: shipped.Fleet, control: Control, spec: dict[str, Any]) -> None:
        events: Events = control.events()
        self.job_id = control.start_job(spec).job_id
        self._fleet = fleet
        self._events: Iterator[pb.Event] = control.follow_job(self.job_id, events)

    def until(self, kind: str) -> pb.Event:
        """Wait for the next event of this kind, and return it."""
        found = (event for event in self._events if event.kind == kind)
        event = wait_for(self._fleet, kind, lambda: next(found, None))
        assert event is not None, f"the job ended without {kind}"
        return event

    def rest(self) -> list[pb.Event]:
        """Wait for the job's end, and return all events until then."""
        return until_end(self._fleet, self._events)


def until_end(fleet: shipped.Fleet, events: Iterator[pb.Event]) -> list[pb.Event]:
    """Return a job's events up to its end; each round may take SECONDS."""
    seen: list[pb.Event] = []

    def round_ends() -> bool:
        for event in events:
            seen.append(event)
            if event.kind in ("round_published", "round_abandoned"):
                return True
        return False

    while wait_for(fleet, "the end of a round, or of the job", round_ends):
        pass
    return seen


def job_end(fleet: shipped.Fleet, control: Control, job_id: int, events: Events | None = None) -> list[pb.Event]:
    """Wait for a job's end, and return its events until then; each round may take SECONDS.

    Args:
        fleet: see `wait_for`.
        control: of its server.
        job_id: the job.
        events: see `Control.follow_job`.
    """
    return until_end(fleet, control.follow_job(job_id, events))


def _fail(fleet: shipped.Fleet, what: str) -> NoReturn:
    daemons = [fleet.server, *fleet.clients]
    for daemon in daemons:
        if daemon.running:
            daemon.send(signal.SIGUSR1)  # the daemon writes all stacks to its log
    fleet.stop()
    logs = "\n".join(f"{daemon.name}:\n{daemon.tail(_LINES)}" for daemon in daemons)
    pytest.fail(f"{what} did not come within {SECONDS:g} s\n{logs}", pytrace=False)
