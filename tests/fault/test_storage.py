"""A disk that is full or fails during rounds: no update is accepted that cannot be stored, and nothing is lost."""

import itertools
import queue
import re
import resource
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fedring.control.calls import Events
from fedring.control.failure import Unreachable
from fedring.ctl.operate.port_health import check_health
from fedring.daemon.exits import Exit
from fedring.v1 import federation_pb2 as pb
from tests.campaign.layer import FAILING, PRELOAD, SOURCE, Page
from tests.conftest import missing
from tests.damage import ask
from tests.fault.faulty_fleet import SECONDS, job_end, wait_for
from tests.fleets import Control, Fleet, Programs
from tests.power.records import build_layer
from tests.system.wire import Refused, WireClient, parameters, payload_of, vector_job

DISK_BYTES = 16 << 20
SIZE = 500_000  # of the model: 2 MB
FACTS_BYTES = 3 << 19  # room for all rows and their log, but not for a model
ONES = np.ones(SIZE, np.float32)


class Disk:
    """A file system of its own for the server's state, which a test fills."""

    reason = "disk_full"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def fail(self, fleet: Fleet, *, room: int = 0) -> None:
        """Fill the disk but for `room` bytes."""
        with (self.folder / "filler").open("wb", buffering=0) as filler:
            with suppress(OSError):
                while True:
                    filler.write(bytes(1 << 16))
            filler.truncate(filler.tell() - room)

    def mend(self, fleet: Fleet) -> None:
        """Make room again."""
        (self.folder / "filler").unlink()


class FailingDisk(Disk):
    """An ordinary folder, and a limit on the size of the server's files, whose errors are those of a failing disk."""

    reason = "disk_error"

    def fail(self, fleet: Fleet, *, room: int = 0) -> None:
        resource.prlimit(fleet.server.pid, resource.RLIMIT_FSIZE, (room or FACTS_BYTES, resource.RLIM_INFINITY))

    def mend(self, fleet: Fleet) -> None:
        resource.prlimit(fleet.server.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """Mount a file system of DISK_BYTES on `folder`."""
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
    """Mount a disk that a test can fill."""
    with small_disk(tmp_path / "disk") as folder:
        yield Disk(folder)


@pytest.fixture(params=["full", "failing"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Disk:
    """Return a disk that can be full, and one that can fail."""
    disk: Disk = request.getfixturevalue("full") if request.param == "full" else FailingDisk(tmp_path)
    return disk


@pytest.fixture
def fleet(disk: Disk, tmp_path: Path) -> Iterator[Fleet]:
    """Start an fl-server whose state is on the disk."""
    settings = {"state_dir": str(disk.folder / "state"), "metrics_listen": "127.0.0.1:0"}
    with Fleet(tmp_path, settings) as fleet:
        yield fleet


class Health:
    """The stream of health statuses of the port for clients."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet, self._channel = fleet, grpc.insecure_channel(fleet.listen)
        stub: Any = health_pb2_grpc.HealthStub(self._channel)
        self._statuses = stub.Watch(health_pb2.HealthCheckRequest(), timeout=SECONDS)

    def until(self, name: str) -> None:
        """Wait for the status of this name."""
        status = health_pb2.HealthCheckResponse.ServingStatus.Value(name)
        assert wait_for(self._fleet, name, lambda: any(reply.status == status for reply in self._statuses))

    def close(self) -> None:
        self._statuses.cancel()
        self._channel.close()


def storage_failing(fleet: Fleet) -> float:
    """Return the value of the metric fl_server_storage_failing."""
    with urllib.request.urlopen(f"http://{fleet.ready['metrics']}/metrics", timeout=SECONDS) as page:
        found = re.search(r"^fl_server_storage_failing (\S+)$", page.read().decode(), re.MULTILINE)
    assert found
    return float(found[1])


def test_updates_that_cannot_be_stored_are_refused_until_the_disk_works_again(disk: Disk, fleet: Fleet) -> None:
    health = Health(fleet)
    health.until("SERVING")
    with Control(fleet.control) as control, WireClient(fleet.listen, "a") as client:
        events = control.events()
        job_id = control.start_job(vector_job(model_args={"size": SIZE}, rounds=2)).job_id
        job_events = control.follow_job(job_id, events)
        command, payload = client.expect("train"), payload_of(ONES)
        disk.fail(fleet)
        with pytest.raises(Refused) as refused:
            client.push(client.header(command, payload), payload)
        assert (refused.value.code, refused.value.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, disk.reason)
        health.until("NOT_SERVING")
        assert check_health(fleet.control, SECONDS) == "not_serving"
        assert control.status().not_serving.startswith("nothing can be kept, so updates are refused")
        assert storage_failing(fleet) == 1
        assert control.clients()[0].updates == 0

        disk.mend(fleet)
        health.until("SERVING")
        assert storage_failing(fleet) == 0
        assert control.status().not_serving == ""
        reply = client.push(client.header(command, payload), payload)
        assert reply is not None
        assert not reply.accepted.already
        command = client.expect("train")
        client.push(client.header(command, payload), payload)
        assert [event.kind for event in job_events].count("round_published") == 2
        assert control.job(job_id).state == "completed"
    health.close()


def test_events_tell_operators_when_the_disk_fails_and_works_again(disk: Disk, fleet: Fleet) -> None:
    with Control(fleet.control) as control, WireClient(fleet.listen, "a") as client:
        events = control.events()
        control.start_job(vector_job(model_args={"size": SIZE}))
        command, payload = client.expect("train"), payload_of(ONES)
        disk.fail(fleet)
        with pytest.raises(Refused):
            client.push(client.header(command, payload), payload)
        failed = wait_for(fleet, "storage_failed", lambda: next(e for e in events if e.kind == "storage_failed"))
        assert disk.reason in failed.text
        disk.mend(fleet)
        assert wait_for(fleet, "storage_works", lambda: next(e for e in events if e.kind == "storage_works"))
        events.cancel()


def test_a_job_without_room_for_its_first_model_waits(disk: Disk, fleet: Fleet) -> None:
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


def start_aggregation_without_room(
    disk: Disk, fleet: Fleet, a: WireClient, b: WireClient, control: Control
) -> tuple[int, Events]:
    """Start a job whose round has one update and no room for its new model; return the job's id and its events."""
    events = control.events()
    job_id = control.start_job(vector_job(model_args={"size": SIZE}, min_clients=2, max_abandoned=1)).job_id
    command, payload = a.expect("train"), payload_of(ONES)
    a.push(a.header(command, payload), payload)
    disk.fail(fleet, room=FACTS_BYTES)
    b.say(pb.WatchRequest(matched=True, failure=pb.Failure(round=b.expect("train").round, reason="train_error")))
    assert wait_for(fleet, "storage_failed", lambda: next(e for e in events if e.kind == "storage_failed"))
    phases = (control.status().round.phase for _ in itertools.count())  # A note of the time left may have failed first.
    assert wait_for(fleet, "the aggregation", lambda: next(phase for phase in phases if phase == "aggregating"))
    return job_id, events


def test_an_aggregation_waits_for_room_on_the_disk_and_loses_nothing(disk: Disk, fleet: Fleet) -> None:
    with (
        Control(fleet.control) as control,
        WireClient(fleet.listen, "a") as a,
        WireClient(fleet.listen, "b") as b,
    ):
        job_id, events = start_aggregation_without_room(disk, fleet, a, b, control)
        disk.mend(fleet)
        job_events = job_end(fleet, control, job_id, events)
        assert [event.kind for event in job_events if event.kind.startswith("round_")] == [
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
        job_id, events = start_aggregation_without_room(disk, fleet, a, b, control)
        assert control.stop_job(job_id).round == 1
        disk.mend(fleet)
        job_events = job_end(fleet, control, job_id, events)
        assert [event.kind for event in job_events if event.kind.startswith("round_")] == ["round_abandoned"]
        assert control.job(job_id).state == "stopped"


def test_a_round_that_cannot_start_without_room_can_be_stopped(disk: Disk, fleet: Fleet) -> None:
    with Control(fleet.control) as control:
        events = control.events()
        job_id = control.start_job(vector_job(model_args={"size": SIZE})).job_id
        assert wait_for(fleet, "round_waits", lambda: next(e for e in events if e.kind == "round_waits"))
        if disk.reason == "disk_full":
            disk.fail(fleet)
        else:  # not even the database's log can grow
            disk.fail(fleet, room=1)
        with WireClient(fleet.listen, "a"):
            assert wait_for(fleet, "storage_failed", lambda: next(e for e in events if e.kind == "storage_failed"))
            assert control.stop_job(job_id).round == 1
            disk.mend(fleet)
            assert wait_for(fleet, "the end", lambda: list(control.follow_job(job_id, events)))
            assert control.job(job_id).state == "stopped"


def test_a_disk_with_room_for_the_test_file_only_is_tested_less_and_less_often(full: Disk, tmp_path: Path) -> None:
    with Fleet(tmp_path, {"state_dir": str(full.folder / "state")}) as fleet, Control(fleet.control) as control:
        full.fail(fleet, room=4 << 20)  # more than the test file beside a growing database, less than the first model
        events = control.events()
        control.start_job(vector_job(model_args={"size": 3 * SIZE}))
        failed = wait_for(fleet, "storage_failed", lambda: next(e for e in events if e.kind == "storage_failed"))
        _, _, works = (
            wait_for(fleet, "storage_works", lambda: next(e for e in events if e.kind == "storage_works"))
            for _ in range(3)
        )
        passed = datetime.fromisoformat(works.at) - datetime.fromisoformat(failed.at)
        assert passed.total_seconds() > 5, "after 1, 2 and 4 s"
        full.mend(fleet)
        events.cancel()


def test_a_first_start_on_a_full_disk_can_be_repeated(full: Disk, tmp_path: Path) -> None:
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


def test_the_deadline_of_a_round_waits_while_the_disk_fails(disk: Disk, fleet: Fleet) -> None:
    with Control(fleet.control) as control, WireClient(fleet.listen, "a") as client:
        events = control.events()
        spec = vector_job(model_args={"size": SIZE}, deadline_seconds=60, max_abandoned=1)
        began = time.monotonic()
        job_id = control.start_job(spec).job_id
        command, payload = client.expect("train"), payload_of(ONES)
        disk.fail(fleet)
        with pytest.raises(Refused):
            client.push(client.header(command, payload), payload)
        failed = time.monotonic()
        while time.monotonic() < failed + 5:  # a client repeats its upload, too
            with pytest.raises(Refused):
                client.push(client.header(command, payload), payload)
            with suppress(queue.Empty):
                assert client.events.get(timeout=0.5).WhichOneof("event") == "heartbeat"  # no end of the round
        mended = time.monotonic()
        disk.mend(fleet)
        assert wait_for(fleet, "storage_works", lambda: next(e for e in events if e.kind == "storage_works"))
        with WireClient(fleet.listen, "a") as again:  # it is told how much time is left
            passed = command.deadline_seconds - again.expect("train").deadline_seconds
            assert passed <= failed - began + time.monotonic() - mended
            again.push(again.header(command, payload), payload)
        assert "round_published" in [event.kind for event in control.follow_job(job_id, events)]


def test_a_server_starts_on_a_full_disk_but_is_not_serving(full: Disk, tmp_path: Path) -> None:
    with Fleet(tmp_path, {"state_dir": str(full.folder / "state")}) as fleet:
        fleet.server.kill()
        full.fail(fleet)
        fleet.start_server()
        health = Health(fleet)
        health.until("NOT_SERVING")
        full.mend(fleet)
        health.until("SERVING")
        health.close()


def test_a_start_that_fails_on_a_full_disk_does_not_blame_the_configuration(full: Disk, tmp_path: Path) -> None:
    with Fleet(tmp_path, {"state_dir": str(full.folder / "state")}) as fleet:
        fleet.server.send(signal.SIGTERM)
        assert fleet.server.wait(SECONDS) == Exit.OK
        full.fail(fleet)
        fleet.server.start()
        code = fleet.server.wait(SECONDS)
        assert (code, "disk_" in fleet.server.tail()) == (Exit.FAILED, True), fleet.server.tail()
        full.mend(fleet)
        fleet.start_server()


def test_a_call_whose_sync_fails_ends_the_server(tmp_path: Path) -> None:
    if (layer := build_layer(tmp_path, SOURCE)) is None:
        missing("a C compiler for Linux, with which a layer under programs is built,")
    state = tmp_path / "state" / "server"
    page = Page(tmp_path / "page", state)
    with Programs(tmp_path, env={PRELOAD: str(layer), **page.variables}) as fleet:
        page.fail(syncs=FAILING)
        with Control(fleet.control) as control, pytest.raises(Unreachable):
            control.tokens.create("client", "a")
        assert fleet.server.wait(SECONDS) == Exit.FAILED
        page.fail()
        assert "a sync to the disk failed" in fleet.server.tail()
        assert "Traceback" not in fleet.server.log.read_text()
        assert ask(state, "SELECT * FROM tokens") == []
