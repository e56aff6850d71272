"""A disk that is full, or fails, while rounds go on: nothing is promised that cannot be kept, and nothing is lost."""

import re
import resource
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fedring.ctl.control import Events
from fedring.ctl.operate.port_health import check_health
from fedring.daemon.exits import Exit
from fedring.v1 import federation_pb2 as pb
from tests.fault.patience import SECONDS, patiently
from tests.fleets import Control, Fleet
from tests.system.wire import Refused, WireClient, parameters, payload_of, vector_job

DISK_BYTES = 16 << 20
SIZE = 500_000  # of the model: 2 MB
FACTS_BYTES = 1 << 19  # more than all rows, less than a model
ONES = np.ones(SIZE, np.float32)


class Disk:
    """Where the server keeps its state; it can be full, or refuse what is written."""

    reason = "disk_full"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def fail(self, fleet: Fleet, *, room: int = 0) -> None:
        """From now on nothing more goes on it, but `room` bytes."""
        with (self.folder / "filler").open("wb", buffering=0) as filler:
            with suppress(OSError):
                while True:
                    filler.write(bytes(1 << 16))
            filler.truncate(filler.tell() - room)

    def mend(self, fleet: Fleet) -> None:
        """There is room again."""
        (self.folder / "filler").unlink()


class Limited(Disk):
    """An ordinary folder in which no file of the server's may grow, which is what a disk that fails looks like."""

    reason = "disk_error"

    def fail(self, fleet: Fleet, *, room: int = 0) -> None:
        resource.prlimit(fleet.server.pid, resource.RLIMIT_FSIZE, (room or FACTS_BYTES, resource.RLIM_INFINITY))

    def mend(self, fleet: Fleet) -> None:
        resource.prlimit(fleet.server.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of its own."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(folder)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user cannot mount a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Disk]:
    with small_disk(tmp_path / "disk") as folder:
        yield Disk(folder)


@pytest.fixture(params=["full", "failing"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Disk:
    disk: Disk = request.getfixturevalue("full") if request.param == "full" else Limited(tmp_path)
    return disk


@pytest.fixture
def fleet(disk: Disk, tmp_path: Path) -> Iterator[Fleet]:
    settings = {"state_dir": str(disk.folder / "state"), "metrics_listen": "127.0.0.1:0"}
    with Fleet(tmp_path, settings) as fleet:
        yield fleet


class Health:
    """What the port for clients says, as it comes."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet, self._channel = fleet, grpc.insecure_channel(fleet.listen)
        stub: Any = health_pb2_grpc.HealthStub(self._channel)
        self._statuses = stub.Watch(health_pb2.HealthCheckRequest(), timeout=SECONDS)

    def until(self, name: str) -> None:
        """The port says so."""
        status = health_pb2.HealthCheckResponse.ServingStatus.Value(name)
        assert patiently(self._fleet, name, lambda: any(reply.status == status for reply in self._statuses))

    def close(self) -> None:
        self._statuses.cancel()
        self._channel.close()


def failing(fleet: Fleet) -> float:
    """What the metric says."""
    with urllib.request.urlopen(f"http://{fleet.ready['metrics']}/metrics", timeout=SECONDS) as page:
        found = re.search(r"^fl_server_storage_failing (\S+)$", page.read().decode(), re.MULTILINE)
    assert found
    return float(found[1])


def test_what_cannot_be_kept_is_refused_and_said_and_the_round_goes_on_when_it_can(disk: Disk, fleet: Fleet) -> None:
    health = Health(fleet)
    health.until("SERVING")
    with Control(fleet.control) as control, WireClient(fleet.listen, "a") as client:
        events = control.events()
        job_id = control.start_job(vector_job(model_args={"size": SIZE}, rounds=2)).job_id
        told = control.follow_job(job_id, events)
        command, payload = client.expect("train"), payload_of(ONES)
        disk.fail(fleet)
        with pytest.raises(Refused) as refused:
            client.push(client.header(command, payload), payload)
        assert (refused.value.code, refused.value.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, disk.reason)
        health.until("NOT_SERVING")
        assert check_health(fleet.control, SECONDS) == "not_serving"
        assert failing(fleet) == 1
        assert control.clients()[0].updates == 0

        disk.mend(fleet)
        health.until("SERVING")
        assert failing(fleet) == 0
        reply = client.push(client.header(command, payload), payload)
        assert reply is not None
        assert not reply.accepted.already
        command = client.expect("train")
        client.push(client.header(command, payload), payload)
        assert [event.kind for event in told].count("round_published") == 2
        assert control.job(job_id).state == "completed"
    health.close()


def test_operators_see_in_the_events_what_the_disk_did(disk: Disk, fleet: Fleet) -> None:
    with Control(fleet.control) as control, WireClient(fleet.listen, "a") as client:
        events = control.events()
        control.start_job(vector_job(model_args={"size": SIZE}))
        command, payload = client.expect("train"), payload_of(ONES)
        disk.fail(fleet)
        with pytest.raises(Refused):
            client.push(client.header(command, payload), payload)
        failed = patiently(fleet, "storage_failed", lambda: next(e for e in events if e.kind == "storage_failed"))
        assert disk.reason in failed.text
        disk.mend(fleet)
        assert patiently(fleet, "storage_works", lambda: next(e for e in events if e.kind == "storage_works"))
        events.cancel()


def test_a_job_that_starts_while_there_is_no_room_for_its_model_waits(disk: Disk, fleet: Fleet) -> None:
    health = Health(fleet)
    disk.fail(fleet, room=FACTS_BYTES)
    with Control(fleet.control) as control, WireClient(fleet.listen, "a") as client:
        events = control.events()
        job_id = control.start_job(vector_job(model_args={"size": SIZE})).job_id
        health.until("NOT_SERVING")
        disk.mend(fleet)
        health.until("SERVING")
        command, payload = client.expect("train"), payload_of(ONES)
        client.push(client.header(command, payload), payload)
        assert [event.kind for event in control.follow_job(job_id, events)][-1] == "job_ended"
        assert control.job(job_id).state == "completed"
    health.close()


def waits_with_its_model(
    disk: Disk, fleet: Fleet, a: WireClient, b: WireClient, control: Control
) -> tuple[int, Events]:
    """A job whose round has one update and no room for the model that it makes of it; and what is told of it."""
    events = control.events()
    job_id = control.start_job(vector_job(model_args={"size": SIZE}, min_clients=2, max_abandoned=1)).job_id
    command, payload = a.expect("train"), payload_of(ONES)
    a.push(a.header(command, payload), payload)
    disk.fail(fleet, room=FACTS_BYTES)
    b.say(pb.WatchRequest(matched=True, failure=pb.Failure(round=b.expect("train").round, reason="train_error")))
    assert patiently(fleet, "storage_failed", lambda: next(e for e in events if e.kind == "storage_failed"))
    assert control.status().round.phase == "aggregating"
    return job_id, events


def test_an_aggregation_waits_for_room_and_loses_nothing(disk: Disk, fleet: Fleet) -> None:
    with (
        Control(fleet.control) as control,
        WireClient(fleet.listen, "a") as a,
        WireClient(fleet.listen, "b") as b,
    ):
        job_id, events = waits_with_its_model(disk, fleet, a, b, control)
        disk.mend(fleet)
        told = patiently(fleet, "the end of the job", lambda: list(control.follow_job(job_id, events)))
        assert [event.kind for event in told if event.kind.startswith("round_")] == [
            "round_published",
            "round_evaluated",
        ]
        assert control.job(job_id).state == "completed"
        assert np.array_equal(parameters(a, 2), parameters(a, 1) + ONES)


def test_an_aggregation_that_waits_for_room_can_be_stopped(disk: Disk, fleet: Fleet) -> None:
    with (
        Control(fleet.control) as control,
        WireClient(fleet.listen, "a") as a,
        WireClient(fleet.listen, "b") as b,
    ):
        job_id, events = waits_with_its_model(disk, fleet, a, b, control)
        assert control.stop_job(job_id).round == 1
        disk.mend(fleet)
        told = patiently(fleet, "the end of the job", lambda: list(control.follow_job(job_id, events)))
        assert [event.kind for event in told if event.kind.startswith("round_")] == ["round_abandoned"]
        assert control.job(job_id).state == "stopped"


def test_a_round_that_cannot_start_for_want_of_room_can_be_stopped(disk: Disk, fleet: Fleet) -> None:
    with Control(fleet.control) as control:
        events = control.events()
        job_id = control.start_job(vector_job(model_args={"size": SIZE})).job_id
        assert patiently(fleet, "round_waits", lambda: next(e for e in events if e.kind == "round_waits"))
        if disk.reason == "disk_full":
            disk.fail(fleet)
        else:  # neither does the database's log grow
            disk.fail(fleet, room=1)
        with WireClient(fleet.listen, "a"):
            assert patiently(fleet, "storage_failed", lambda: next(e for e in events if e.kind == "storage_failed"))
            assert control.stop_job(job_id).round == 1
            disk.mend(fleet)
            assert patiently(fleet, "the end", lambda: list(control.follow_job(job_id, events)))
            assert control.job(job_id).state == "stopped"


def test_a_disk_with_room_for_the_trial_alone_is_tried_less_and_less(full: Disk, tmp_path: Path) -> None:
    with Fleet(tmp_path, {"state_dir": str(full.folder / "state")}) as fleet, Control(fleet.control) as control:
        full.fail(fleet, room=3 << 19)  # 1.5 MiB: more than is tried, less than the job's first model
        events = control.events()
        control.start_job(vector_job(model_args={"size": SIZE}))
        began = time.monotonic()
        for _ in range(3):
            assert patiently(fleet, "storage_works", lambda: next(e for e in events if e.kind == "storage_works"))
        assert time.monotonic() - began > 5, "after 1, 2 and 4 s"
        full.mend(fleet)
        events.cancel()


def test_the_first_start_on_a_full_disk_may_be_repeated(full: Disk, tmp_path: Path) -> None:
    (full.folder / "state").mkdir()
    fleet = Fleet(tmp_path, {"state_dir": str(full.folder / "state")})
    (tmp_path / "logs").mkdir(exist_ok=True)
    full.fail(fleet)
    fleet.server.start()
    assert fleet.server.wait(SECONDS) == Exit.FAILED, fleet.server.tail()
    fleet.server.close()
    full.mend(fleet)
    with Fleet(tmp_path, {"state_dir": str(full.folder / "state")}):
        pass


def test_a_round_does_not_run_out_of_time_while_nothing_can_be_kept(disk: Disk, fleet: Fleet) -> None:
    with Control(fleet.control) as control, WireClient(fleet.listen, "a") as client:
        events = control.events()
        spec = vector_job(model_args={"size": SIZE}, deadline_seconds=4, max_abandoned=1)
        job_id = control.start_job(spec).job_id
        command, payload = client.expect("train"), payload_of(ONES)
        disk.fail(fleet)
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:  # as a client does; that is longer than the round was to take
            with pytest.raises(Refused):
                client.push(client.header(command, payload), payload)
        disk.mend(fleet)
        assert patiently(fleet, "storage_works", lambda: next(e for e in events if e.kind == "storage_works"))
        client.push(client.header(command, payload), payload)
        assert "round_published" in [event.kind for event in control.follow_job(job_id, events)]


def test_a_server_that_is_killed_comes_back_on_a_full_disk_but_does_not_serve(full: Disk, tmp_path: Path) -> None:
    with Fleet(tmp_path, {"state_dir": str(full.folder / "state")}) as fleet:
        fleet.server.kill()
        full.fail(fleet)
        fleet.start_server()
        health = Health(fleet)
        health.until("NOT_SERVING")
        full.mend(fleet)
        health.until("SERVING")
        health.close()


def test_a_full_disk_is_no_fault_of_the_configuration(full: Disk, tmp_path: Path) -> None:
    with Fleet(tmp_path, {"state_dir": str(full.folder / "state")}) as fleet:
        fleet.server.send(signal.SIGTERM)
        assert fleet.server.wait(SECONDS) == Exit.OK
        full.fail(fleet)
        fleet.server.start()
        code = fleet.server.wait(SECONDS)
        assert (code, "disk_" in fleet.server.tail()) == (Exit.FAILED, True), fleet.server.tail()
        full.mend(fleet)
        fleet.start_server()
