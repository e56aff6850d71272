"""The default timeouts that README and docs promise, measured on daemons and rings.

Other tests use longer timeouts, so that they pass on a busy machine; these run alone. Their upper bounds leave room for
a machine that stalls for a few seconds. Tests elsewhere check that the defaults are exactly 5 and 4 seconds.
"""

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
from tests.fault.faulty_fleet import StartedJob
from tests.fault.gate import Gate
from tests.fault.ring_ranks import ring
from tests.fleets import Control
from tests.forks import Daemon

pytestmark = pytest.mark.alone

HERE = Path(__file__).parent
TRUSTED = {"trusted": ["fedring", "user_trainers"]}
MOST = 10.0


class DefaultFleet(fleet.Fleet):
    """Daemons with the defaults that users get."""

    daemon = Daemon


def seconds_between(first: pb.Event, second: pb.Event) -> float:
    return (datetime.fromisoformat(second.at) - datetime.fromisoformat(first.at)).total_seconds()


def test_a_frozen_client_of_a_round_is_lost_after_five_seconds(tmp_path: Path) -> None:
    running, gate = DefaultFleet(tmp_path, TRUSTED, [TRUSTED], env=path_to(HERE)), Gate(tmp_path)
    gate.close_for(running.clients[0])
    job = {"trainer": "user_trainers:gated", "min_clients": 1, "evaluate": False, "deadline_seconds": 240}
    with running, Control(running.control) as control:
        started = StartedJob(running, control, job)
        gate.wait(running)
        frozen = time.monotonic()
        running.clients[0].send(signal.SIGSTOP)
        assert started.until("client_lost").client_id == "client-0"
        assert 3 < time.monotonic() - frozen < MOST  # its last heartbeat may have been a little earlier
        running.clients[0].send(signal.SIGCONT)
        gate.remove_for(running.clients[0])


def test_a_round_goes_on_five_seconds_after_a_client_was_lost(tmp_path: Path) -> None:
    running, gate = DefaultFleet(tmp_path, TRUSTED, [TRUSTED, TRUSTED], env=path_to(HERE)), Gate(tmp_path)
    gate.close_for(running.clients[1])
    job = {"trainer": "user_trainers:gated", "min_clients": 2, "evaluate": False, "deadline_seconds": 240}
    with running, Control(running.control) as control:
        started = StartedJob(running, control, job)
        gate.wait(running)
        started.until("update_accepted")
        killed = time.monotonic()
        running.kill(1)
        lost = started.until("client_lost")
        assert time.monotonic() - killed < 3  # at once, not after 5 seconds of silence
        assert 4.9 < seconds_between(lost, started.until("round_published")) < MOST
        started.until("job_ended")


def test_a_frozen_rank_is_named_after_four_seconds() -> None:
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
