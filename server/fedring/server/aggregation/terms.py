"""The demands of a round on an update."""

from dataclasses import dataclass

from fedring.codec.masked import Width
from fedring.codec.schema import Schema


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
    width: Width | None = None  # what the packet of a masked update must be; None if updates are not masked
