"""A client that still trains for a round that has ended: operators see it, and no other round gets it meanwhile."""

import json
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from fedring.v1 import control_pb2 as pb
from fedring.v1 import federation_pb2 as wire
from tests import forks
from tests.conftest import path_to
from tests.fault.faulty_fleet import FaultyFleet, job_end, wait_for
from tests.fault.gate import Gate
from tests.fleets import Control, Fleet, run_job, until_watching
from tests.system.wire import SIZE, WireClient, payload_of, vector_job

HERE = Path(__file__).parent
TRUSTED = {"trusted": ["fedring", "user_trainers"]}
JOB: dict[str, Any] = {"rounds": 1, "subset_size": 32, "evaluate": False, "min_clients": 1}


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path)


@pytest.fixture
def fleet(tmp_path: Path, gate: Gate) -> Iterator[FaultyFleet]:
    """Start a server and two clients, of which the first waits at the gate."""
    fleet = FaultyFleet(tmp_path, {"web_port": 0, **TRUSTED}, [TRUSTED] * 2, env=path_to(HERE))
    gate.close_for(fleet.clients[0])
    with fleet:
        yield fleet


def client(control: Control, name: str) -> pb.Client:
    return next(each for each in control.clients() if each.client_id == name)


def on_the_page(fleet: FaultyFleet) -> dict[str, Any]:
    with urllib.request.urlopen(f"{fleet.web}api/state", timeout=60) as answer:
        return next(each for each in json.load(answer)["clients"] if each["client_id"] == "client-0")


def test_a_client_that_trains_for_an_ended_round_is_not_ready(fleet: FaultyFleet, gate: Gate) -> None:
    with Control(fleet.control) as control:
        until_watching(control, 2)
        stuck = control.start_job({**JOB, "min_clients": 2, "trainer": "user_trainers:gated"}).job_id
        gate.wait(fleet)
        control.stop_job(stuck)
        job = run_job(control, JOB)  # while the first client is at the gate
        assert job.state == "completed"
        (round_,) = control.rounds(job_id=job.job_id)
        assert (round_.selected, round_.delivered, list(round_.missing)) == (1, 1, [])
        late = client(control, "client-0")
        assert (late.state, late.late_job, late.late_round) == ("watching", stuck, 1)
        assert late.late_since
        shown = on_the_page(fleet)
        assert (shown["late_job"], shown["late_round"], shown["late_since"]) == (stuck, 1, late.late_since)
        done = forks.run("fedring.ctl.main", "clients", "--server", fleet.control, "--output", "json", timeout=60)
        rows = json.loads(done.stdout)["clients"]
        assert [row.get("late_job", 0) for row in rows] == [stuck, 0]
        table = forks.run("fedring.ctl.main", "clients", "--server", fleet.control, timeout=60).stdout
        assert "ready" in table
        events = control.events()
        waiting = control.start_job({**JOB, "min_clients": 2}).job_id
        told = wait_for(fleet, "the barrier", lambda: next(each for each in events if each.kind == "round_waits"))
        assert "ready=1/2" in told.text
        assert "still at work for rounds that have ended: client-0" in told.text
        gate.let_through(fleet)
        job_end(fleet, control, waiting, events)
        assert control.job(waiting).state == "completed"
        (round_,) = control.rounds(job_id=waiting)
        assert (round_.selected, round_.delivered) == (2, 2)
        assert client(control, "client-0").late_since == ""


def test_a_client_that_comes_back_after_the_training_and_before_the_end_of_its_round_is_ready(tmp_path: Path) -> None:
    """Its new session is not told of the end, and so it can never say that it has read that."""
    with Fleet(tmp_path) as fleet, Control(fleet.control) as control, WireClient(fleet.listen, "ann") as ann:
        with WireClient(fleet.listen, "bob") as bob:
            until_watching(control, 2)
            control.start_job(
                vector_job(rounds=2, min_clients=2, min_clients_to_aggregate=1, close_at_minimum=True, evaluate=True)
            )
            bob.expect("train")
            command = ann.expect("train")
            payload = payload_of(np.ones(SIZE, np.float32))
            ann.push(ann.header(command, payload), payload)
            order = ann.expect("evaluate")
        with WireClient(fleet.listen, "bob") as bob:
            bob.say(wire.WatchRequest(matched=True, work=wire.Work(round=1, job_id=1)))
            until_watching(control, 2)
            for each in (ann, bob):
                report = wire.EvaluationReport(round=order.round, model_digest=order.model_digest)
                with suppress(grpc.RpcError):  # whoever was not there when the evaluation began is not asked
                    each.commands.ReportEvaluation(report, metadata=each.metadata)
            bob.say(wire.WatchRequest(matched=True, work=wire.Work()))
            assert bob.expect("train").round == 2
