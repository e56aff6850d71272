"""The errors of remote calls.

The loss of a peer is an error of the ring (`fedring.ring.PeerLost`).
"""

from grpc import StatusCode

from fedring.rpc.errors import FedringError


class BadMessage(FedringError, ValueError):
    """A message breaks the protocol, or a value cannot be sent.

    Nothing was run.

    Nothing was run.
    """

    status, reason = StatusCode.INVALID_ARGUMENT, "bad_message"


class CallRefused(FedringError, RuntimeError):
    """An owner refuses a request."""

    status, reason = StatusCode.FAILED_PRECONDITION, "refused"


class RemoteError(FedringError, RuntimeError):
    """A call has failed at its owner.

    A note has the owner's traceback.

    Attributes:
        owner: The owner's name.
        type_name: The name of the error's type at the owner.
        reason: A stable word: that of the owner's error if it has one (such as "not_offered"), or "remote_failed".
    """

    status, reason = StatusCode.INTERNAL, "remote_failed"

    def __init__(self, owner: str, type_name: str, message: str, *, reason: str = "") -> None:
        super().__init__(f"{owner}: {type_name}: {message}", reason=reason)
        self.owner, self.type_name = owner, type_name
