"""Every failure that a caller can see.

A call that is refused carries a status, a sentence, and in the trailing metadata a `reason`: a stable word for programs
and metrics.
"""

from collections.abc import Sequence
from math import isfinite
from typing import Any

import grpc
from grpc import StatusCode, aio

REASON_KEY = "fl-reason"

LEADER_KEY = "fl-leader"
"""The key in the trailing metadata of a standby's refusal whose value is the address of the server that leads."""

RETRY_KEY = "fl-retry-seconds"
"""The key in the trailing metadata whose value is a number of seconds.

For "id_in_use", for how many to keep trying; for "come_back" and "in_line", after how many to call again.
"""

MOST_AWAY = 86_400.0
"""Seconds; no client is told to come back later than that, and none obeys that."""

_RETRY_SECONDS, _MOST_RETRY_SECONDS = 10.0, 3600.0  # the default, and the most that a client accepts


class FedringError(Exception):
    """A deliberate refusal.

    Its sentence says what is wrong and what to do.

    Args:
        detail: The sentence.
        reason: A more exact reason than that of the class; empty = that of the class.
    """

    status = StatusCode.INTERNAL
    reason = "internal"
    metadata: tuple[tuple[str, str], ...] = ()
    """Further pairs for the trailing metadata, beside the reason."""

    def __init__(self, detail: str = "", *, reason: str = "") -> None:
        super().__init__(detail)
        self.reason = reason or type(self).reason


class BadRequest(FedringError):
    """The caller's message is wrong; to send it again does not help."""

    status, reason = StatusCode.INVALID_ARGUMENT, "bad_request"


class BadUpdate(BadRequest):
    """The update's header or payload is not valid."""

    reason = "bad_update"


class DamagedOnTheWay(FedringError):
    """The bytes were damaged on their way; they should be sent again."""

    status, reason = StatusCode.DATA_LOSS, "digest_mismatch"


class UnknownMethod(FedringError):
    """The port serves no method of this name."""

    status, reason = StatusCode.UNIMPLEMENTED, "unknown_method"


class UnknownRound(FedringError):
    """The round is not open for this client."""

    status, reason = StatusCode.FAILED_PRECONDITION, "unknown_round"


class UnknownModel(FedringError):
    """The model version is not stored, or not any more."""

    status, reason = StatusCode.NOT_FOUND, "unknown_model"


class NoSuchJob(FedringError):
    """There is no such job, or it has ended."""

    status, reason = StatusCode.NOT_FOUND, "unknown_job"


class SeveralJobs(FedringError):
    """Several jobs run, and the call names none of them."""

    status, reason = StatusCode.FAILED_PRECONDITION, "several_jobs"


class NoSuchToken(FedringError):
    """No such token was ever made."""

    status, reason = StatusCode.NOT_FOUND, "unknown_token"


class NoSuchClient(FedringError):
    """The server has never seen a client of this name."""

    status, reason = StatusCode.NOT_FOUND, "unknown_client"


class ClientInUse(FedringError):
    """The client cannot be forgotten now.

    It has a session, or an update in an open round.
    """

    status, reason = StatusCode.FAILED_PRECONDITION, "client_is_here"


class NoEpsilon(FedringError):
    """The server lacks the package that computes epsilon."""

    status, reason = StatusCode.FAILED_PRECONDITION, "no_accountant"


class OtherUpdate(FedringError):
    """A different update of this client was already accepted for the round."""

    status, reason = StatusCode.ALREADY_EXISTS, "already_accepted_other"


class OtherJob(FedringError):
    """The idempotency key belongs to another job."""

    status, reason = StatusCode.ALREADY_EXISTS, "other_job"


class NotAllowed(FedringError):
    """The caller may not do this."""

    status, reason = StatusCode.PERMISSION_DENIED, "not_allowed"


class Unauthenticated(FedringError):
    """The caller has not proven who they are."""

    status, reason = StatusCode.UNAUTHENTICATED, "no_identity"


class NoSession(FedringError):
    """The call names no open session; the client must join again."""

    status, reason = StatusCode.UNAUTHENTICATED, "no_session"


class Superseded(FedringError):
    """A newer session of the same client has taken over."""

    status, reason = StatusCode.ABORTED, "superseded"


class IdInUse(FedringError):
    """The client id is used by another session.

    The caller has not proven to be its owner.

    Args:
        detail: A sentence for the caller.
        retry_seconds: For how long to keep trying. By then that session has ended if its owner has gone.
    """

    status, reason = StatusCode.ALREADY_EXISTS, "id_in_use"

    def __init__(self, detail: str = "", *, retry_seconds: float = _RETRY_SECONDS) -> None:
        super().__init__(detail)
        self.metadata = ((RETRY_KEY, f"{retry_seconds:g}"),)


class ComeBack(FedringError):
    """The client is not needed now, and disconnects.

    Args:
        detail: A sentence for the caller.
        seconds: After how many the client is to join again.
    """

    status, reason = StatusCode.RESOURCE_EXHAUSTED, "come_back"

    def __init__(self, detail: str, *, seconds: float) -> None:
        super().__init__(detail)
        self.metadata = ((RETRY_KEY, f"{seconds:.3f}"),)


class InLine(ComeBack):
    """The client has a place in a line of many.

    It keeps its connection, since another handshake would take the server longer than all else.
    """

    reason = "in_line"


class Gone(FedringError):
    """The caller has closed the connection.

    Nobody would read the error, and it is not logged.
    """

    status, reason = StatusCode.CANCELLED, "gone"


class Stalled(FedringError):
    """Nothing was received, or read by the other side, for too long."""

    status, reason = StatusCode.DEADLINE_EXCEEDED, "stalled"


class Overloaded(FedringError):
    """The server cannot handle the call now; try it again later."""

    status, reason = StatusCode.RESOURCE_EXHAUSTED, "overloaded"


class TooLarge(FedringError):
    """The payload exceeds its limit."""

    status, reason = StatusCode.RESOURCE_EXHAUSTED, "too_large"


class Damaged(FedringError):
    """The stored part of this upload cannot be used.

    It should be sent again from the start.
    """

    status, reason = StatusCode.UNAVAILABLE, "damaged"


class Unavailable(FedringError):
    """The other side cannot be reached."""

    status, reason = StatusCode.UNAVAILABLE, "unavailable"


class Standby(FedringError):
    """The server waits as a standby; another one leads.

    Args:
        leader: The address at which that one answers the call.
    """

    status, reason = StatusCode.UNAVAILABLE, "standby"

    def __init__(self, leader: str) -> None:
        super().__init__(f"this server waits as a standby, and {leader} leads: ask it there")
        self.metadata = ((LEADER_KEY, leader),)


class OldTerm(FedringError):
    """The server has been replaced by another one.

    It does not know that yet: its callers find it out.
    """

    status, reason = StatusCode.UNAVAILABLE, "old_term"


def refusal_in(group: ExceptionGroup[Exception]) -> FedringError | None:
    """Return the refusal that has ended a group of tasks.

    Use it in `except`, not in `except*`, which before Python 3.11.4 wraps errors raised in it in another group.

    Args:
        group: The errors of the tasks.

    Returns:
        One of the refusals; None if there are only Gone and Stalled, which the caller need not be told.

    Raises:
        ExceptionGroup: If the group holds an error that is no FedringError.
    """
    # A caller that has gone or stalled reads no refusal: only the other errors are worth an answer.
    told = group.split((Gone, Stalled))[1]
    if told is None:
        return None
    refusals, faults = told.split(FedringError)
    if faults is not None:
        raise faults
    return next((error for error in refusals.exceptions if isinstance(error, FedringError)), None) if refusals else None


def reason_of(error: grpc.RpcError | FedringError) -> str:
    """Return the reason of a failed call.

    It is the name of the call's status, in lower case, if the server gave no reason.
    """
    if isinstance(error, FedringError):
        return error.reason
    return reason_in(_trailing_metadata(error)) or status_of(error).name.lower()


def reason_in(metadata: Sequence[tuple[str, str | bytes]] | None) -> str:
    """Return the reason in a call's trailing metadata, or ""."""
    return text_in(metadata, REASON_KEY)


def retry_seconds_of(error: grpc.RpcError, *, most: float = _MOST_RETRY_SECONDS) -> float:
    """Return the seconds that "id_in_use" or "come_back" name.

    Args:
        error: The call that was refused.
        most: Seconds to which the answer is limited.

    Returns:
        The server's answer, limited to 0 to `most`; 10 if it gives no finite number.
    """
    try:
        seconds = float(text_in(_trailing_metadata(error), RETRY_KEY))
    except ValueError:
        return _RETRY_SECONDS
    return min(max(seconds, 0.0), most) if isfinite(seconds) else _RETRY_SECONDS


def _trailing_metadata(error: grpc.RpcError) -> Any:
    return error.trailing_metadata() if isinstance(error, aio.AioRpcError | grpc.Call) else None


def text_in(metadata: Sequence[tuple[str, str | bytes]] | None, wanted: str) -> str:
    """Return the value of a key in metadata, or an empty string."""
    return next((str(value) for key, value in metadata or () if key == wanted), "")


def leader_in(error: grpc.RpcError) -> str:
    """Return the address of the server that leads, or an empty string.

    Only a standby's refusal names it.
    """
    return text_in(_trailing_metadata(error), LEADER_KEY)


def status_of(error: grpc.RpcError | FedringError) -> StatusCode:
    """Return the gRPC status of a failed call or FedringError."""
    if isinstance(error, FedringError):
        return error.status
    code = error.code() if isinstance(error, aio.AioRpcError | grpc.Call) else StatusCode.UNKNOWN
    return code if isinstance(code, StatusCode) else StatusCode.UNKNOWN
