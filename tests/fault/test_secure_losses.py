"""A round with secure aggregation outlives as many losses as its threshold allows, in whatever steps, and no more."""

from collections.abc import Iterator
from itertools import combinations_with_replacement
from pathlib import Path

import numpy as np
import pytest

from fedring.server.secure.rounds import FAILURE_CRASH_POINTS
from tests.damage import ask
from tests.fault.faulty_fleet import FaultyFleet, job_end, wait_for
from tests.fault.secure_party import fail, go_through, opens, party, revealed, start
from tests.fleets import Control, Fleet
from tests.secure_client import CALLS, STEPS, mean_of
from tests.system.wire import outcome, parameters

CLIENTS = 8  # two of them may be lost
AFTER_THE_ROSTER = STEPS[1:]
TWO = list(combinations_with_replacement(AFTER_THE_ROSTER, 2))
THREE = [
    pytest.param(steps, marks=[pytest.mark.soak] if number % 3 else [], id="-".join(steps))
    for number, steps in enumerate(combinations_with_replacement(AFTER_THE_ROSTER, 3))
]
LAST_OF_THREE = {
    "shares": {"too_few_for_threshold"},
    "updates": {"too_few_to_unmask", "too_few_clients"},
    "survivors": {"too_few_to_unmask"},
    "unmask": {"too_few_to_unmask"},
}
"""Why the round is abandoned, by the step in which the last of three clients is lost."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with FaultyFleet(tmp_path_factory.mktemp("losses")) as fleet:
        yield fleet


@pytest.fixture
def state(fleet: Fleet) -> Path:
    return Path(fleet.server.settings["state_dir"])


@pytest.mark.parametrize("lost_in", TWO, ids="-".join)
def test_a_round_publishes_whichever_two_of_eight_clients_are_lost(fleet: Fleet, lost_in: tuple[str, str]) -> None:
    with Control(fleet.control) as control, party(fleet, CLIENTS) as clients:
        job_id, events = start(control, clients)
        left = go_through(clients, lost_in)
        assert wait_for(fleet, "the end of the job", lambda: outcome(control, job_id, events)).state == "completed"
        lost = control.rounds(limit=1)[0].secure.lost
        assert {step: count for step, count in lost.items() if count} == {step: lost_in.count(step) for step in lost_in}
        counted = [client for client in clients if client.name in left[0].survivors]
        assert len(counted) == CLIENTS - sum(step in ("shares", "updates") for step in lost_in)
        newest, base = control.models(limit=2)
        link = left[0].link
        expected = parameters(link, base.version) + mean_of(counted)
        np.testing.assert_allclose(parameters(link, newest.version), expected, atol=1e-7)
        for name, shares in revealed(clients).items():
            own = name in left[0].survivors
            assert opens(left[0].roster, name, shares) == (name in left[0].peers and not own, own)


@pytest.mark.parametrize("lost_in", THREE)
def test_a_round_unmasks_nobody_whichever_three_of_eight_clients_are_lost(
    fleet: Fleet, state: Path, lost_in: tuple[str, str, str]
) -> None:
    with Control(fleet.control) as control, party(fleet, CLIENTS) as clients:
        job_id, events = start(control, clients)
        go_through(clients, lost_in)
        assert wait_for(fleet, "the end of the job", lambda: outcome(control, job_id, events)).state == "failed"
        assert control.rounds(limit=1)[0].reason in LAST_OF_THREE[lost_in[-1]]
        shares = revealed(clients)
        assert any(map(any, shares.values())) == (lost_in[-1] == "unmask")
        for name, known in shares.items():
            assert not any(opens(clients[-1].roster, name, known))
            assert not all(known), "both kinds of shares of one client were revealed"
    assert ask(state, "SELECT round FROM secure_messages UNION SELECT round FROM secure_rounds") == []


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(each, marks=[pytest.mark.soak] if each.startswith("before") else [])
        for each in sorted(FAILURE_CRASH_POINTS)
    ],
)
def test_a_server_that_is_killed_when_a_sum_is_lost_gives_the_same_reason(tmp_path: Path, place: str) -> None:
    fleet = FaultyFleet(tmp_path)
    fleet.server.env["FL_CRASH_AT"] = place
    with fleet, party(fleet, CLIENTS) as clients:
        with Control(fleet.control) as control:
            job_id, _ = start(control, clients)
            for step in STEPS[:3]:
                for call in CALLS[step]:
                    for client in clients:
                        getattr(client, call)()
            for client in clients[3:]:
                client.sign_survivors()
            for client in clients[:3]:
                fail(client)
        assert wait_for(fleet, f"the crash {place}", fleet.server.wait) == 137
        del fleet.server.env["FL_CRASH_AT"]
        fleet.start_server()
        for client in clients:
            client.again(fleet.listen)
        for client in clients[:3] if place.startswith("before") else ():
            client.step("survivors")  # the round goes on, and the server has forgotten that the client has failed
            fail(client)
        with Control(fleet.control) as control:
            job_end(fleet, control, job_id)
            assert control.rounds(limit=1)[0].reason == "too_few_to_unmask"
