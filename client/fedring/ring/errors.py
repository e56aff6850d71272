"""The errors of collectives. A RingError ends the generation, on every rank."""

from grpc import StatusCode

from fedring.daemon.logs import visible
from fedring.rpc.errors import FedringError


class RingError(FedringError, RuntimeError):
    """The generation has failed: no collective of it will work any more.

    Its text, of which a peer may have said a part, has escapes for what is neither printable nor the end of a line.

    Attributes:
        rank: The rank that is lost or at fault, if it is known.
    """

    status, reason = StatusCode.ABORTED, "ring_failed"

    def __init__(self, detail: str = "", *, rank: int | None = None) -> None:
        super().__init__("\n".join(map(visible, detail.split("\n"))))
        self.rank = rank


class PeerLost(RingError):
    """A rank has died, is frozen, or cannot be reached."""

    status, reason = StatusCode.UNAVAILABLE, "peer_lost"


class CollectiveTimeout(RingError):
    """A rank did not send its data in time."""

    status, reason = StatusCode.DEADLINE_EXCEEDED, "timeout"


class Mismatch(RingError):
    """Ranks run different operations under one key."""

    status, reason = StatusCode.FAILED_PRECONDITION, "mismatch"


class BadFrame(RingError):
    """A peer sent a frame that no correct worker sends."""

    status, reason = StatusCode.INVALID_ARGUMENT, "bad_frame"


class Overrun(RingError):
    """Peers are too far ahead of this rank.

    Their frames for operations that have not started here exceed its memory limit.
    """

    status, reason = StatusCode.RESOURCE_EXHAUSTED, "overrun"


class Forked(RingError):
    """This process is a fork of a worker, and cannot run collectives.

    The worker and its peers go on.
    """

    status, reason = StatusCode.FAILED_PRECONDITION, "forked"


class NotSupported(FedringError, NotImplementedError):
    """The ring does not have the requested collective.

    The group can still be used.
    """

    status, reason = StatusCode.UNIMPLEMENTED, "not_supported"


BY_REASON = {kind.reason: kind for kind in (PeerLost, CollectiveTimeout, Mismatch, BadFrame, Overrun)}
