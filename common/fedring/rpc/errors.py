"""Every failure a caller can see, in one table.

A refused call carries its status, one sentence, and the `reason`, a stable word
that programs and metrics use, in the trailing metadata.
"""

from collections.abc import Sequence
from math import isfinite
from typing import Any

import grpc
from grpc import StatusCode, aio

REASON_KEY = "fl-reason"

RETRY_KEY = "fl-retry-seconds"
"""The key in the trailing metadata of "id_in_use" that says for how long to try again."""

_RETRY_SECONDS, _MOST_RETRY_SECONDS = 10.0, 3600.0  # where the server does not say, and at most, whatever it says


class FedringError(Exception):
    """A refusal we meant; its sentence says what to do."""

    status = StatusCode.INTERNAL
    reason = "internal"
    metadata: tuple[tuple[str, str], ...] = ()
    """What else the caller is told in the trailing metadata, beside the reason."""

    def __init__(self, detail: str = "", *, reason: str = "") -> None:
        super().__init__(detail)
        self.reason = reason or type(self).reason


class BadRequest(FedringError):
    """The caller's message is wrong, now and later."""

    status, reason = StatusCode.INVALID_ARGUMENT, "bad_request"


class BadUpdate(BadRequest):
    """The update's header or payload is not valid."""

    reason = "bad_update"


class DamagedOnTheWay(FedringError):
    """The bytes that came are not those that were sent: send them again."""

    status, reason = StatusCode.DATA_LOSS, "digest_mismatch"


class UnknownMethod(FedringError):
    """The port serves no method of this name."""

    status, reason = StatusCode.UNIMPLEMENTED, "unknown_method"


class UnknownRound(FedringError):
    """No such round is open for this client."""

    status, reason = StatusCode.FAILED_PRECONDITION, "unknown_round"


class UnknownModel(FedringError):
    """No such model version is kept."""

    status, reason = StatusCode.NOT_FOUND, "unknown_model"


class NoSuchJob(FedringError):
    """No such job is known, or it has ended."""

    status, reason = StatusCode.NOT_FOUND, "unknown_job"


class NoSuchToken(FedringError):
    """No such token was ever made."""

    status, reason = StatusCode.NOT_FOUND, "unknown_token"


class NoSuchClient(FedringError):
    """Nothing is known of a client of this name."""

    status, reason = StatusCode.NOT_FOUND, "unknown_client"


class ClientIsHere(FedringError):
    """The client cannot be forgotten now."""

    status, reason = StatusCode.FAILED_PRECONDITION, "client_is_here"


class OtherUpdate(FedringError):
    """Another update of this client was accepted for the round."""

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
    """The call names no open session: join again."""

    status, reason = StatusCode.UNAUTHENTICATED, "no_session"


class Superseded(FedringError):
    """A newer session of the same client has taken over."""

    status, reason = StatusCode.ABORTED, "superseded"


class IdInUse(FedringError):
    """The client id has a live session, and the caller has not proven to be its owner.

    Args:
        detail: One sentence for the caller.
        retry_seconds: For how long to try again. By then the session has ended, if its owner is not there any more.
    """

    status, reason = StatusCode.ALREADY_EXISTS, "id_in_use"

    def __init__(self, detail: str = "", *, retry_seconds: float = _RETRY_SECONDS) -> None:
        super().__init__(detail)
        self.metadata = ((RETRY_KEY, f"{retry_seconds:g}"),)


class Gone(FedringError):
    """The caller is not there any more; it is worth no line in the log."""

    status, reason = StatusCode.CANCELLED, "gone"


class Stalled(FedringError):
    """No byte came for too long."""

    status, reason = StatusCode.DEADLINE_EXCEEDED, "stalled"


class Overloaded(FedringError):
    """The server cannot take this now; try again later."""

    status, reason = StatusCode.RESOURCE_EXHAUSTED, "overloaded"


class TooLarge(FedringError):
    """The payload is longer than it may be."""

    status, reason = StatusCode.RESOURCE_EXHAUSTED, "too_large"


class Damaged(FedringError):
    """What was stored of this upload cannot be used: send it again, from the start."""

    status, reason = StatusCode.UNAVAILABLE, "damaged"


class Unavailable(FedringError):
    """The other side cannot be reached."""

    status, reason = StatusCode.UNAVAILABLE, "unavailable"


def refusal_in(group: ExceptionGroup[Exception]) -> FedringError | None:
    """The refusal that has ended a group of tasks, if there is one; a fault is raised.

    A caller that is gone or stalled is told nothing. Not for `except*`: what is raised there comes out in another
    group before Python 3.11.4.
    """
    told = group.split((Gone, Stalled))[1]
    if told is None:
        return None
    refusals, faults = told.split(FedringError)
    if faults is not None:
        raise faults
    return next((error for error in refusals.exceptions if isinstance(error, FedringError)), None) if refusals else None


def reason_of(error: grpc.RpcError | FedringError) -> str:
    """The stable reason of a refused call, or its status' name in small letters; that of an error of our own."""
    if isinstance(error, FedringError):
        return error.reason
    return reason_in(_trailing_metadata(error)) or status_of(error).name.lower()


def reason_in(metadata: Sequence[tuple[str, str | bytes]] | None) -> str:
    """The reason in a call's trailing metadata; empty if there is none."""
    return _text_in(metadata, REASON_KEY)


def retry_seconds_of(error: grpc.RpcError) -> float:
    """Return for how many seconds the server wants a refused call to be tried again.

    Args:
        error: A call that was refused with "id_in_use".

    Returns:
        What the server says, but at least 0 and at most 3600; 10 if it says nothing that is a finite number.
    """
    try:
        seconds = float(_text_in(_trailing_metadata(error), RETRY_KEY))
    except ValueError:
        return _RETRY_SECONDS
    return min(max(seconds, 0.0), _MOST_RETRY_SECONDS) if isfinite(seconds) else _RETRY_SECONDS


def _trailing_metadata(error: grpc.RpcError) -> Any:
    return error.trailing_metadata() if isinstance(error, aio.AioRpcError | grpc.Call) else None


def _text_in(metadata: Sequence[tuple[str, str | bytes]] | None, wanted: str) -> str:
    return next((str(value) for key, value in metadata or () if key == wanted), "")


def status_of(error: grpc.RpcError | FedringError) -> StatusCode:
    """The gRPC status of a failed call, or the one that an error of our own stands for."""
    if isinstance(error, FedringError):
        return error.status
    code = error.code() if isinstance(error, aio.AioRpcError | grpc.Call) else StatusCode.UNKNOWN
    return code if isinstance(code, StatusCode) else StatusCode.UNKNOWN
