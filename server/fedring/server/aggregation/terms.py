"""The demands of a round on an update."""

from dataclasses import dataclass
from typing import Protocol

from fedring.codec import Reader
from fedring.codec.schema import Schema
from fedring.server.state.rows import PacketSpec
from fedring.v1 import federation_pb2 as pb


class OpaqueForm(Protocol):
    """The form of updates that the server cannot open one by one."""

    def packets(self, header: pb.UpdateHeader) -> tuple[PacketSpec, ...]:
        """Return the packets of an update, which carry a delta.

        Raises:
            CodecError: if they are not of this form.
        """
        ...

    def check(self, reader: Reader, size: int) -> None:
        """Check the payload of an update.

        Nothing but the form of it can be known.

        Args:
            reader: returns so many bytes of the payload at an offset.
            size: of the payload.

        Raises:
            CodecError: if it is not of this form.
        """
        ...


@dataclass(frozen=True, slots=True)
class Terms:
    """The demands of the current round on one client's update."""

    base_digest: str  # of the model that it starts from
    most_bytes: int  # of the payload
    schema: Schema  # of that model
    deltas_only: bool = False  # whether parameters must come as the difference to that model
    bare: bool = False  # whether nothing is kept of what the client says of its data
    silent: bool = False  # whether an update that says something of a client's data is refused
    control_line: str = ""  # the line of the control variate that must have corrected the gradients; empty = none
    opaque: OpaqueForm | None = None  # the form of an update that only a sum opens; None if the server reads each
