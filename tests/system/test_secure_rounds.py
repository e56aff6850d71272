"""Rounds with secure aggregation on the wire: a real fl-server, and clients that run the protocol step by step."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from fedring.v1 import control_pb2
from tests.damage import ask
from tests.fleets import Control, Fleet
from tests.secure_client import SecureClient, mean_of
from tests.system.wire import SIZE, WireClient, outcome, parameters, run

NAMES = ("a", "b", "c", "d", "e")

Party = list[SecureClient]


@pytest.fixture
def party(server: Fleet) -> Iterator[Callable[..., Party]]:
    """Return a function that opens clients of these names, each with an update of its own."""
    with ExitStack() as stack:

        def open_(names: Sequence[str] = NAMES, samples: int = 1) -> Party:
            rng = np.random.default_rng(7)
            found = []
            for name in names:
                client = SecureClient(server.listen, name, rng.normal(0, 0.03, SIZE).astype(np.float32), samples)
                stack.callback(client.close)
                found.append(client)
            return found

        yield open_


def start(control: Control, party: Party, needed: int = 4, **keys: Any) -> tuple[int, Iterator[control_pb2.Event]]:
    """Start a job with secure aggregation for the clients, and let each of them begin its first round."""
    table = {"step_seconds": 60, **keys.pop("secure_aggregation", {})}
    fixed = {"weights": "uniform", "deadline_seconds": 60, "min_clients": len(party), "max_abandoned": 1}
    fixed |= {"min_clients_to_aggregate": needed, "secure_aggregation": table}
    started = run(control, **{**fixed, **keys})
    for client in party:
        client.begin()
    return started


def each(party: Party, *steps: str) -> None:
    """Let all clients make a step, then all the next one."""
    for step in steps:
        for client in party:
            getattr(client, step)()


def expected(party: Party, link: WireClient) -> "np.ndarray[Any, Any]":
    """Return the first model plus the mean of what these clients have masked."""
    return parameters(link, 1) + mean_of(party)


def progress(control: Control) -> control_pb2.SecureProgress:
    """Return how far the round in progress, or the last one, is."""
    return control.rounds(limit=1)[0].secure


def test_the_model_moves_by_the_mean_of_updates_that_the_server_cannot_read(
    server: Fleet, control: Control, party: Callable[..., Party]
) -> None:
    clients = party()
    job_id, events = start(control, clients)
    each(clients, "send_keys", "send_shares", "take_peers", "push", "sign_survivors", "send_unmask_shares")
    assert outcome(control, job_id, events).state == "completed"
    np.testing.assert_allclose(parameters(clients[0].link), expected(clients, clients[0].link), atol=1e-7)
    done = progress(control)
    assert (done.step, done.groups, sum(done.lost.values())) == ("done", 1, 0)
    state = server.directory / "state" / "server"
    assert ask(state, "SELECT * FROM secure_messages UNION ALL SELECT *, '' FROM secure_rounds") == []
    for client in clients:
        assert client.link.expect("round_ended").round == client.command.round


def test_updates_count_by_samples_up_to_the_largest_weight(control: Control, party: Callable[..., Party]) -> None:
    clients = party()
    for client, samples in zip(clients, (1, 2, 3, 4, 100), strict=True):
        client.samples = samples
    job_id, events = start(control, clients, weights="samples", secure_aggregation={"max_weight": 10})
    each(clients, "send_keys", "send_shares", "take_peers", "push", "sign_survivors", "send_unmask_shares")
    assert outcome(control, job_id, events).state == "completed"
    assert [client.levels[-1] for client in clients] == [1, 2, 3, 4, 10]
    np.testing.assert_allclose(parameters(clients[0].link), expected(clients, clients[0].link), atol=1e-7)


@pytest.mark.parametrize("lost_in", ["keys", "shares", "updates", "survivors", "unmask"])
def test_a_client_may_be_lost_in_any_step(control: Control, party: Callable[..., Party], lost_in: str) -> None:
    clients = party()
    needed = 4
    job_id, events = start(control, clients, needed)
    rest, lost = clients[1:], clients[0]
    steps = {
        "keys": ["send_keys"],
        "shares": ["send_shares"],
        "updates": ["take_peers", "push"],
        "survivors": ["sign_survivors"],
        "unmask": ["send_unmask_shares"],
    }
    here = clients
    for name, calls in steps.items():
        if name == lost_in:
            lost.link.say(failed(lost))
            here = rest
        each(here, *calls)
    assert outcome(control, job_id, events).state == "completed"
    counted = clients if lost_in in ("survivors", "unmask") else rest
    np.testing.assert_allclose(parameters(rest[0].link), expected(counted, rest[0].link), atol=1e-7)
    assert progress(control).lost[lost_in] == 1


def failed(client: SecureClient) -> Any:
    """Return what a client says that cannot go on."""
    from fedring.v1 import federation_pb2 as pb

    return pb.WatchRequest(matched=True, failure=pb.Failure(round=client.command.round, reason="bad_roster"))
