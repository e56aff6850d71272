"""A client's residual is neither lost nor sent twice, wherever the client is killed and however late it returns."""

import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedring.client.transfer.spool import Spool
from fedring.daemon.crash import DELIVERING
from fedring.v1 import federation_pb2 as fed
from tests.damage import ask
from tests.fault.faulty_fleet import SECONDS, job_end, wait_for
from tests.fault.residual_fleet import ResidualFleet, residual_job, start_client
from tests.fault.residuals import (
    SMALL,
    Training,
    accepted_digests,
    has_spooled_update,
    notes_path,
    read_trainings,
    replay,
    residual_of,
    stored_model,
)
from tests.fault.user_trainers import delta_of
from tests.fleets import Control, Fleet, until_watching
from tests.kept import kept_file, kept_residual, sections_in
from tests.proxy import Proxy
from tests.system.wire import SIZE, Refused, WireClient, offer_of, outcome, payload_of, run
from tests.waiting import until

ACCEPTED = ("client_accepted", "client_left_placed", "client_noted")
"""The crash points at which the server has accepted the update already."""


def _accepted(client: WireClient, header: fed.UpdateHeader, payload: bytes) -> bool:
    """Push an update; return whether this machine did not stand still meanwhile for longer than the server allows."""
    try:
        return client.push(header, payload) is not None
    except Refused as refused:
        if refused.reason != "stalled":
            raise
        return False


class OneClientFleet(ResidualFleet):
    """A real client, and one that delivers zeros, so that each model shows what the real one has sent."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(folder, settings=settings)
        self.remove_gate()

    @property
    def folder(self) -> Path:
        return self.folders[0]

    def start_round(self, clients: int = 2, **keys: Any) -> int:
        """Start a job of one round, deliver the zeros, and return the job's id."""
        with Control(self.control) as control, WireClient(self.listen, "other") as other:
            until_watching(control, clients)
            job_id = control.start_job(residual_job(min_clients=clients, **keys)).job_id
            command = wait_for(self, "a command", lambda: other.expect("train"))
            payload = payload_of(np.zeros(SMALL, np.float32))
            header = other.header(command, payload)
            header.packets[0].num_samples = 1
            until(lambda: _accepted(other, header, payload))
        return job_id

    def crash(self, place: str) -> int:
        """Restart the client, let it be killed at this crash point of a new round, and return the open job's id."""
        self.clients[0].env["FL_CRASH_AT"] = place
        self.restart(0)
        job_id = self.start_round()
        assert wait_for(self, f"the crash {place}", self.clients[0].wait) == 137
        del self.clients[0].env["FL_CRASH_AT"]
        return job_id

    def check(self, done: list[Training]) -> None:
        """Assert that the sum of these trainings' deltas was sent once, but for what is in the residual."""
        self.wait_until_known()
        learned = sum((delta_of(0, each.number, SMALL) for each in done), np.zeros(SMALL, np.float32))
        ((newest,),) = ask(self.state, "SELECT max(version) FROM models")
        assert isinstance(newest, int)
        sent = 2 * (stored_model(self.state, newest, SMALL) - stored_model(self.state, 1, SMALL))
        residual = residual_of(self.folder, SMALL)
        assert residual.any()
        np.testing.assert_array_equal(sent + residual, learned)
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
def test_no_residual_is_lost_or_sent_twice_when_a_client_is_killed(
    tmp_path: Path, place: str, rounds_away: int, kept: int, restarted: bool
) -> None:
    with OneClientFleet(tmp_path, keep_update_rounds=kept) as fleet:
        fleet.finish_job(fleet.start_round())
        fleet.wait_until_known()
        job_id = fleet.crash(place)
        spooled = has_spooled_update(fleet.folder)
        left = fleet.folder / "update.left" if place not in ACCEPTED[1:] else kept_file(fleet.folder)
        residual = sections_in(left)["residual"].tensors["residual"].numpy()
        if place not in ACCEPTED:
            start_client(fleet, 0)
            fleet.finish_job(job_id)
            fleet.wait_until_known()
            fleet.kill(0)
        else:
            fleet.finish_job(job_id)
        for _ in range(rounds_away):
            fleet.finish_job(fleet.start_round(1))
        if kept < rounds_away:
            assert ask(fleet.state, "SELECT * FROM updates WHERE client_id = 'client-0'") == []
        if restarted:
            fleet.restart_server()
        fleet.close_gate()
        start_client(fleet, 0)
        job_id = fleet.start_round()
        last = fleet.wait_at_gate()
        if place != "client_left_spooled":  # there, the client had not spooled its update yet
            np.testing.assert_array_equal(kept_residual(fleet.folder), residual)
        assert not has_spooled_update(fleet.folder)
        fleet.let_through()
        fleet.finish_job(job_id)
        assert spooled == (place not in ("client_left_spooled", "client_noted"))
        done = read_trainings(notes_path(fleet.folder))
        repeated = place == "client_left_spooled"  # the client has lost that training
        assert last.number == (3 if repeated else 2)
        fleet.check([done[0], *done[2 if repeated else 1 :]])


def spool_abandoned_update(fleet: OneClientFleet) -> bytes:
    """Kill the client as it begins to send its update, and stop that round; return the spool's file."""
    fleet.finish_job(fleet.start_round())
    fleet.wait_until_known()
    job_id = fleet.crash("client_update_spooled")
    with Control(fleet.control) as control:
        control.stop_job(job_id)
        job_end(fleet, control, job_id)
    spooled = Spool(fleet.folder, "client-0").pending()
    assert spooled is not None
    spooled.leaves()
    return (fleet.folder / "update").read_bytes()


@pytest.mark.parametrize("stopped", [False, True], ids=["waits", "is stopped"])
def test_a_client_keeps_its_spooled_update_while_a_frozen_server_does_not_answer(tmp_path: Path, stopped: bool) -> None:
    fleet, frozen = OneClientFleet(tmp_path, no_progress_seconds=1.0), threading.Event()

    def freeze(data: bytes) -> bytes:
        if b"to be frozen in" in data:  # the name of the job in the command
            fleet.server.send(signal.SIGSTOP)
            frozen.set()
        return data

    with fleet, Control(fleet.control) as control:
        spooled, residual = spool_abandoned_update(fleet), residual_of(fleet.folder, SMALL)
        with Proxy(fleet.listen, downward=lambda number: freeze, half_open=True) as proxy:
            keys = {"name": "to be frozen in", "deadline_seconds": 240 if stopped else 2}
            job_id = control.start_job(residual_job(min_clients=1, **keys)).job_id
            client = fleet.clients[0]
            client.flags = ["--server", proxy.address]
            client.start()
            assert frozen.wait(SECONDS)
            if stopped:
                until(lambda: is_asking(fleet))
                client.send(signal.SIGTERM)
                assert wait_for(fleet, "the client's end", client.wait) == 0
            else:
                sentence = "does not say whether it has accepted the spooled update of round 2"
                until(lambda: sentence in client.log.read_text())
            assert (fleet.folder / "update").read_bytes() == spooled
            np.testing.assert_array_equal(residual_of(fleet.folder, SMALL), residual)
            assert len(read_trainings(notes_path(fleet.folder))) == 2
            fleet.server.send(signal.SIGCONT)
            if stopped:
                client.flags = []
                start_client(fleet, 0)
                fleet.finish_job(job_id)
            else:  # the deadline of that round has passed; the client asks again in the next round
                job_end(fleet, control, job_id)
                fleet.finish_job(fleet.start_round())
            fleet.wait_until_known()
        assert "dropped the spooled update of round 2, which is over" in client.log.read_text()
        sent, residual = replay(0, read_trainings(notes_path(fleet.folder)), accepted_digests(fleet.state), SMALL)
        assert [each.training.number for each in sent] == [0, 2]
        np.testing.assert_array_equal(residual_of(fleet.folder, SMALL), residual)


def is_asking(fleet: OneClientFleet) -> bool:
    """Return whether the client is asking the server if it has accepted the spooled update."""
    log, mark = fleet.clients[0].log, " in _run_program"  # of the main thread, the last one in each dump
    before = log.read_text().count(mark)
    fleet.clients[0].send(signal.SIGUSR1)  # all stacks go to its log
    until(lambda: log.read_text().count(mark) > before)  # a signal before that could reach another thread
    return " in _was_accepted" in log.read_text()


def test_a_forgotten_client_that_returns_keeps_its_residual(tmp_path: Path) -> None:
    with OneClientFleet(tmp_path) as fleet, Control(fleet.control) as control:
        fleet.finish_job(fleet.start_round())
        fleet.wait_until_known()
        fleet.kill(0)
        until(lambda: not any(each.state == "watching" for each in control.clients()))
        control.forget_client("client-0")
        assert [each.client_id for each in control.clients()] == ["other"]
        start_client(fleet, 0)
        fleet.finish_job(fleet.start_round())
        fleet.check(read_trainings(notes_path(fleet.folder)))


@pytest.mark.parametrize("restarted", [False, True])
def test_the_server_knows_a_clients_newest_update_after_its_row_was_pruned(tmp_path: Path, restarted: bool) -> None:
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


def test_the_newest_update_is_the_one_accepted_last_whatever_the_epochs_in_headers(tmp_path: Path) -> None:
    """A server is in an earlier epoch again if its files from before a restore are copied back."""
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
