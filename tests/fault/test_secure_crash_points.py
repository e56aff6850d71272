"""Secure aggregation publishes the models of an undisturbed run, bit by bit, wherever a daemon is killed."""

import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

import pytest

from fedring.client.secure.client import CALL_CRASH_POINTS
from fedring.client.secure.participant import CRASH_POINTS as STEP_CRASH_POINTS
from fedring.client.secure.state import END_CRASH_POINTS
from fedring.daemon.crash import DELIVERING, REGISTERED
from fedring.server.secure.rounds import CRASH_POINTS
from tests.damage import ask
from tests.fault.faulty_fleet import job_end, wait_for
from tests.fault.secure_fleet import KILLED, SERVER, SecureFleet, secrets_of, secure_job
from tests.fleets import Control, until_watching

CLIENTS = 3  # the threshold: the round is abandoned if one of them does not survive
ON_THE_SERVER = sorted(CRASH_POINTS | REGISTERED)
AT_A_CLIENT = sorted(STEP_CRASH_POINTS | CALL_CRASH_POINTS | END_CRASH_POINTS | DELIVERING)
PLACES = [
    {daemon: place for daemon, place in ((SERVER, server), (number % CLIENTS, client)) if place}
    for number, (server, client) in enumerate(zip_longest(ON_THE_SERVER, AT_A_CLIENT))
]
"""The crash points, by the numbers of the daemons, round by round."""

Digests = Callable[[int], list[str]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Digests]:
    """Return a function that returns the digests of the first models that rounds make when nothing goes wrong."""
    known: list[str] = []
    with SecureFleet(tmp_path_factory.mktemp("undisturbed"), CLIENTS) as fleet:

        def digests(count: int) -> list[str]:
            while len(known) < count:
                known.append(published(fleet, {}))
            return known[:count]

        yield digests


@pytest.mark.slow
@pytest.mark.parametrize(
    "places",
    [
        PLACES[::5],
        pytest.param(PLACES[::2], marks=pytest.mark.soak),
        pytest.param(PLACES[1::2], marks=pytest.mark.soak),
    ],
    ids=["some", "even", "odd"],
)
def test_models_are_those_of_an_undisturbed_run_wherever_daemons_are_killed(
    tmp_path: Path, undisturbed: Digests, places: Sequence[Mapping[int, str]]
) -> None:
    expected = undisturbed(len(places))
    with SecureFleet(tmp_path, CLIENTS) as fleet:
        for killed, digest in zip(places, expected, strict=True):
            assert published(fleet, killed) == digest, killed
        fleet.wait_until_forgotten()
        state = fleet.state
    assert ask(state, "SELECT round FROM secure_messages UNION SELECT round FROM secure_rounds") == []


def published(fleet: SecureFleet, killed: Mapping[int, str]) -> str:
    """Run a round, which all clients must survive, and return the digest of its model."""
    assert fleet.run_round(killed) == ("", CLIENTS), killed
    return fleet.digest()


@pytest.mark.slow
def test_a_client_that_has_lost_the_update_under_its_masks_is_out_and_the_round_goes_on(tmp_path: Path) -> None:
    clients, victim, place = 5, 2, "client_secure_payload"
    with SecureFleet(tmp_path, clients) as fleet:
        fleet.kill_at(victim, place)
        with Control(fleet.control) as control:
            until_watching(control, clients)
            events = control.events()
            job_id = control.start_job(secure_job(clients)).job_id
            assert wait_for(fleet, f"the crash {place}", fleet.clients[victim].wait) == KILLED
            (secrets,) = secrets_of(fleet.folders[victim])
            assert stat.S_IMODE(secrets.stat().st_mode) == 0o600
            (fleet.folders[victim] / "update").unlink()
            fleet.clients[victim].start()
            texts = wait_for(fleet, "the end", lambda: [event.text for event in control.follow_job(job_id, events)])
            (round_,) = control.rounds(job_id=job_id)
        assert (round_.phase, round_.delivered, list(round_.missing)) == ("published", clients - 1, ["client-2"])
        assert any(text.startswith("client-2 could not train: lost_masked_update:") for text in texts)
        fleet.wait_until_forgotten()
        assert fleet.run_round({}) == ("", clients)


@pytest.mark.slow
def test_the_secrets_of_a_client_that_is_away_when_its_round_ends_are_gone_when_it_is_back(tmp_path: Path) -> None:
    with SecureFleet(tmp_path, CLIENTS) as fleet:
        for place in ("client_secure_SendUnmaskShares_done", "client_secure_ended"):
            fleet.kill_at(0, place)
            with Control(fleet.control) as control:
                until_watching(control, CLIENTS)
                job_id = control.start_job(secure_job(CLIENTS)).job_id
                assert wait_for(fleet, f"the crash {place}", fleet.clients[0].wait) == KILLED
                job_end(fleet, control, job_id)
                assert control.job(job_id).state == "completed"
            assert secrets_of(fleet.folders[0])
            fleet.restart_server()
            fleet.clients[0].start()
            fleet.wait_until_forgotten()
