"""The seconds that README and docs promise, as daemons and rings have them by default.

Other tests give everybody more patience, so that no busy machine fails them. These run alone. Their upper bounds leave
room for a machine that stands still for a few seconds; that the defaults are 5 and 4 is tested exactly elsewhere.
"""

import os
import signal
import time
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path

import pytest

from fedring.ctl import fleet
from fedring.ring.options import RingOptions
from fedring.v1 import control_pb2 as pb
from tests.conftest import path_to
from tests.fault.patience import Story, patiently
from tests.fault.test_ring import ring
from tests.fleets import Control, until_watching
from tests.forks import Daemon

pytestmark = pytest.mark.alone

HERE = Path(__file__).parent
TRUSTED = {"trusted": ["fedring", "user_trainers"]}
MOST = 10.0


class Shipped(fleet.Fleet):
    """Daemons with every default that they are shipped with."""

    daemon = Daemon


def seconds_between(first: pb.Event, second: pb.Event) -> float:
    return (datetime.fromisoformat(second.at) - datetime.fromisoformat(first.at)).total_seconds()


def test_a_client_that_falls_silent_is_lost_after_five_seconds(tmp_path: Path) -> None:
    with Shipped(tmp_path, {}, [{}]) as running, Control(running.control) as control:
        until_watching(control, 1)
        events = control.events()
        frozen = time.monotonic()
        running.clients[0].send(signal.SIGSTOP)
        assert next(event.client_id for event in events if event.kind == "client_lost") == "client-0"
        assert 3 < time.monotonic() - frozen < MOST  # it may have been heard up to a heartbeat earlier
        running.clients[0].send(signal.SIGCONT)
        events.cancel()


def test_a_round_goes_on_five_seconds_after_a_client_was_lost(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    for path in (gate, tmp_path / "gate.began"):
        os.mkfifo(path)
    running = Shipped(tmp_path, TRUSTED, [TRUSTED, TRUSTED], env=path_to(HERE))
    running.clients[1].env["FL_TEST_GATE"] = str(gate)
    job = {"trainer": "user_trainers:gated", "min_clients": 2, "evaluate": False, "deadline_seconds": 240}
    with running, Control(running.control) as control:
        story = Story(running, control, job)
        assert patiently(running, "client 1 at the gate", (tmp_path / "gate.began").read_text) == "began"
        story.until("update_accepted")
        killed = time.monotonic()
        running.kill(1)
        lost = story.until("client_lost")
        assert time.monotonic() - killed < 3  # at once: not after 5 seconds of silence
        assert 4.9 < seconds_between(lost, story.until("round_published")) < MOST
        story.until("job_ended")


def test_a_rank_that_falls_silent_is_named_after_four_seconds() -> None:
    with ExitStack() as stack:
        ranks = ring(stack, 3, lost_after_seconds=RingOptions().lost_after_seconds)
        for rank in ranks:
            rank.tell("idle")
        frozen = time.time()
        ranks[2].process.send_signal(signal.SIGSTOP)
        for rank in ranks[:2]:
            heard = rank.hear("error")
            assert (heard["error"], heard["rank"]) == ("PeerLost", 2)
            assert 2 < heard["at"] - frozen < MOST
