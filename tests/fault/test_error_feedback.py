"""What an update left out is neither lost nor sent twice, wherever a client is killed, however late it comes back."""

import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedring.daemon.crash import DELIVERING
from fedring.v1 import federation_pb2 as fed
from tests.damage import ask
from tests.fault.books import (
    SMALL,
    Training,
    accepted_in,
    has_noted,
    is_spooled,
    model,
    notes_of,
    owed_by,
    replay,
    trainings,
)
from tests.fault.line import Line
from tests.fault.owing import OwingFleet, owing_job, start
from tests.fault.patience import SECONDS, patiently
from tests.fault.user_trainers import delta_of
from tests.fleets import Control, Fleet, until_watching
from tests.system.wire import SIZE, Refused, WireClient, offer_of, outcome, payload_of, run
from tests.waiting import until

ACCEPTED = ("client_accepted", "client_residual_placed", "client_noted")
"""The crash points at which the server has the update already."""


class Debtor(OwingFleet):
    """A client, and another one that delivers zeros, so that each model tells what the first one has sent."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(folder, settings=settings)
        self.open_gate()

    @property
    def folder(self) -> Path:
        return self.folders[0]

    def begin(self, clients: int = 2, **keys: Any) -> int:
        """Begin a round, and deliver the other client's zeros; returns the job."""
        with Control(self.control) as control, WireClient(self.listen, "other") as other:
            until_watching(control, clients)
            job_id = control.start_job(owing_job(min_clients=clients, **keys)).job_id
            command = patiently(self, "a command", lambda: other.expect("train"))
            payload = payload_of(np.zeros(SMALL, np.float32))
            header = other.header(command, payload)
            header.packets[0].num_samples = 1
            other.push(header, payload)
        return job_id

    def end(self, job_id: int) -> None:
        """Return when the job has come to its end."""
        with Control(self.control) as control:
            patiently(self, "the end of the job", lambda: list(control.follow_job(job_id)))
            assert control.job(job_id).state == "completed"

    def crash(self, place: str) -> int:
        """Let the client, started again, be killed at the place, in a round that is not over; returns the job."""
        self.clients[0].env["FL_CRASH_AT"] = place
        self.restart(0)
        job_id = self.begin()
        assert patiently(self, f"the crash {place}", self.clients[0].wait) == 137
        del self.clients[0].env["FL_CRASH_AT"]
        return job_id

    def until_noted(self) -> None:
        """Return when the client has noted its newest update."""
        until(lambda: has_noted(self.folder, self.state, "client-0"))

    def check(self, done: list[Training]) -> None:
        """All that these trainings have learned was sent, once, or is still owed."""
        self.until_noted()
        learned = sum((delta_of(0, each.number, SMALL) for each in done), np.zeros(SMALL, np.float32))
        ((newest,),) = ask(self.state, "SELECT max(version) FROM models")
        assert isinstance(newest, int)
        sent = 2 * (model(self.state, newest, SMALL) - model(self.state, 1, SMALL))
        owed = owed_by(self.folder, SMALL)
        assert owed.any()
        np.testing.assert_array_equal(sent + owed, learned)
        assert "dropped" not in self.clients[0].log.read_text()


@pytest.mark.parametrize(
    ("place", "rounds_away", "kept", "restarted"),
    [
        *((place, 0, 100, False) for place in sorted(DELIVERING)),
        ("client_accepted", 3, 1, False),
        ("client_accepted", 3, 1, True),
        *(pytest.param(place, 3, 1, False, marks=pytest.mark.soak) for place in ACCEPTED[1:]),
        pytest.param("client_accepted", 3, 100, True, marks=pytest.mark.soak),
    ],
)
def test_nothing_is_lost_or_sent_twice_when_a_client_is_killed(
    tmp_path: Path, place: str, rounds_away: int, kept: int, restarted: bool
) -> None:
    with Debtor(tmp_path, keep_update_rounds=kept) as fleet:
        fleet.end(fleet.begin())
        fleet.until_noted()
        job_id = fleet.crash(place)
        spooled = is_spooled(fleet.folder)
        left = fleet.folder / ("update.residual" if place not in ACCEPTED[1:] else "residual.safetensors")
        owed = left.read_bytes()
        if place not in ACCEPTED:
            start(fleet, 0)
            fleet.end(job_id)
            fleet.until_noted()
            fleet.kill(0)
        else:
            fleet.end(job_id)
        for _ in range(rounds_away):
            fleet.end(fleet.begin(1))
        if kept < rounds_away:
            assert ask(fleet.state, "SELECT * FROM updates WHERE client_id = 'client-0'") == []
        if restarted:
            fleet.restart_server()
        fleet.close_gate()
        start(fleet, 0)
        job_id = fleet.begin()
        last = fleet.at_the_gate()
        if place != "client_residual_spooled":  # of an update that there was not yet
            assert (fleet.folder / "residual.safetensors").read_bytes() == owed
        assert not is_spooled(fleet.folder)
        fleet.let_through()
        fleet.end(job_id)
        assert spooled == (place not in ("client_residual_spooled", "client_noted"))
        done = trainings(notes_of(fleet.folder))
        again = place == "client_residual_spooled"  # its training was in vain
        assert last.number == (3 if again else 2)
        fleet.check([done[0], *done[2 if again else 1 :]])


def abandoned(fleet: Debtor) -> bytes:
    """Let the client have a spooled update of a round that is over, and be away; returns the file."""
    fleet.end(fleet.begin())
    fleet.until_noted()
    job_id = fleet.crash("client_update_spooled")
    with Control(fleet.control) as control:
        control.stop_job(job_id)
        patiently(fleet, "the end of the job", lambda: list(control.follow_job(job_id)))
    return (fleet.folder / "update").read_bytes()


@pytest.mark.parametrize("stopped", [False, True], ids=["waits", "is stopped"])
def test_while_a_server_is_frozen_the_client_that_asks_it_keeps_its_update(tmp_path: Path, stopped: bool) -> None:
    fleet, frozen = Debtor(tmp_path, no_progress_seconds=1.0), threading.Event()

    def freeze(data: bytes) -> None:
        if b"to be frozen in" in data:  # the job's name, which comes with the command
            fleet.server.send(signal.SIGSTOP)
            frozen.set()

    with fleet, Control(fleet.control) as control:
        spooled, owed = abandoned(fleet), owed_by(fleet.folder, SMALL)
        with Line(fleet.listen, freeze) as line:
            keys = {"name": "to be frozen in", "deadline_seconds": 240 if stopped else 2}
            job_id = control.start_job(owing_job(min_clients=1, **keys)).job_id
            client = fleet.clients[0]
            client.flags = ["--server", line.address]
            client.start()
            assert frozen.wait(SECONDS)
            if stopped:
                until(lambda: asks(fleet))
                client.send(signal.SIGTERM)
                assert patiently(fleet, "the client's end", client.wait) == 0
            else:
                sentence = "does not say whether it has accepted the spooled update of round 2"
                until(lambda: sentence in client.log.read_text())
            assert (fleet.folder / "update").read_bytes() == spooled
            np.testing.assert_array_equal(owed_by(fleet.folder, SMALL), owed)
            assert len(trainings(notes_of(fleet.folder))) == 2
            fleet.server.send(signal.SIGCONT)
            if stopped:
                client.flags = []
                start(fleet, 0)
                fleet.end(job_id)
            else:  # the time of that round is over: the next one asks again
                patiently(fleet, "the end of the job", lambda: list(control.follow_job(job_id)))
                fleet.end(fleet.begin())
            fleet.until_noted()
        assert "dropped the spooled update of round 2, which is over" in client.log.read_text()
        sent, owed = replay(0, trainings(notes_of(fleet.folder)), accepted_in(fleet.state), SMALL)
        assert [each.training.number for each in sent] == [0, 2]
        np.testing.assert_array_equal(owed_by(fleet.folder, SMALL), owed)


def asks(fleet: Debtor) -> bool:
    """Whether the client is asking what has become of its spooled update."""
    log, mark = fleet.clients[0].log, "Current thread"
    before = log.read_text().count(mark)
    fleet.clients[0].send(signal.SIGUSR1)  # all stacks go to its log
    until(lambda: log.read_text().count(mark) > before)  # another signal could reach another thread, and wait there
    return " in _was_accepted" in log.read_text()


def test_a_client_that_was_forgotten_is_trusted_when_it_comes_back(tmp_path: Path) -> None:
    with Debtor(tmp_path) as fleet, Control(fleet.control) as control:
        fleet.end(fleet.begin())
        fleet.until_noted()
        fleet.kill(0)
        until(lambda: not any(each.state == "watching" for each in control.clients()))
        control.forget_client("client-0")
        assert [each.client_id for each in control.clients()] == ["other"]
        start(fleet, 0)
        fleet.end(fleet.begin())
        fleet.check(trainings(notes_of(fleet.folder)))


@pytest.mark.parametrize("restarted", [False, True])
def test_the_server_knows_a_clients_newest_update_when_its_row_is_long_gone(tmp_path: Path, restarted: bool) -> None:
    payload, newest = payload_of(np.ones(SIZE, np.float32)), fed.UpdateOffer()  # of a
    with Fleet(tmp_path, {"keep_update_rounds": 1}) as fleet, Control(fleet.control) as control:
        for number in range(3):
            with WireClient(fleet.listen, "a" if number == 0 else "other") as client:
                until_watching(control, 1)
                job_id, events = run(control)
                command = client.expect("train")
                offer = offer_of(client.header(command, payload), payload)
                client.push(offer, payload)
                assert outcome(control, job_id, events).state == "completed"
            until(lambda: not any(each.state == "watching" for each in control.clients()))
            newest = newest if number else offer
        assert ask(fleet.directory / "state" / "server", "SELECT * FROM updates WHERE client_id = 'a'") == []
        if restarted:
            fleet.restart_server()
        with WireClient(fleet.listen, "a") as client:
            assert client.joined.last_accepted == fed.LastAccepted(epoch=0, round=1, name=newest.name)
            reply = client.push(newest, payload)
            assert reply is not None
            assert reply.accepted.already
            assert client.push_small(newest, payload).already
            header = fed.UpdateHeader.FromString(newest.header)
            header.train_seconds += 1
            with pytest.raises(Refused, match="already_accepted_other"):
                client.push(header, payload)


def test_the_newest_update_is_the_one_accepted_last_whatever_epochs_headers_name(tmp_path: Path) -> None:
    """A server restored, and then put back to before that by a copy of its files, is in an earlier epoch again."""
    payload, names = payload_of(np.ones(SIZE, np.float32)), []
    with Fleet(tmp_path) as fleet, Control(fleet.control) as control:
        with WireClient(fleet.listen, "a") as client:
            job_id, events = run(control, rounds=2)
            for epoch in (1_700_000_000, 0):
                offer = offer_of(client.header(client.expect("train"), payload, epoch=epoch), payload)
                client.push(offer, payload)
                names.append(offer.name)
            assert outcome(control, job_id, events).state == "completed"
        for _ in range(2):
            with WireClient(fleet.listen, "a") as client:
                assert client.joined.last_accepted == fed.LastAccepted(epoch=0, round=2, name=names[1])
            fleet.restart_server()
