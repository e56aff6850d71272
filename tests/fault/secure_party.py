"""Clients on the wire that take part in a round with secure aggregation, some of which are lost on the way."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import numpy as np

from fedring.secure.keys import commitment, public_key
from fedring.secure.roster import Roster
from fedring.secure.shamir import BadShares, combine
from fedring.v1 import control_pb2
from fedring.v1 import federation_pb2 as pb
from fedring.v1 import secure_pb2 as wire
from tests.fleets import Control, Fleet
from tests.secure_client import CALLS, STEPS, SecureClient
from tests.system.wire import SIZE, Refused, run

Party = list[SecureClient]


@contextmanager
def party(server: Fleet, count: int) -> Iterator[Party]:
    """Open so many clients, each with an update of its own."""
    rng = np.random.default_rng(7)
    clients: Party = []
    try:
        for number in range(count):
            update = rng.normal(0, 0.03, SIZE).astype(np.float32)
            clients.append(SecureClient(server.listen, f"c{number:02}", update))
        yield clients
    finally:
        for client in clients:
            client.close()


def start(control: Control, clients: Party, **keys: Any) -> tuple[int, Iterator[control_pb2.Event]]:
    """Start a job of one round for the clients, and let each of them begin it; return the job's id and its events."""
    table = {"step_seconds": 120, **keys.pop("secure_aggregation", {})}
    fixed = {"weights": "uniform", "deadline_seconds": 240, "min_clients": len(clients), "max_abandoned": 1}
    fixed |= {"min_clients_to_aggregate": 2 * len(clients) // 3 + 1, "secure_aggregation": table, "start": "fresh"}
    started = run(control, **{**fixed, **keys})
    for client in clients:
        client.begin()
    return started


def fail(client: SecureClient) -> None:
    """Let a client say that it cannot go on."""
    failure = pb.Failure(round=client.command.round, reason="bad_roster")
    client.link.say(pb.WatchRequest(matched=True, failure=failure))


def go_through(clients: Party, lost_in: Sequence[str]) -> Party:
    """Let the clients make all steps, but lose the first of them in the first of these steps, and so on.

    Returns:
        The clients that are left. They do what they are asked for until the round is over.
    """
    left = list(clients)
    for step in STEPS:
        for _ in range(lost_in.count(step)):
            fail(left.pop(0))
        over = len(left) < 2 * len(clients) // 3 + 1
        for call in CALLS[step]:
            for client in left:
                with suppress(Refused) if over else nullcontext():
                    getattr(client, call)()
        if over:
            break
    return left


Shares = dict[int, bytes]
"""Shares of one secret, by their places."""


def revealed(clients: Party) -> dict[str, tuple[Shares, Shares]]:
    """Return what the answers of all clients say of each of them: shares of its masking key, and of its own mask."""
    found: dict[str, tuple[Shares, Shares]] = {client.name: ({}, {}) for client in clients}
    for client in clients:
        answer: wire.UnmaskShares | None = client.sent.get("SendUnmaskShares")
        if answer is not None:
            place = client.roster.places[client.name]
            for peer, share in zip(client.peers, answer.shares, strict=True):
                found[peer][peer in client.survivors][place] = share
    return found


def opens(roster: Roster, name: str, shares: tuple[Shares, Shares]) -> tuple[bool, bool]:
    """Return whether shares give a client's masking key, and whether they give the seed of its own mask."""
    member, (masking, own_mask) = roster.member(name), map(_combined, shares)
    return (
        masking is not None and public_key(masking) == member.masking,
        own_mask is not None and commitment(own_mask) == member.own_mask,
    )


def _combined(shares: Shares) -> bytes | None:
    try:
        return combine(shares)
    except BadShares:
        return None
