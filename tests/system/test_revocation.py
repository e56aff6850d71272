"""Certificates are revoked while the daemons run: no daemon restarts, and the revoked are out within seconds."""

import queue
from pathlib import Path
from typing import Any

import grpc
import pytest

from fedring.daemon.exits import Exit
from fedring.rpc.channel import open_sync_channel
from fedring.rpc.contract import PROTOCOL
from fedring.rpc.errors import reason_of
from fedring.v1 import control_pb2 as pb
from fedring.v1.control_pb2_grpc import ControlServiceStub
from fedring.v1.federation_pb2 import JoinRequest, WatchRequest
from fedring.v1.federation_pb2_grpc import TrainCmdServiceStub
from tests.fault.faulty_fleet import FaultyFleet
from tests.fleets import Control, Fleet
from tests.pki import Pki, flctl

SECONDS = 60.0
REVOKED = (grpc.StatusCode.UNAUTHENTICATED, "revoked_certificate")


def table(pki: Pki, name: str) -> dict[str, str]:
    return pki.table(name) | {"crl": str(pki.folder / "ca.crl")}


def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    """Make the call, which must be refused; return the status and the reason."""
    with pytest.raises(grpc.RpcError) as refused:
        call()
    return refused.value.code(), reason_of(refused.value)


def test_the_calls_of_a_revoked_caller_end_and_new_ones_are_refused(tmp_path: Path) -> None:
    pki = Pki(tmp_path / "pki")
    pki.issue("ann", "bob")
    flctl("certs", "issue", pki.folder, "eve", "--role", "operator")
    with (
        Fleet(tmp_path, {"tls": table(pki, "server")}) as fleet,
        open_sync_channel(fleet.control, pki.tls("operator")) as operator,
        Control(fleet.control, channel=operator) as control,
        open_sync_channel(fleet.listen, pki.tls("ann")) as ann,
        open_sync_channel(fleet.control, pki.tls("eve")) as eve,
    ):
        events = control.events()
        join = JoinRequest(client_id="ann", protocol=PROTOCOL, software="test")
        session_id = TrainCmdServiceStub(ann).Join(join, timeout=SECONDS).session_id
        requests: queue.SimpleQueue[WatchRequest | None] = queue.SimpleQueue()
        requests.put(WatchRequest(matched=True))
        watch = TrainCmdServiceStub(ann).Watch(
            iter(requests.get, None), metadata=(("fl-session", session_id),), timeout=SECONDS
        )
        assert next(event.client_id for event in events if event.kind == "client_joined") == "ann"
        spying = ControlServiceStub(eve).WatchEvents(pb.WatchEventsRequest(), timeout=SECONDS)
        flctl("certs", "revoke", pki.folder, "ann", "eve")
        assert refusal(lambda: list(watch)) == REVOKED
        assert refusal(lambda: list(spying)) == REVOKED
        requests.put(None)
        assert next(event.client_id for event in events if event.kind == "client_lost") == "ann"
        assert refusal(lambda: TrainCmdServiceStub(ann).Join(join, timeout=SECONDS)) == REVOKED
        assert refusal(lambda: ControlServiceStub(eve).GetStatus(pb.GetStatusRequest(), timeout=SECONDS)) == REVOKED
        with open_sync_channel(fleet.listen, pki.tls("bob")) as bob:
            request = JoinRequest(client_id="bob", protocol=PROTOCOL, software="test")
            assert TrainCmdServiceStub(bob).Join(request, timeout=SECONDS).session_id
        assert control.status().refused["revoked_certificate"] >= 4
        events.cancel()


def test_a_revoked_worker_leaves_and_comes_back_with_a_new_certificate(tmp_path: Path) -> None:
    pki, names = Pki(tmp_path / "pki"), [f"client-{number}" for number in range(3)]
    pki.issue(*names)
    job = {"mode": "data_parallel", "min_clients": 2, "rounds": 1000, "batch_size": 32, "epochs": 1}
    job |= {"evaluate": False, "data_parallel": {"replacement_seconds": 1}}  # nobody waits for the revoked one
    with (
        FaultyFleet(tmp_path, {"tls": table(pki, "server")}, [{"tls": table(pki, name)} for name in names]) as fleet,
        open_sync_channel(fleet.control, pki.tls("operator")) as channel,
        Control(fleet.control, channel=channel) as control,
    ):
        events = control.events()
        job_id = control.start_job(job).job_id
        formed = (event.text for event in events if event.kind == "group_formed")
        assert any("3 workers" in text for text in formed)
        flctl("certs", "revoke", pki.folder, "client-2")
        assert fleet.clients[2].wait(SECONDS) == Exit.NOT_ALLOWED
        assert "revoked_certificate" in fleet.clients[2].tail()
        assert any("2 workers" in text for text in formed)  # the others go on
        flctl("certs", "renew", pki.folder, "client-2")
        fleet.restart(2)
        assert any("3 workers" in text for text in formed)
        control.stop_job(job_id)
        events.cancel()
