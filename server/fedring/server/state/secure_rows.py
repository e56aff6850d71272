"""The rows that a round with secure aggregation keeps until it ends.

They are the clients' messages and the decisions. Nothing of it is secret from the server.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class SecureMessageRow:
    """A client's message for a round's secure aggregation.

    There is one of each kind.
    """

    round: int
    client_id: str
    kind: str  # "keys", "shares", "signature" or "unmask"
    body: bytes


@dataclass(frozen=True, slots=True)
class SecureRoundRow:
    """The decisions of a round's secure aggregation."""

    round: int
    epoch: int  # in which the round has begun
    groups: list[dict[str, Any]]  # empty until the keys have come
