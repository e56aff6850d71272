"""The verdict on a failed call, without I/O, clock or randomness.

This is the table of PROTOCOL.md, "When a call fails": which calls are worth another try, and after how long. A kind of
call names only where it differs. `fedring.client.session.tries` acts on it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from grpc import StatusCode

FIRST_SECONDS = 0.2
MOST_SECONDS = 5.0

MOST_TRIES = 3
"""How often one message is sent if its bytes seem to be damaged on the way."""


class Verdict(Enum):
    """The client's answer to a failed call, in the words of PROTOCOL.md."""

    LATER = "later"  # The server or the line fails now.
    JOIN = "join"  # The session is over.
    AGAIN = "again"  # The bytes may have been damaged on their way; a few more tries tell.
    DROP = "drop"  # No later call would succeed.


_COMMON: Mapping[StatusCode | str, Verdict] = {
    "bad_request": Verdict.AGAIN,
    "gone": Verdict.JOIN,
    "standby": Verdict.JOIN,  # the next Join finds the server that leads
    "old_term": Verdict.JOIN,
    StatusCode.UNAVAILABLE: Verdict.LATER,
    StatusCode.RESOURCE_EXHAUSTED: Verdict.LATER,
    StatusCode.DEADLINE_EXCEEDED: Verdict.LATER,
    StatusCode.CANCELLED: Verdict.LATER,
    StatusCode.INTERNAL: Verdict.LATER,
    StatusCode.UNKNOWN: Verdict.LATER,
    StatusCode.DATA_LOSS: Verdict.LATER,
    StatusCode.UNAUTHENTICATED: Verdict.JOIN,
    StatusCode.ABORTED: Verdict.JOIN,
    StatusCode.UNIMPLEMENTED: Verdict.AGAIN,  # as if the name of the call had been damaged
}  # all others: DROP
_DOUBTFUL = {StatusCode.UNIMPLEMENTED, StatusCode.INTERNAL, StatusCode.UNKNOWN, StatusCode.DEADLINE_EXCEEDED}


@dataclass(frozen=True, slots=True)
class NextStep:
    """The consequence of a failed try.

    Attributes:
        verdict: Whether there is another try.
        most_seconds: The wait before it is a random time up to this, so that clients spread out.
        reconnect: Whether it needs a new connection.
    """

    verdict: Verdict
    most_seconds: float
    reconnect: bool


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """The verdicts on the failures of one kind of call.

    Args:
        differences: Verdicts by reason or by status, for this kind of call only. A reason precedes a status.
    """

    differences: Mapping[StatusCode | str, Verdict] = field(default_factory=dict)

    def after(self, status: StatusCode, reason: str, *, failures: int = 0, damages: int = 0) -> NextStep:
        """Return the consequence of a failed try.

        Args:
            status: The status of the failure.
            reason: Its reason.
            failures: How many tries failed in a row before this one.
            damages: How many of all tries before got the verdict AGAIN.
        """
        verdict = self._verdict(status, reason)
        again = verdict is Verdict.AGAIN
        if again and damages + 1 >= MOST_TRIES:
            verdict = Verdict.DROP
        # The last try of bytes that arrive damaged is over a new connection, because this one may be what damages them.
        reconnect = is_doubtful(status) or (again and damages + 2 == MOST_TRIES)
        return NextStep(verdict, most_seconds(failures), reconnect)

    def _verdict(self, status: StatusCode, reason: str) -> Verdict:
        for table in (self.differences, _COMMON):
            for key in (reason, status):
                if key in table:
                    return table[key]
        return Verdict.DROP


def most_seconds(failures: int) -> float:
    """Return the longest wait after so many failures in a row."""
    return min(MOST_SECONDS, FIRST_SECONDS * 2.0 ** min(failures, 10))


def is_doubtful(status: StatusCode) -> bool:
    """Return whether a failure with this status makes its connection doubtful.

    The connection may be broken for all new calls. The two sides of an HTTP/2 connection number its calls, and remember
    parts of their headers. If one bit of a header is flipped on the way, the server may misread or ignore every later
    call, while those in progress go on.
    """
    return status in _DOUBTFUL
