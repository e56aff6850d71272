"""Damaged files of the state: the server never publishes or serves wrong values, and says what is damaged."""

import signal
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from fedring.control.failure import Failure
from fedring.daemon.exits import Exit
from fedring.train import load_model
from fedring.train.errors import SeamError
from fedring.train.models import vector
from fedring.v1 import federation_pb2 as pb
from tests.damage import ask, flip, model_file, update_file
from tests.fault.faulty_fleet import SECONDS
from tests.fleets import Control, Fleet
from tests.system.wire import Refused, WireClient, outcome, parameters, payload_of, run, vector_job

SIZE = 50_000  # of the model: an update of it is too large for a row of the database
ONES = np.ones(SIZE, np.float32)
MODEL = {"model_args": {"size": SIZE}}


def deliver(client: WireClient, values: "np.ndarray[Any, np.dtype[np.float32]]" = ONES) -> None:
    """Answer the client's next command with `values`, [SIZE]."""
    command, payload = client.expect("train"), payload_of(values)
    client.push(client.header(command, payload), payload)


def last_round(control: Control) -> Any:
    return control.rounds(limit=1)[0]


@pytest.fixture
def published(fleet: Fleet, control: Control) -> None:
    """Publish three versions: the initial one, and those of two rounds, each of which adds one to all values."""
    with WireClient(fleet.listen, "first") as client:
        job_id, events = run(control, rounds=2, **MODEL)
        for _ in range(2):
            deliver(client)
        assert outcome(control, job_id, events).state == "completed"
    assert [model.version for model in control.models()] == [3, 2, 1]


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.usefixtures("published")
def test_a_job_whose_base_is_damaged_fails_and_another_job_starts_from_another_version(
    fleet: Fleet, control: Control, state: Path, restart: bool
) -> None:
    client = WireClient(fleet.listen, "a")
    job_id, events = run(control, **MODEL)
    command = client.expect("train")
    file = model_file(state, 3)
    if restart:
        client.close()
        fleet.server.kill()
        flip(file)
        fleet.start_server()
        client = WireClient(fleet.listen, "a")
        events = control.follow_job(job_id)
        command = client.expect("train")
    else:
        flip(file)
    with client:
        payload = payload_of(ONES)
        client.push(client.header(command, payload), payload)
        job = outcome(control, job_id, events)
        assert (job.state, job.rounds_done) == ("failed", 0)
        assert "Traceback" not in fleet.server.log.read_text()
        assert job.reason.startswith("damaged_blob: model 3 is damaged: blobs/")
        assert file.name in job.reason
        assert "start = 2" in job.reason
        assert [model.version for model in control.models()] == [3, 2, 1]

        job_id, events = run(control, start=2, rounds=2, **MODEL)
        deliver(client)
        deliver(client)
        assert outcome(control, job_id, events).state == "completed"
        assert [model.version for model in control.models()] == [5, 4, 3, 2, 1]
        assert np.array_equal(parameters(client, 4), parameters(client, 2) + ONES)
        assert np.array_equal(parameters(client, 5), parameters(client, 4) + ONES)


@pytest.mark.usefixtures("published")
def test_a_job_fails_when_a_client_asks_for_its_damaged_base(fleet: Fleet, control: Control, state: Path) -> None:
    with WireClient(fleet.listen, "a") as client:
        job_id, events = run(control, rounds=5, **MODEL)
        client.expect("train")
        flip(model_file(state, 3), seed=1)
        with pytest.raises(Refused) as refused:
            client.fetch(3)
        assert (refused.value.code, refused.value.reason) == (grpc.StatusCode.DATA_LOSS, "damaged_blob")
        job = outcome(control, job_id, events)
        assert (job.state, "model 3 is damaged" in job.reason) == ("failed", True)


@pytest.mark.usefixtures("published")
def test_a_job_that_starts_from_a_damaged_model_fails(fleet: Fleet, control: Control, state: Path) -> None:
    flip(model_file(state, 3), 8 * 4096)
    with WireClient(fleet.listen, "a") as client:
        job_id, events = run(control, rounds=5, **MODEL)
        command, payload = client.expect("train"), payload_of(ONES)
        client.push(client.header(command, payload), payload)
        job = outcome(control, job_id, events)
    assert (job.state, "start = 2" in job.reason) == ("failed", True)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.usefixtures("published")
def test_a_damaged_model_is_neither_sent_nor_exported_nor_loaded(
    fleet: Fleet, control: Control, state: Path, seed: int, tmp_path: Path
) -> None:
    flip(model_file(state, 2), seed=seed)
    with WireClient(fleet.listen, "a") as client, pytest.raises(Refused, match="damaged_blob: model 2 is damaged"):
        client.fetch(2)
    with pytest.raises(Failure, match="model 2 is damaged"):
        control.export_model(2, tmp_path / "model.safetensors")
    with pytest.raises(SeamError, match=r"is damaged: load another version") as caught:
        load_model(2, vector(SIZE), state_dir=state)
    assert caught.value.reason == "damaged_blob"
    control.export_model(3, tmp_path / "model.safetensors")
    load_model(3, vector(SIZE), state_dir=state)


@pytest.mark.usefixtures("published")
def test_an_older_model_with_a_damaged_header_is_refused_as_damaged_after_a_restart(
    fleet: Fleet, control: Control, state: Path, tmp_path: Path
) -> None:
    file = model_file(state, 2)
    fleet.server.kill()
    flip(file, 8 * 20)
    fleet.start_server()
    with WireClient(fleet.listen, "a") as client:
        for ask_for in (lambda: client.fetch(2), lambda: control.export_model(2, tmp_path / "model.safetensors")):
            with pytest.raises((Refused, Failure), match="model 2 is damaged"):
                ask_for()
        job_id, events = run(control, start=2, **MODEL)
        assert outcome(control, job_id, events).reason.startswith("damaged_blob: model 2 is damaged: blobs/")
    assert "Traceback" not in fleet.server.log.read_text()


@pytest.mark.usefixtures("published")
def test_a_resumed_download_of_a_damaged_model_is_refused_wherever_the_damage_is(fleet: Fleet, state: Path) -> None:
    with WireClient(fleet.listen, "a") as client:
        header, payload = client.fetch(2)
        flip(model_file(state, 2), 8 * (model_file(state, 2).stat().st_size - 4 * SIZE))
        rest = pb.FetchModelRequest(version=2, offset=len(payload) - 10, payload_name=header.payload_name)
        with pytest.raises(grpc.RpcError, match="model 2 is damaged"):
            list(client.models.FetchModel(rest, metadata=client.metadata))


def test_a_damaged_delta_is_replaced_by_the_whole_model(fleet: Fleet, control: Control, state: Path) -> None:
    with WireClient(fleet.listen, "a") as client:
        job_id, events = run(control, rounds=1, download_encoding="uniform", **MODEL)
        deliver(client)
        assert outcome(control, job_id, events).state == "completed"
        base = client.fetch(1)[0].model_digest
        assert client.fetch(2, held=1)[0].base_digest == base
        ((delta,),) = ask(state, "SELECT delta_blob FROM models WHERE version = 2")
        flip(state / "blobs" / str(delta))
        with pytest.raises(Refused) as refused:
            client.fetch(2, held=1)
        assert (refused.value.code, refused.value.reason) == (grpc.StatusCode.UNAVAILABLE, "damaged_blob")
        assert not client.fetch(2, held=1)[0].base_digest


@pytest.mark.usefixtures("published")
def test_a_job_fails_with_a_reason_if_its_start_version_is_missing_damaged_or_of_another_model(
    fleet: Fleet, control: Control, state: Path
) -> None:
    fleet.server.kill()
    flip(model_file(state, 2), 8 * 20)
    fleet.start_server()
    for keys, words in (
        ({"start": 7, **MODEL}, "start: version 7 is not kept, but these are: "),
        ({"start": 1, "model_args": {"size": 3}}, "start: Version 1 is not a model of the job's kind"),
    ):
        with pytest.raises(Failure, match=words) as refused:
            control.start_job(vector_job(**keys))
        assert refused.value.exit_code == Exit.CONFIG
    job_id, events = run(control, start=2, **MODEL)
    job = outcome(control, job_id, events)
    words = "damaged_blob: model 2 is damaged"
    assert (job.state, job.reason[: len(words)]) == ("failed", words)


def start_half_delivered_round(fleet: Fleet, control: Control, **keys: Any) -> tuple[Any, Any, WireClient, WireClient]:
    """Start a job on two clients, and let the first deliver twos; return the job, its events and the clients."""
    a, b = (WireClient(fleet.listen, name) for name in "ab")
    job_id, events = run(control, min_clients=2, **MODEL, **keys)
    deliver(a, 2 * ONES)
    return job_id, events, a, b


def test_a_round_ends_without_a_damaged_update(fleet: Fleet, control: Control, state: Path) -> None:
    job_id, events, a, b = start_half_delivered_round(fleet, control)
    with a, b:
        flip(update_file(state, "a"))
        deliver(b)
        damaged = [event for event in events if event.kind == "blob_damaged"]
        assert [event.client_id for event in damaged] == ["a"]
        assert "what it had learned is lost" in damaged[0].text
        assert control.job(job_id).state == "completed"
        assert (list(last_round(control).missing), last_round(control).delivered) == (["a"], 1)
        assert np.array_equal(parameters(b, 2), parameters(b, 1) + ONES)


def test_a_round_with_too_few_undamaged_updates_is_abandoned(fleet: Fleet, control: Control, state: Path) -> None:
    job_id, events, a, b = start_half_delivered_round(fleet, control, min_clients_to_aggregate=2)
    with a, b:
        file = update_file(state, "a")
        file.write_bytes(file.read_bytes()[:-1])
        deliver(b)
        job = outcome(control, job_id, events)
        assert (job.state, job.reason[:12]) == ("failed", "damaged_blob")
        assert "the accepted update of a" in job.reason
        assert [model.version for model in control.models()] == [1]


def test_a_damaged_small_update_in_its_row_does_not_count(fleet: Fleet, control: Control, state: Path) -> None:
    a, b = (WireClient(fleet.listen, name) for name in "ab")
    with a, b:
        job_id, _ = run(control, min_clients=2)
        command, payload = a.expect("train"), payload_of(np.ones(1000, np.float32))
        a.push(a.header(command, payload), payload)
    fleet.server.kill()
    ((row,),) = ask(state, "SELECT payload FROM updates")
    assert isinstance(row, bytes)
    ask(state, "UPDATE updates SET payload = ?", row[:2000] + bytes([row[2000] ^ 1]) + row[2001:])
    fleet.start_server()
    with WireClient(fleet.listen, "b") as client:
        events = control.follow_job(job_id)
        command = client.expect("train")
        client.push(client.header(command, payload), payload)
        assert outcome(control, job_id, events).state == "completed"
        assert list(last_round(control).missing) == ["a"]


@pytest.mark.parametrize("what", ["truncated", "missing", "header"])
@pytest.mark.usefixtures("published")
def test_a_server_refuses_to_start_on_a_damaged_newest_model_until_told_to_drop_it(
    fleet: Fleet, state: Path, what: str
) -> None:
    fleet.server.kill()
    file = model_file(state, 3)
    if what == "truncated":
        file.write_bytes(file.read_bytes()[:100])
    elif what == "missing":
        file.unlink()
    else:
        flip(file, 8 * 20)
    before = sorted(path.name for path in (state / "blobs").iterdir())
    fleet.server.start()
    assert fleet.server.wait(SECONDS) == Exit.CONFIG
    words = fleet.server.tail(4)
    assert "model 3 is damaged" in words
    assert "--drop-damaged" in words
    assert "Traceback" not in fleet.server.tail(100)
    assert sorted(path.name for path in (state / "blobs").iterdir()) == before
    fleet.server.flags = ["--drop-damaged"]
    fleet.start_server()
    with Control(fleet.control) as control, WireClient(fleet.listen, "a") as client:
        assert [model.version for model in control.models()] == [2, 1]
        job_id, events = run(control, **MODEL)
        deliver(client)
        assert outcome(control, job_id, events).state == "completed"
        assert [model.version for model in control.models()] == [4, 2, 1], (
            "no version is called 3 again: clients may hold the damaged one"
        )


def test_a_server_refuses_to_start_on_a_damaged_database(fleet: Fleet, state: Path) -> None:
    fleet.server.send(signal.SIGTERM)
    assert fleet.server.wait(SECONDS) == Exit.OK
    query = "SELECT rootpage FROM sqlite_master WHERE tbl_name = 'evaluations' AND type = 'index'"
    ((page,),) = ask(state, query)  # a start reads nothing from this page
    ((size,),) = ask(state, "PRAGMA page_size")
    assert isinstance(page, int)
    assert isinstance(size, int)
    with (state / "facts.sqlite").open("r+b") as file:
        file.seek((page - 1) * size)
        file.write(bytes(64))
    fleet.server.start()
    assert fleet.server.wait(SECONDS) == Exit.CONFIG
    assert "corrupt: the database is damaged" in fleet.server.tail(3)
    assert "Traceback" not in fleet.server.tail(100)
