"""The failure of a verb: one sentence, and an exit code.

The sentence is for people, the exit code for programs.
"""

import grpc
from grpc import StatusCode

from fedring.daemon.exits import Exit
from fedring.rpc.channel import encrypts
from fedring.rpc.errors import Standby, leader_in, reason_of, status_of
from fedring.rpc.handshake import diagnose
from fedring.rpc.probe import Listener, listener_at
from fedring.rpc.tls import PLAINTEXT, Tls


class Failure(Exception):
    """A verb has failed.

    The sentence says why, and what to do about it.
    """

    def __init__(self, sentence: str, exit_code: Exit = Exit.FAILED) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code


class Unreachable(Failure):
    """No server answers at the address, or it has stopped answering."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence, Exit.UNAVAILABLE)


_WHY = {
    Listener.NOBODY: ("is it running? Start it with `fl-server`, or name its control_listen address with --server"),
    Listener.TLS: "it speaks TLS: give --tls-ca, and --tls-cert with --tls-key or --token-file",
    Listener.PLAINTEXT: "something else listens there, or a server that does not answer",
}
_OWN_ENDS = ("Locally cancelled by application!", "Channel closed!")
"""What gRPC says of calls that the caller itself has ended."""
_SECONDS = 2.0  # for each handshake that looks for the reason
_EXITS = {
    StatusCode.INVALID_ARGUMENT: Exit.USAGE,
    StatusCode.NOT_FOUND: Exit.USAGE,
    StatusCode.ALREADY_EXISTS: Exit.USAGE,
    StatusCode.DEADLINE_EXCEEDED: Exit.TRY_AGAIN,
    StatusCode.RESOURCE_EXHAUSTED: Exit.TRY_AGAIN,
    StatusCode.ABORTED: Exit.TRY_AGAIN,
    StatusCode.PERMISSION_DENIED: Exit.NOT_ALLOWED,
    StatusCode.UNAUTHENTICATED: Exit.NOT_ALLOWED,
}


def failure_of(error: grpc.RpcError, address: str, *, tls: Tls = PLAINTEXT, named: bool = True) -> Failure:
    """Translate a failed call to the control port.

    Args:
        error: The error of the call.
        address: Address of the control port.
        tls: The certificates of the caller.
        named: Whether the user has named what the server did not find, such as a job; then it is a usage error.
    """
    status = status_of(error)
    if reason_of(error) == "bad_job":
        return Failure(error.details() or "" if isinstance(error, grpc.Call) else str(error), Exit.CONFIG)
    details = (error.details() or "") if isinstance(error, grpc.Call) else str(error)
    # gRPC reports every trouble with TLS as UNAVAILABLE; only the details tell a wrong certificate from a server that
    # is off.
    match status:
        case StatusCode.UNAVAILABLE if "WRONG_VERSION_NUMBER" in details:
            return Unreachable(f"{address} speaks plaintext, and flctl was told to use TLS: leave out --tls-ca")
        case StatusCode.UNAVAILABLE if reason_of(error) == Standby.reason:
            return Failure(
                f"fl-server at {address} waits as a standby: give --server {leader_in(error)}", Exit.UNAVAILABLE
            )
        case StatusCode.UNAVAILABLE:
            return Unreachable(f"cannot reach fl-server's control port at {address}: {_obstacle(address, tls)}")
        case StatusCode.CANCELLED if details not in _OWN_ENDS:
            return Unreachable(f"fl-server at {address} has cut the call off, as when it stops: try again")
        case StatusCode.UNIMPLEMENTED:
            return Failure(
                f"{address} is not fl-server's control port: is it the port for clients? "
                "Name the control_listen address with --server"
            )
        case StatusCode.DEADLINE_EXCEEDED:
            return Failure(f"fl-server at {address} did not answer in time: try again", Exit.TRY_AGAIN)
        case StatusCode.NOT_FOUND if not named:
            return Failure(details)
    return Failure(details or f"fl-server answered {status.name}", _EXITS.get(status, Exit.FAILED))


def _obstacle(address: str, tls: Tls) -> str:
    """Return why no call arrives, and the remedy."""
    listener = listener_at(address)
    if listener is Listener.TLS and encrypts(address, tls):
        found = diagnose(address, tls, _SECONDS)
        return f"{found.found}: {found.advice}".replace("tls.", "--tls-")
    return _WHY[listener]
