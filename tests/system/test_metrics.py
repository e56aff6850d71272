"""The metrics of real daemons after known jobs: every count is right."""

import time
from collections.abc import Callable, Iterator
from math import isnan
from pathlib import Path

import grpc
import numpy as np
import pytest

from fedring.control.failure import Failure
from fedring.rpc.channel import open_sync_channel
from fedring.rpc.contract import PROTOCOL
from fedring.v1.federation_pb2 import JoinRequest
from fedring.v1.federation_pb2_grpc import TrainCmdServiceStub
from fedring.workers.shards import count_steps
from tests.deploy.promtool import promtool
from tests.fleets import PATIENCE, Control, Fleet, until_watching
from tests.forks import Daemon
from tests.metrics_page import Page, address_of, eventually
from tests.pki import Pki
from tests.system.wire import SIZE, Refused, WireClient, deliver, outcome, payload_of, vector_job

ANY_PORT = "127.0.0.1:0"
FEDERATED = {"min_clients": 2, "rounds": 3, "epochs": 1}
PARALLEL = {"min_clients": 2, "rounds": 2, "mode": "data_parallel", "data_parallel": {"hook": "dgc"}, "batch_size": 32}
PUSH = "ClientUpdateService/PushUpdate"
STATUS = "ControlService/GetStatus"
ONES = np.ones(SIZE, np.float32)
PAYLOAD = len(payload_of(ONES))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Fleet]:
    """Start an fl-server that serves metrics."""
    with Fleet(tmp_path, {"metrics_listen": ANY_PORT}) as fleet:
        yield fleet


@pytest.fixture
def address(server: Fleet) -> str:
    """Return the address of its metrics."""
    return server.ready["metrics"]


def test_the_metrics_count_a_jobs_rounds_and_updates(
    server: Fleet, address: str, control: Control, clients: Callable[..., list[WireClient]]
) -> None:
    before = Page(address)
    assert before.by("result", "fl_server_rounds_total") == {}
    assert before("fl_server_job_started_timestamp_seconds") == 0
    assert isnan(before("fl_server_model_accuracy_ratio"))

    both, began = clients("a", "b"), time.time()
    events = control.events()
    job_id = control.start_job(vector_job(rounds=2, min_clients=2, deadline_seconds=45)).job_id
    open_ = eventually(address, lambda page: page("fl_server_round_clients", state="selected") == 2)
    assert open_.by("state", "fl_server_round_clients") == {"selected": 2, "pending": 2}
    assert open_("fl_server_clients_connected") == 2
    assert open_("fl_server_job_started_timestamp_seconds") >= began
    for _ in range(2):
        for client in both:
            deliver(client)
    assert outcome(control, job_id, control.follow_job(job_id, events)).state == "completed"

    idle = ("fl_server_job_started_timestamp_seconds", "fl_server_executor_queue_length")
    page = eventually(address, lambda page: all(page(name) == 0 for name in idle))
    assert page.by("result", "fl_server_rounds_total") == {"published": 2}
    assert page("fl_server_round_duration_seconds_count") == page("fl_server_aggregate_seconds_count") == 2
    phases = dict.fromkeys(("waiting", "training", "aggregating", "evaluating"), 2)
    assert page.by("phase", "fl_server_round_phase_seconds_count") == phases
    assert began <= page("fl_server_round_last_completed_timestamp_seconds") <= time.time()
    assert (page("fl_server_round_deadline_seconds"), page("fl_server_round_min_clients")) == (45, 2)
    assert page.by("result", "fl_server_updates_total") == {"accepted": 4}
    assert page.by("reason", "fl_server_updates_rejected_total") == {}
    assert (page("fl_server_update_bytes_count"), page("fl_server_update_bytes_sum")) == (4, 4 * PAYLOAD)
    assert page("fl_server_update_norm_sum") == pytest.approx(4 * np.linalg.norm(ONES))
    assert page.by("grpc_code", "grpc_server_handled_total", grpc_method=PUSH) == {"OK": 4}
    assert page("grpc_server_received_bytes_total", grpc_method=PUSH) > 4 * PAYLOAD
    assert page("grpc_server_in_flight_calls", grpc_method="TrainCmdService/Watch") == 2
    assert 0 < page("fl_server_disk_free_bytes") <= page("fl_server_disk_size_bytes")
    assert page("fl_server_last_fsync_seconds") > 0
    assert 0 <= page("fl_server_database_log_bytes") < 4 << 20
    assert eventually(address, lambda page: page("fl_server_event_loop_lag_seconds_count") > 0)


def test_the_metrics_count_refusals_by_reason_and_stopped_rounds_as_abandoned(
    server: Fleet, address: str, control: Control, clients: Callable[..., list[WireClient]]
) -> None:
    client, _ = clients("hospital-a", "hospital-b")
    events = control.events()
    job_id = control.start_job(vector_job(min_clients=2)).job_id
    command = client.expect("train")
    payload = payload_of(ONES)
    broken = payload[:-4] + np.float32(np.nan).tobytes()
    for header, data in (
        (client.header(command, broken), broken),
        (client.header(command, payload, schema_hash=bytes(32)), payload),
        (client.header(command, payload, client_id="hospital-b"), payload),
        (client.header(command, payload, round=99), payload),
    ):
        with pytest.raises(Refused):
            client.push(header, data)
    for _ in range(2):
        client.push(client.header(command, payload), payload)
    control.stop_job(job_id)
    assert outcome(control, job_id, control.follow_job(job_id, events)).state == "stopped"

    page = eventually(address, lambda page: page("grpc_server_in_flight_calls", grpc_method=PUSH) == 0)
    reasons = {"non_finite": 1, "wrong_schema": 1, "wrong_client": 1, "unknown_round": 1}
    assert page.by("reason", "fl_server_updates_rejected_total") == reasons
    assert page.by("result", "fl_server_updates_total") == {"accepted": 1, "duplicate": 1, "rejected": 4}
    codes = {"OK": 2, "INVALID_ARGUMENT": 2, "PERMISSION_DENIED": 1, "FAILED_PRECONDITION": 1}
    assert page.by("grpc_code", "grpc_server_handled_total", grpc_method=PUSH) == codes
    assert page.by("result", "fl_server_rounds_total") == {"abandoned": 1}
    assert page("fl_server_round_duration_seconds_count") == 0
    assert "hospital" not in page.text  # no label may depend on the number of clients


def test_the_metrics_of_both_daemons_are_valid_and_agree_after_real_jobs(tmp_path: Path) -> None:
    settings = {"metrics_listen": ANY_PORT}
    with Fleet(tmp_path, settings, [settings, settings]) as fleet, Control(fleet.control) as control:
        for spec in (FEDERATED, PARALLEL):
            events = control.events()
            job_id = control.start_job(spec).job_id
            assert outcome(control, job_id, control.follow_job(job_id, events)).state == "completed"
        pages = [
            eventually(address_of(client), lambda page: sum(page.by("result", "fl_client_rounds_total").values()) == 5)
            for client in fleet.clients
        ]
        server = Page(fleet.ready["metrics"])
        for page in (server, *pages):
            check = promtool("check", "metrics", given=page.text)
            assert (check.returncode, check.stdout) == (0, "")
            assert "client-0" not in page.text  # no label may depend on the number of clients

    assert server.by("result", "fl_server_rounds_total") == {"published": 5}
    assert server.by("result", "fl_server_updates_total") == {"accepted": 3 * 2 + 2}
    assert 0.5 < server("fl_server_model_accuracy_ratio") <= 1
    uploaded = sum(page("fl_client_upload_bytes_total") for page in pages)
    assert uploaded == server("fl_server_update_bytes_sum")

    results = [page.by("result", "fl_client_rounds_total") for page in pages]
    assert sum(result["accepted"] for result in results) == 3 * 2 + 2
    assert sum(result.get("trained", 0) for result in results) == 2
    steps = 2 * count_steps(1437, 2, 32)
    for rank, page in enumerate(pages):
        assert page("fl_client_train_seconds_count") == 5
        assert page("fl_client_reconnects_total") == 0
        assert page("fl_client_spool_bytes") == 0
        assert page("fl_client_download_bytes_total") > 0
        assert page("fl_ring_step_seconds_count") == steps
        assert page("fl_ring_allreduce_seconds_count") >= steps
        assert page("fl_ring_samples_total") == pytest.approx(1437, abs=2)
        assert page("fl_ring_dense_bytes_total") == steps * 4 * 4810
        assert 0 < page("fl_ring_sent_bytes_total") < page("fl_ring_dense_bytes_total")
        assert page("fl_ring_sparsity_ratio") == pytest.approx(0.001)
        assert page("fl_ring_residual_norm") > 0
        waits = {sample.labels["peer_rank"] for sample in page.samples if sample.name == "fl_ring_wait_seconds_sum"}
        assert len(waits) == 1, rank
        assert page.by("grpc_code", "grpc_client_handled_total", grpc_method="TrainCmdService/Join") == {"OK": 1}


def test_a_client_counts_a_reconnect_after_a_restart_of_the_server(tmp_path: Path) -> None:
    settings = {"metrics_listen": ANY_PORT}
    with Fleet(tmp_path, settings, [settings]) as fleet, Control(fleet.control) as control:
        until_watching(control, 1)
        address = address_of(fleet.clients[0])
        assert Page(address)("fl_client_reconnects_total") == 0
        fleet.restart_server()
        page = eventually(address, lambda page: page("fl_client_reconnects_total") == 1)
        assert page.by("grpc_code", "grpc_client_handled_total", grpc_method="TrainCmdService/Watch")


def test_the_metrics_count_refused_callers_and_show_when_certificates_expire(tmp_path: Path) -> None:
    pki = Pki(tmp_path / "pki")
    pki.issue("client-0")
    mine, settings = pki.tls("client-0"), {"metrics_listen": ANY_PORT}
    with Fleet(
        tmp_path, {**settings, "tls": pki.table("server")}, [{**settings, "tls": pki.table("client-0")}]
    ) as fleet:
        with Control(fleet.control, channel=open_sync_channel(fleet.control, mine)) as control:
            for _ in range(2):
                with pytest.raises(Failure, match="not an operator"):
                    control.status()
        with open_sync_channel(fleet.listen, pki.trust()) as nobody, pytest.raises(grpc.RpcError):
            TrainCmdServiceStub(nobody).Join(JoinRequest(client_id="client-0", protocol=PROTOCOL), timeout=PATIENCE)
        metrics = fleet.ready["metrics"]
        assert eventually(metrics, lambda page: page("fl_server_clients_connected") == 1)
        refused = {"grpc_method": STATUS, "grpc_code": "PERMISSION_DENIED"}
        page = eventually(metrics, lambda page: page("grpc_server_handled_total", **refused) == 2)
        client = Page(address_of(fleet.clients[0]))
    assert page.by("reason", "fl_server_auth_refusals_total") == {"not_operator": 2}
    assert page.by("grpc_code", "grpc_server_handled_total", grpc_method=STATUS) == {"PERMISSION_DENIED": 2}
    assert page("fl_server_handshakes_total") > page("fl_server_connections_total") > 0
    for daemon, exposed in (("server", page), ("client", client)):
        assert exposed(f"fl_{daemon}_certificate_expiry_timestamp_seconds") > time.time()


def test_a_daemon_whose_address_is_taken_does_not_start(server: Fleet, address: str, tmp_path: Path) -> None:
    for module in ("fedring.server.main", "fedring.client.main"):
        settings = {"metrics_listen": address, "state_dir": str(tmp_path / module), "server": server.listen}
        if module == "fedring.server.main":
            settings = {**settings, "listen": ANY_PORT, "control_listen": ANY_PORT}
            del settings["server"]
        daemon = Daemon(module, module, settings, tmp_path / f"{module}.log")
        daemon.start()
        assert daemon.wait(PATIENCE) == 78
        daemon.close()
        assert f"metrics_listen {address} cannot be used" in daemon.tail()
