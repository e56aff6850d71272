"""Secure aggregation publishes the models of an undisturbed run, bit by bit, wherever a daemon is killed."""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

import pytest

from fedring.daemon.crash import (
    DELIVERING,
    REGISTERED,
    SECURE,
    SECURE_CALLS,
    SECURE_COMMITS,
    SECURE_END,
    SECURE_FAILURE,
)
from tests.fault.secure_fleet import SERVER, SecureFleet, secrets_of
from tests.waiting import until

CLIENTS = 3  # the threshold: the round is abandoned if one of them does not survive
ON_THE_SERVER = sorted(SECURE_COMMITS | REGISTERED)
AT_A_CLIENT = sorted(SECURE | SECURE_CALLS | SECURE_END | DELIVERING)
PLACES = [
    {daemon: place for daemon, place in ((SERVER, server), (number % CLIENTS, client)) if place}
    for number, (server, client) in enumerate(zip_longest(ON_THE_SERVER, AT_A_CLIENT))
]
"""The crash points, by the numbers of the daemons, round by round."""
SOME = 6  # rounds in which something is killed in `make test`


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the digests of the models that rounds make when nothing goes wrong."""
    with SecureFleet(tmp_path_factory.mktemp("undisturbed"), CLIENTS) as fleet:
        return [published(fleet, {}) for _ in range(-(-len(PLACES) // 2))]


@pytest.mark.slow
@pytest.mark.parametrize(
    "places",
    [PLACES[::4][:SOME], pytest.param(PLACES[::2], marks=pytest.mark.soak), pytest.param(PLACES[1::2], marks=pytest.mark.soak)],
    ids=["some", "even", "odd"],
)
def test_models_are_those_of_an_undisturbed_run_wherever_daemons_are_killed(
    tmp_path: Path, undisturbed: list[str], places: Sequence[Mapping[int, str]]
) -> None:
    with SecureFleet(tmp_path, CLIENTS) as fleet:
        for killed, digest in zip(places, undisturbed, strict=False):
            assert published(fleet, killed) == digest, killed
        fleet.wait_until_forgotten()


def published(fleet: SecureFleet, killed: Mapping[int, str]) -> str:
    """Run a round, which all clients must survive, and return the digest of its model."""
    assert fleet.run_round(killed) == ("", CLIENTS), killed
    return fleet.digest()
