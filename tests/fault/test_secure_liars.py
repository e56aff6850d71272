"""Clients that send wrong shares: they cannot end a round while enough are right, and nobody else is blamed.

Eight clients take part. Six right shares of each secret are needed.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedring.secure.shamir import SHARE_BYTES
from fedring.v1 import control_pb2
from fedring.v1 import secure_pb2 as wire
from tests.fault.faulty_fleet import FaultyFleet, job_end, wait_for
from tests.fault.secure_party import start
from tests.fleets import Control, Fleet, until_watching
from tests.secure_client import CALLS, STEPS, SecureClient, mean_of
from tests.system.wire import SIZE, Refused, outcome, parameters, published_version, run

CLIENTS = 8
WRONG = bytes(SHARE_BYTES)


class WrongGiver(SecureClient):
    """A client that gives out wrong shares of what it was dealt."""

    def unmask_shares(self) -> wire.UnmaskShares:
        """Return wrong shares."""
        return wire.UnmaskShares(round=self.command.round, shares=[WRONG] * len(self.peers))


class WrongDealer(SecureClient):
    """A client that deals one wrong share of each of its secrets, to the first or the second member."""

    def split(self, secret: bytes) -> list[bytes]:
        """Return a share for each member."""
        shares = super().split(secret)
        shares[self.name == "c00"] = WRONG
        return shares


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with FaultyFleet(tmp_path_factory.mktemp("liars")) as fleet:
        yield fleet


class Party:
    """Eight clients, of which the first few are of these kinds."""

    def __init__(self, fleet: Fleet, *kinds: type[SecureClient]) -> None:
        rng = np.random.default_rng(7)
        found = [*kinds, *[SecureClient] * (CLIENTS - len(kinds))]
        self.fleet = fleet
        self.clients = [
            kind(fleet.listen, f"c{number:02}", rng.normal(0, 0.03, SIZE).astype(np.float32))
            for number, kind in enumerate(found)
        ]

    def __enter__(self) -> "Party":
        return self

    def __exit__(self, *_: object) -> None:
        for client in self.clients:
            client.close()

    def go_on(self, clients: Sequence[SecureClient], *steps: str) -> None:
        """Let clients make steps, all of them one after the other; liars are the first."""
        for step in steps:
            for call in CALLS[step]:
                for client in clients:
                    getattr(client, call)()

    def run_round(self, control: Control) -> tuple[control_pb2.Round, list[control_pb2.Event]]:
        """Run a job of one round; return the round, and what was told of liars."""
        newest = control.status().model_version
        told = control.events()
        job_id, events = start(control, self.clients)
        self.go_on(self.clients, *STEPS)
        state = wait_for(self.fleet, "the end of the job", lambda: outcome(control, job_id, events)).state
        (round_,) = control.rounds(limit=1)
        assert (state == "completed") == (round_.model_version > newest)
        lies = []
        for event in told:
            if event.kind == "client_lied":
                lies.append(event)
            if event.kind == "job_ended" and event.job_id == job_id:
                break
        return round_, lies

    def check_sum(self, control: Control, clients: Sequence[SecureClient]) -> None:
        """Assert that the newest model has moved by the exact mean of what these clients have masked."""
        newest, base = control.models(limit=2)
        link = clients[-1].link
        expected = parameters(link, base.version) + mean_of(clients)
        np.testing.assert_allclose(parameters(link, newest.version), expected, atol=1e-7)


@pytest.mark.parametrize("kind", [WrongGiver, WrongDealer])
@pytest.mark.parametrize("count", [1, 2])
def test_wrong_shares_do_not_end_a_round_and_name_who_has_sent_them(
    fleet: Fleet, kind: type[SecureClient], count: int
) -> None:
    with Control(fleet.control) as control, Party(fleet, *[kind] * count) as party:
        round_, lies = party.run_round(control)
        assert round_.phase == "published"
        party.check_sum(control, party.clients)
        liars = [client.name for client in party.clients[:count]]
        assert (list(round_.liars), list(round_.left_out)) == (liars, [])
        assert [event.client_id for event in lies] == liars
        for event, name in zip(lies, liars, strict=True):
            assert f"bad_share: {name} sent wrong shares, and later rounds go on without it" in event.text


def test_if_too_few_shares_are_right_the_liars_are_named_and_nobody_else(fleet: Fleet) -> None:
    with Control(fleet.control) as control, Party(fleet, *[WrongGiver] * 3) as party:
        round_, lies = party.run_round(control)
        liars = ["c00", "c01", "c02"]
        assert (round_.phase, round_.reason, list(round_.liars)) == ("abandoned", "too_few_to_unmask", liars)
        assert [event.client_id for event in lies] == liars
        (job,) = control.jobs(limit=1)
        assert "too_few_to_unmask: the masks of 0 updates can be removed" in job.reason
        assert "bad_share: c00, c01, c02 sent wrong shares" in job.reason


def test_a_liar_is_left_out_of_all_later_rounds_of_the_job(tmp_path: Path) -> None:
    with FaultyFleet(tmp_path) as fleet, Party(fleet, WrongGiver) as party:
        clients, honest = party.clients, party.clients[1:]
        with Control(fleet.control) as control:
            until_watching(control, CLIENTS)
            job_id, _ = run(control, rounds=3, **KEYS)
            for client in clients:
                client.begin()
            party.go_on(clients, *STEPS)
            published_version(control, clients[0].command.round)
            for client in honest:
                client.begin()
            party.go_on(honest, "keys")
        fleet.server.kill()  # what is known of the liar is in the row of the round before
        fleet.start_server()
        for client in clients:
            client.again(fleet.listen)
        with Control(fleet.control) as control:
            party.go_on(honest, *STEPS[1:])
            published_version(control, honest[0].command.round)
            party.check_sum(control, honest)
            for client in honest:
                client.begin()
            party.go_on(honest, *STEPS)
            job_end(fleet, control, job_id)
            rounds = control.rounds(limit=3)[::-1]
        assert [(round_.phase, round_.selected) for round_ in rounds] == [
            ("published", CLIENTS),
            ("published", CLIENTS - 1),
            ("published", CLIENTS - 1),
        ]
        assert [list(round_.liars) for round_ in rounds] == [["c00"], [], []]
        assert [list(round_.left_out) for round_ in rounds] == [[], ["c00"], ["c00"]]


KEYS: dict[str, Any] = {
    "weights": "uniform",
    "deadline_seconds": 60,
    "min_clients": CLIENTS - 1,
    "min_clients_to_aggregate": 6,
    "secure_aggregation": {"step_seconds": 60},
    "start": "fresh",
}


def test_a_job_that_cannot_do_without_a_liar_says_for_whom_it_waits(tmp_path: Path) -> None:
    with FaultyFleet(tmp_path) as fleet, Party(fleet, WrongGiver) as party, Control(fleet.control) as control:
        keys = KEYS | {"min_clients": CLIENTS, "barrier_timeout_seconds": 1.0, "max_abandoned": 1}
        until_watching(control, CLIENTS)  # the first round must not wait in vain
        job_id, events = run(control, rounds=2, **keys)
        for client in party.clients:
            client.begin()
        party.go_on(party.clients, *STEPS)
        job = wait_for(fleet, "the end of the job", lambda: outcome(control, job_id, events))
        assert job.state == "failed"
        assert "ready=7/8" in job.reason
        assert "left out for wrong shares: c00" in job.reason


def test_a_server_that_is_killed_when_a_sum_is_lost_still_names_the_liars(tmp_path: Path) -> None:
    fleet = FaultyFleet(tmp_path)
    fleet.server.env["FL_CRASH_AT"] = "after_secure_failure_commit"
    with fleet, Party(fleet, *[WrongGiver] * 3) as party:
        with Control(fleet.control) as control:
            job_id, _ = start(control, party.clients)
            party.go_on(party.clients, *STEPS[:-1])
            party.go_on(party.clients[:-1], "unmask")
            with suppress(Refused):  # the answer may be lost
                party.go_on(party.clients[-1:], "unmask")
        assert wait_for(fleet, "the crash", fleet.server.wait) == 137
        del fleet.server.env["FL_CRASH_AT"]
        fleet.start_server()
        with Control(fleet.control) as control:
            job_end(fleet, control, job_id)
            (round_,) = control.rounds(limit=1)
            assert (round_.reason, list(round_.liars)) == ("too_few_to_unmask", ["c00", "c01", "c02"])
