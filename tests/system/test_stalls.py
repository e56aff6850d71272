"""A real client that stalls, and one that is slow: the round goes on without them, and says so."""

import os
import queue
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from fedring.client import Federation, RoundOver, connect
from fedring.train.models import digits_mlp
from fedring.v1 import control_pb2
from fedring.v1 import federation_pb2 as pb
from tests.conftest import path_to
from tests.fleets import Control, Fleet, until_watching
from tests.metrics_page import Page
from tests.system.wire import WireClient, deliver, offer_of, outcome, payload_of
from tests.waiting import until as wait_until

GATED = '''
"""A loss that is computed only while somebody holds the gate open: a named pipe has a writer."""
import os
from fedring.offers import offers
from fedring.train.losses import cross_entropy

@offers("loss")
def loss(outputs, labels):
    os.close(os.open(os.environ["GATE"], os.O_RDONLY))
    return cross_entropy(outputs, labels)
'''
VALUES = 4810  # of the model
STALLED = 6  # seconds: longer than a busy machine keeps those waiting that do not stall


def until(events: Iterable[control_pb2.Event], kind: str) -> control_pb2.Event:
    """Return the next event of this kind."""
    return next(event for event in events if event.kind == kind)


@pytest.mark.slow
def test_a_client_that_stalls_is_not_waited_for_until_it_makes_progress(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    (tmp_path / "gated.py").write_text(GATED)
    client = {"client_id": "bob", "partition_count": 2, "trusted": ["fedring", "gated"]}
    job = {"loss": "gated:loss", "rounds": 2, "evaluate": False, "encoding": "fp32", "stalled_after_seconds": STALLED}
    settings = {"metrics_listen": "127.0.0.1:0"}
    env = {**path_to(tmp_path), "GATE": str(gate)}
    with (
        Fleet(tmp_path, settings, [client], env=env) as fleet,
        Control(fleet.control) as control,
        WireClient(fleet.listen, "ann") as ann,
    ):
        until_watching(control, 2)
        events = control.events()
        job_id = control.start_job(job).job_id
        # Ann is in the middle of her upload for as long as the test wants.
        command = ann.expect("train")
        payload = payload_of(np.zeros(VALUES, np.float32))
        messages: queue.Queue[pb.ClientUpdate | None] = queue.Queue()
        replies = ann.updates.PushUpdate(iter(messages.get, None), metadata=ann.metadata)
        messages.put(pb.ClientUpdate(offer=offer_of(ann.header(command, payload), payload)))
        assert next(replies).resume_offset == 0

        stalled = until(events, "client_stalled")
        assert (stalled.client_id, stalled.text) == (
            "bob",
            f"bob is stalled: it has reported no progress for {STALLED} s, and nobody waits for it",
        )
        assert list(stalled.state.stalled) == ["bob"]
        round_ = control.status().round
        assert (round_.phase, list(round_.stalled), round_.delivered) == ("training", ["bob"], 0)
        page = Page(fleet.ready["metrics"])
        assert page("fl_server_round_clients", state="stalled") == 1
        assert page("fl_server_clients_stalled_total") == 1

        opened = os.open(gate, os.O_WRONLY)
        assert until(events, "client_moves").client_id == "bob"
        assert until(events, "update_accepted").client_id == "bob"  # the round is still open, so it counts
        os.close(opened)
        messages.put(pb.ClientUpdate(chunk=pb.Chunk(data=payload)))
        assert next(replies).HasField("accepted")
        messages.put(None)
        first = until(events, "round_published").state
        assert (first.delivered, list(first.missing), list(first.stalled)) == (2, [], [])

        deliver(ann, np.zeros(VALUES, np.float32))
        assert until(events, "client_stalled").client_id == "bob"
        second = until(events, "round_published").state
        assert (second.delivered, list(second.missing), list(second.stalled)) == (1, ["bob"], ["bob"])
        assert second.seconds < 60  # the deadline is 600 s
        opened = os.open(gate, os.O_WRONLY)
        assert outcome(control, job_id, control.follow_job(job_id, events)).rounds_done == 2
        os.close(opened)


def test_a_round_ends_without_a_straggler(tmp_path: Path) -> None:
    names = ("a", "b", "c")
    with Fleet(tmp_path, {"metrics_listen": "127.0.0.1:0"}) as fleet, Control(fleet.control) as control:
        clients = [WireClient(fleet.listen, name) for name in names]
        job = {"evaluate": False, "encoding": "fp32", "min_clients": 3, "straggler_factor": 1.5}
        events = control.events()
        job_id = control.start_job(job).job_id
        for client in clients[:2]:
            deliver(client, np.zeros(VALUES, np.float32))
        told = until(events, "round_stragglers")
        assert told.text == f"round 1 of job {told.job_id} ends without c: 1.5 times the median time has passed"
        published = until(events, "round_published").state
        assert (published.delivered, list(published.missing), list(published.stragglers)) == (2, ["c"], ["c"])
        assert published.seconds < 60
        assert outcome(control, job_id, control.follow_job(job_id, events)).state == "completed"
        assert Page(fleet.ready["metrics"])("fl_server_stragglers_total") == 1
        for client in clients:
            client.close()


@pytest.mark.slow
def test_a_loop_of_the_users_own_is_waited_for_until_it_has_reported_progress(tmp_path: Path) -> None:
    goes_on = threading.Event()

    def train(federation: Federation) -> None:
        model = digits_mlp()
        for number, task in enumerate(federation):
            task.load_into(model)
            if number == 1:
                task.progress(0.5)
            goes_on.wait()
            goes_on.clear()
            with suppress(RoundOver):
                task.submit(model, samples=1)

    job = {"rounds": 2, "evaluate": False, "encoding": "fp32", "min_clients": 3, "stalled_after_seconds": STALLED}
    with (
        Fleet(tmp_path, {"heartbeat_seconds": 0.1}) as fleet,
        Control(fleet.control) as control,
        WireClient(fleet.listen, "ann") as ann,
        WireClient(fleet.listen, "eve") as eve,
        connect(server=fleet.listen, client_id="bob", state_dir=tmp_path / "bob") as federation,
    ):
        bob = threading.Thread(target=train, args=(federation,))
        bob.start()
        until_watching(control, 3)
        job_id = control.start_job(job).job_id
        deliver(ann, np.zeros(VALUES, np.float32))
        command = eve.expect("train")
        wait_until(lambda: any(c.client_id == "bob" and c.activity == pb.ACTIVITY_TRAINING for c in control.clients()))
        events = control.events()
        eve.say(pb.WatchRequest(matched=True, activity=pb.ACTIVITY_TRAINING))  # she begins after bob, and stalls
        assert until(events, "client_stalled").client_id == "eve"
        goes_on.set()
        payload = payload_of(np.zeros(VALUES, np.float32))
        eve.push(eve.header(command, payload), payload)
        first = until(events, "round_published").state
        assert (first.delivered, list(first.stalled)) == (3, [])

        deliver(ann, np.zeros(VALUES, np.float32))
        deliver(eve, np.zeros(VALUES, np.float32))
        while until(events, "client_stalled").client_id != "bob":  # he has reported progress in this round
            pass
        second = until(events, "round_published").state
        assert (second.delivered, list(second.stalled)) == (2, ["bob"])
        outcome(control, job_id, control.follow_job(job_id, events))
        federation.close()
        goes_on.set()
        bob.join()
