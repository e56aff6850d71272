"""Masked updates of groups, as clients send them."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from fedring.secure.masks import MASKED, mask, masked_packet, wrap
from fedring.server.aggregation.contributions import Contribution
from fedring.server.model.masked_sum import GroupMasks
from fedring.server.state.rows import lay_out


@dataclass(frozen=True)
class Bytes:
    data: bytes

    @property
    def size(self) -> int:
        return len(self.data)

    def read(self, offset: int, size: int) -> bytes:
        return self.data[offset : offset + size]


def sent(payloads: Mapping[str, Bytes]) -> list[Contribution]:
    """Return the updates with these payloads, as the server opens them."""
    laid = {name: lay_out([("parameters", "delta", MASKED, payload.size)]) for name, payload in payloads.items()}
    return [Contribution(name, 1.0, laid[name], payload.read) for name, payload in payloads.items()]


def masked(
    integers: Mapping[str, NDArray[np.int32]], bits: int, lost: Sequence[str] = ()
) -> tuple[GroupMasks, dict[str, Bytes]]:
    """Mask the integers of the clients of one group as clients do; return what the server knows when it has the shares.

    Args:
        integers: of each client.
        bits: of a value.
        lost: clients whose updates do not come.
    """
    clients = sorted(integers)
    own = {client: random.randbytes(32) for client in clients}
    pairs = {pair: random.randbytes(32) for pair in combinations(clients, 2)}
    words = {client: wrap(integers[client], bits) for client in clients}
    for client, seed in own.items():
        words[client] += mask(seed, bits, 0, len(words[client]))
    for (first, second), seed in pairs.items():
        piece = mask(seed, bits, 0, len(words[first]))
        words[first] += piece
        words[second] -= piece
    payloads = {client: Bytes(b"".join(masked_packet(words[client], bits))) for client in clients}
    left = []
    survivors = [client for client in clients if client not in lost]
    for client in survivors:
        left.append((own[client], 1))
        for other in lost:
            left.append((pairs[min(client, other), max(client, other)], 1 if client < other else -1))
    return GroupMasks(survivors[0], tuple(survivors), bits, tuple(left)), payloads
