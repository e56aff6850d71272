"""fl-server is killed around each commit of a round with secure aggregation, and its model is the same."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path

import numpy as np
import pytest

from fedring.server.secure.rounds import CRASH_POINTS
from tests.fault.faulty_fleet import wait_for
from tests.fleets import Control, Fleet
from tests.secure_client import SecureClient
from tests.system.wire import SIZE, Refused, parameters, published_version, vector_job

STEPS = {
    "keys": ["send_keys"],
    "shares": ["send_shares"],
    "updates": ["take_peers", "push"],
    "signature": ["sign_survivors"],
    "unmask": ["send_unmask_shares"],
}
"""What clients do, by what the rows of their messages are called."""

CALLS = {
    "keys": "SendKeys",
    "shares": "SendShares",
    "signature": "SignSurvivors",
    "unmask": "SendUnmaskShares",
}
DECIDED_AFTER = {"roster": "keys", "peers": "shares", "survivors": "updates", "signers": "signature"}

PLACES = sorted(CRASH_POINTS)


@contextmanager
def started(folder: Path, place: str = "") -> Iterator[tuple[Fleet, list[SecureClient]]]:
    """Start a server that is killed at a place, clients, and a job of theirs."""
    with Fleet(folder) as fleet, ExitStack() as stack:
        rng = np.random.default_rng(3)
        if place:
            fleet.server.env["FL_CRASH_AT"] = place
            fleet.restart_server()
        clients = []
        for name in ("a", "b", "c", "d", "e"):
            clients.append(SecureClient(fleet.listen, name, rng.normal(0, 0.03, SIZE).astype(np.float32)))
            stack.callback(clients[-1].close)
        table = {"secure_aggregation": {"step_seconds": 60}, "weights": "uniform", "min_clients_to_aggregate": 4}
        with Control(fleet.control) as control:
            control.start_job(vector_job(min_clients=len(clients), **table))
        yield fleet, clients


def published(fleet: Fleet, clients: list[SecureClient]) -> bytes:
    """Wait for the model of the round; return its parameters."""
    with Control(fleet.control) as control:
        published_version(control, clients[0].command.round)
    return parameters(clients[0].link).tobytes()


def revive(fleet: Fleet, clients: list[SecureClient], place: str) -> None:
    """Wait until the server was killed, start it again, and let the clients come back."""
    assert wait_for(fleet, f"the crash {place}", fleet.server.wait) == 137
    del fleet.server.env["FL_CRASH_AT"]
    fleet.start_server()
    for client in clients:
        client.again(fleet.listen)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return the parameters of the model when nothing goes wrong."""
    with started(tmp_path_factory.mktemp("undisturbed")) as (fleet, clients):
        for steps in (["begin"], *STEPS.values()):
            for step in steps:
                for client in clients:
                    getattr(client, step)()
        return published(fleet, clients)


@pytest.mark.parametrize(
    "place",
    [pytest.param(place, marks=[pytest.mark.soak] if number % 6 else []) for number, place in enumerate(PLACES)],
)
def test_a_secure_round_ends_with_the_same_model_wherever_its_server_is_killed(
    tmp_path: Path, undisturbed: bytes, place: str
) -> None:
    what = place.split("_")[2]
    with started(tmp_path, place) as (fleet, clients):
        if what == "start":
            revive(fleet, clients, place)
        for client in clients:
            client.begin()
        for kind, steps in STEPS.items():
            here = clients
            if kind == what:
                with pytest.raises(Refused):
                    getattr(clients[0], steps[0])()
                revive(fleet, clients, place)
                clients[0].call(CALLS[kind], clients[0].sent[CALLS[kind]])
                here = clients[1:]
            decided = kind == DECIDED_AFTER.get(what)
            with suppress(Refused) if decided else nullcontext():  # the server may be killed before its last answer
                for step in steps:
                    for client in here:
                        getattr(client, step)()
            if decided:
                revive(fleet, clients, place)
        assert published(fleet, clients) == undisturbed
