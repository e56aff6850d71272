"""The losses of a session, and their explanations."""

from grpc import StatusCode, aio

from fedring.client.session.connection import Connection
from fedring.rpc.errors import (
    FedringError,
    IdInUse,
    OldTerm,
    Standby,
    Unavailable,
    UnknownMethod,
    leader_in,
    reason_of,
    retry_seconds_of,
    status_of,
)

Lost = aio.AioRpcError | FedringError


def explain(lost: Lost, connection: Connection, obstacle: str) -> tuple[str, str]:
    """Return the new state of a session, and a sentence on it.

    Args:
        lost: Why the session ended, or was not made.
        connection: Over which it was, or would have been.
        obstacle: Why no call arrives at the server's address, if none does.
    """
    address = connection.address
    if isinstance(lost, Unavailable):
        return "closed", f"fl-server at {address} closed the session; joining again"
    if isinstance(lost, OldTerm):
        return "replaced", f"fl-server at {address} has been replaced ({lost}); looking for the one that leads"
    if isinstance(lost, FedringError):
        return "silent", f"fl-server at {address} does not answer ({lost}); joining again"
    if is_a(lost, Standby):
        return (
            "standby",
            f"fl-server at {address} waits as a standby; looking for {leader_in(lost) or 'the leader'}",
        )
    if is_unreachable(lost):
        return "unreachable", f"cannot reach fl-server at {address}; still trying: {obstacle}"
    if is_a(lost, IdInUse):
        name, seconds = connection.client_id, retry_seconds_of(lost)
        return "in_use", f"fl-server at {address} has another session of {name!r}; trying for {seconds:g} s"
    if is_a(lost, UnknownMethod):
        port = "fl-server's port for flctl, its control_listen: name its `listen` address as `server`"
        return "wrong_port", f"{address} is {port}; still trying"
    if status_of(lost) is StatusCode.UNIMPLEMENTED:
        return "no_server", f"the program at {address} is not fl-server: check `server`; still trying"
    sentence = f"fl-server at {address} answered {reason_of(lost)}; still trying: {lost.details()}"
    return status_of(lost).name, sentence


def is_a(lost: Lost, kind: type[FedringError]) -> bool:
    """Return whether the server has answered with this error."""
    return isinstance(lost, aio.AioRpcError) and reason_of(lost) == kind.reason


def is_unreachable(lost: Lost) -> bool:
    """Return whether no server has answered."""
    nobody = (StatusCode.UNAVAILABLE, StatusCode.DEADLINE_EXCEEDED)
    return isinstance(lost, aio.AioRpcError) and status_of(lost) in nobody and not is_a(lost, Standby)
