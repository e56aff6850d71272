"""Models that a client fetches: downloads resume, use differences, check digests and limit their size."""

import hashlib
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

from fedring.client import RoundOver, WrongModel, connect
from fedring.client.group.whole_model import WholeModel
from fedring.codec import Encoding, Vectors, decode, encode, encode_buffers
from fedring.codec.digest import name_of
from fedring.rpc.errors import FedringError, Unavailable, UnknownModel
from fedring.train.tensors.download import BadModel, Download, HeldModel
from fedring.train.tensors.state import read_vectors, schema_of
from fedring.v1 import federation_pb2 as pb

if TYPE_CHECKING:
    from tests.scripted_server import ScriptedServer

SECONDS = 60.0
NAME = name_of(b"a model")


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(50, 40), nn.BatchNorm1d(40))


def test_a_broken_download_resumes_where_it_broke(
    server: "ScriptedServer", settings: dict[str, Any], model: nn.Module
) -> None:
    breaks: dict[int, FedringError] = {2000: Unavailable("the cable"), 5000: Unavailable("again")}
    server.on_chunk = lambda offset: breaks.pop(offset, None)
    wanted = read_vectors(model).digest()
    mine = nn.Sequential(nn.Linear(50, 40), nn.BatchNorm1d(40))
    with connect(**settings) as federation:
        server.joins.get(timeout=SECONDS)
        server.train(server.command(model))
        next(federation).load_into(mine)
    assert read_vectors(mine).digest() == wanted
    assert [server.fetches.get_nowait().offset for _ in range(3)] == [0, 2000, 5000]


def test_a_model_that_the_client_holds_is_not_fetched_again(
    server: "ScriptedServer", settings: dict[str, Any], model: nn.Module
) -> None:
    with connect(**settings) as federation:
        server.joins.get(timeout=SECONDS)
        for round_ in (1, 2):
            server.train(server.command(model, round_=round_))
            task = next(federation)
            task.load_into(model)
            task.submit(model, samples=1)
    assert server.fetches.qsize() == 1


def test_a_server_that_cannot_send_a_part_of_a_model_is_to_be_updated(
    server: "ScriptedServer", settings: dict[str, Any], model: nn.Module
) -> None:
    schema = schema_of(model)
    with connect(**settings) as federation:
        server.joins.get(timeout=SECONDS)
        server.train(server.command(model))
        task = next(federation)
        with pytest.raises(RoundOver, match="update fl-server") as caught:
            WholeModel(task, "a").fetch(schema, ["0.bias"], lambda entry, start, values: None)
        assert (caught.value.reason, task.end.result) == ("bad_model", "failed")
    request = server.fetches.get_nowait()
    assert list(request.ranges) == [pb.ValueRange(vector=pb.VECTOR_PARAMETERS, start=2000, count=40)]


def test_a_model_without_values_is_compared_with_the_one_that_is_trained(
    server: "ScriptedServer", settings: dict[str, Any], model: nn.Module
) -> None:
    with connect(**settings) as federation:
        server.joins.get(timeout=SECONDS)
        server.train(server.command(model))
        task = next(federation)
        WholeModel(task, "a").check(model.to("meta"))
        assert server.fetches.empty()
        with pytest.raises(WrongModel, match=r"expected parameter 0.weight float32\[40, 50\]"):
            WholeModel(task, "a").check(nn.Sequential(nn.Linear(40, 50), nn.BatchNorm1d(40)).to("meta"))
        assert task.end.result == "failed"


def test_another_model_with_the_same_version_number_is_fetched_and_used(
    server: "ScriptedServer", settings: dict[str, Any], model: nn.Module
) -> None:
    """A server does this if it was restored and has trained since then."""
    first, schema = read_vectors(model), schema_of(model)
    second = Vectors(first.parameters + 1, first.buffers)
    with connect(**settings) as federation:
        server.joins.get(timeout=SECONDS)
        for values in (first, second):
            server.publish(1, schema, values)
            server.train(server.command(model, round_=7, model_version=1))
            task = next(federation)
            task.load_into(model)
            np.testing.assert_array_equal(read_vectors(model).parameters, values.parameters)
            if values is first:
                task.submit(model, samples=1)
                server.last_accepted = None  # The restored server has forgotten the update.
        task.submit(model, samples=1)
    assert [server.fetches.get_nowait().digest for _ in range(2)] == [first.digest(), second.digest()]
    bases = [server.accepted.get_nowait()[0].base_digest for _ in range(2)]
    assert bases == [first.digest(), second.digest()]


def test_the_same_model_with_another_version_number_is_not_fetched_again(
    server: "ScriptedServer", settings: dict[str, Any], model: nn.Module
) -> None:
    values, schema = read_vectors(model), schema_of(model)
    for version in (1, 2):
        server.publish(version, schema, values)
    with connect(**settings) as federation:
        server.joins.get(timeout=SECONDS)
        for round_ in (1, 2):
            server.train(server.command(model, round_=round_, model_version=round_))
            task = next(federation)
            task.load_into(model)
            task.submit(model, samples=1)
    assert server.fetches.qsize() == 1


def command_with_model(server: "ScriptedServer", model: nn.Module) -> pb.TrainCmd:
    """Return a command that carries the model."""
    command = server.command(model)
    command.model.CopyFrom(server.small_model(1))
    return command


def test_a_model_that_comes_with_its_command_is_not_fetched(
    server: "ScriptedServer", settings: dict[str, Any], model: nn.Module
) -> None:
    mine = nn.Sequential(nn.Linear(50, 40), nn.BatchNorm1d(40))
    with connect(**settings) as federation:
        server.joins.get(timeout=SECONDS)
        server.train(command_with_model(server, model))
        next(federation).load_into(mine)
    assert read_vectors(mine).digest() == read_vectors(model).digest()
    assert server.fetches.qsize() == 0


def test_a_model_that_was_damaged_within_its_command_is_fetched(
    server: "ScriptedServer", settings: dict[str, Any], model: nn.Module
) -> None:
    mine = nn.Sequential(nn.Linear(50, 40), nn.BatchNorm1d(40))
    with connect(**settings) as federation:
        server.joins.get(timeout=SECONDS)
        command = command_with_model(server, model)
        command.model.payload = command.model.payload[:-1] + b"?"
        server.train(command)
        next(federation).load_into(mine)
    assert read_vectors(mine).digest() == read_vectors(model).digest()
    assert server.fetches.qsize() == 1


def test_a_model_that_comes_with_its_command_must_have_the_right_schema(
    server: "ScriptedServer", settings: dict[str, Any], model: nn.Module
) -> None:
    with connect(**settings) as federation:
        server.joins.get(timeout=SECONDS)
        server.train(command_with_model(server, model))
        with pytest.raises(WrongModel, match=r"0\.weight"):
            next(federation).load_into(nn.Sequential(nn.Linear(50, 41)))


def test_a_difference_from_the_held_model_leads_to_the_same_bytes(
    server: "ScriptedServer", settings: dict[str, Any], model: nn.Module
) -> None:
    first, schema = read_vectors(model), schema_of(model)
    step = Vectors(np.full_like(first.parameters, 0.1), np.full_like(first.buffers, 0.1))
    second = Vectors(first.parameters + step.parameters, first.buffers + step.buffers)
    server.publish(1, schema, first)
    server.publish(2, schema, second, step=(1, step))
    rounded = np.round(second.buffers[-1])  # the count of batches is an integer
    with connect(**settings) as federation:
        server.joins.get(timeout=SECONDS)
        for round_ in (1, 2):
            server.train(server.command(model, round_=round_, model_version=round_))
            task = next(federation)
            task.load_into(model)
            if round_ == 1:
                task.submit(model, samples=1)
    got = read_vectors(model)
    np.testing.assert_array_equal(got.parameters, second.parameters)
    assert got.buffers[-1] == rounded
    requests = [server.fetches.get_nowait() for _ in range(2)]
    assert [request.digest for request in requests] == [first.digest(), second.digest()]
    assert [request.held_digest for request in requests] == ["", first.digest()]


def test_a_large_model_is_made_outside_of_the_sessions_thread_however_short_the_difference(
    server: "ScriptedServer", settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, finished = nn.Linear(1000, 600), []
    finish = Download.finish

    def watched(download: Download) -> HeldModel:
        finished.append((download.received, threading.current_thread().name))
        return finish(download)

    monkeypatch.setattr(Download, "finish", watched)
    values, schema = read_vectors(model), schema_of(model)
    change = np.zeros_like(values.parameters)
    change[7] = 1.0
    payload = encode(change, Encoding("uniform"))
    step = Vectors(decode(payload, name="uniform", length=change.size).astype(np.float32), values.buffers)
    server.publish(1, schema, values)
    server.publish(2, schema, Vectors(values.parameters + step.parameters, values.buffers), step=(1, step))
    header = server.models[2][0][0]
    header.packets[0].encoding, header.packets[0].bytes, header.total_bytes = "uniform", len(payload), len(payload)
    server.models[2][0] = header, payload
    with connect(**settings) as federation:
        server.joins.get(timeout=SECONDS)
        for round_ in (1, 2):
            server.train(server.command(model, round_=round_, model_version=round_))
            task = next(federation)
            task.load_into(model)
            if round_ == 1:
                task.submit(model, samples=1)
    assert finished[1][0] == len(payload) < 10_000
    assert "fedring-session" not in {thread for _, thread in finished}


def test_after_a_difference_that_leads_to_another_model_the_model_is_fetched_in_full(
    server: "ScriptedServer", settings: dict[str, Any], model: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    first, schema = read_vectors(model), schema_of(model)
    second = Vectors(first.parameters * 2, first.buffers)
    server.publish(1, schema, first)
    server.publish(2, schema, second, step=(1, second))
    with connect(**settings) as federation:
        server.joins.get(timeout=SECONDS)
        for round_ in (1, 2):
            server.train(server.command(model, round_=round_, model_version=round_))
            task = next(federation)
            task.load_into(model)
            if round_ == 1:
                task.submit(model, samples=1)
    np.testing.assert_array_equal(read_vectors(model).parameters, second.parameters)
    assert [server.fetches.get_nowait().held_digest for _ in range(3)] == ["", first.digest(), ""]
    assert "in full" in caplog.text


def test_a_model_that_the_server_does_not_have_ends_the_task(
    server: "ScriptedServer", settings: dict[str, Any], model: nn.Module
) -> None:
    server.on_chunk = lambda offset: UnknownModel("model 1 is not kept")
    with connect(**settings) as federation:
        server.joins.get(timeout=SECONDS)
        server.train(server.command(model))
        with pytest.raises(RoundOver, match="unknown_model"):
            next(federation).load_into(model)


def test_a_round_that_ends_stops_its_download(
    server: "ScriptedServer", settings: dict[str, Any], model: nn.Module
) -> None:
    def end(offset: int) -> FedringError | None:
        return Unavailable("never") if offset >= 1000 else None

    server.on_chunk = end
    with connect(**settings) as federation:
        server.joins.get(timeout=SECONDS)
        server.train(server.command(model))
        task = next(federation)
        server.send(pb.ServerEvent(round_ended=pb.RoundEnded(round=1, reason="stopped")))
        with pytest.raises(RoundOver, match="stopped"):
            task.load_into(model)


def header(model: nn.Module, **fields: Any) -> pb.ModelHeader:
    """Return a valid header, except for `fields`."""
    schema = schema_of(model)
    size = 16 + 4 * schema.num_parameters
    given: dict[str, Any] = {
        "schema_hash": schema.hash,
        "packets": [pb.Packet(vector=pb.VECTOR_PARAMETERS, kind=pb.KIND_WEIGHTS, encoding="fp32", bytes=size)],
        "total_bytes": size,
        "payload_name": "a payload",
        "model_digest": NAME,
    }
    return pb.ModelHeader(**given | fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"model_digest": name_of(b"another")},
        {"model_digest": ""},
        {"base_digest": name_of(b"another")},
        {"packets": []},
        {"total_bytes": 5},
        {"packets": [pb.Packet(bytes=1 << 40)], "total_bytes": 1 << 40},
    ],
    ids=lambda fields: " ".join(fields),
)
def test_a_header_that_cannot_lead_to_the_model_is_refused_before_memory_is_allocated(fields: dict[str, Any]) -> None:
    model = nn.Linear(3, 2)
    download = Download(NAME, schema_of(model), None)
    download.begin(header(model))
    with pytest.raises(BadModel):
        download.begin(header(model, **fields))


def test_a_chunk_that_does_not_follow_the_previous_one_is_refused() -> None:
    model = nn.Linear(3, 2)
    download = Download(NAME, schema_of(model), None)
    download.begin(header(model))
    download.add(pb.Chunk(offset=0, data=b"1234"))
    for offset, data in ((0, b"5"), (5, b"5"), (4, b"5" * 1000)):
        with pytest.raises(BadModel):
            download.add(pb.Chunk(offset=offset, data=data))


@pytest.mark.parametrize(
    "digest", ["", "1", "blake3-", "sha256-" + "ab" * 32, "blake3-" + "AB" * 32, "ab" * 33, "../x"]
)
def test_a_command_without_a_valid_digest_is_refused_before_anything_is_fetched(digest: str) -> None:
    with pytest.raises(BadModel, match="which is not a digest"):
        Download(digest, schema_of(nn.Linear(3, 2)), None)


def name_in_protocol_1(vectors: Vectors) -> str:
    """Return the name of a model before protocol 2, which is its SHA-256."""
    return hashlib.sha256(vectors.parameters.tobytes() + vectors.buffers.tobytes()).hexdigest()


@pytest.mark.parametrize("sound", [True, False])
@pytest.mark.parametrize("step", [False, True])
def test_a_model_that_is_named_by_sha256_is_checked_with_sha256(model: nn.Module, step: bool, sound: bool) -> None:
    schema, vectors = schema_of(model), read_vectors(model)
    result = Vectors(2 * vectors.parameters, 2 * vectors.buffers) if step else vectors
    digest = name_in_protocol_1(result)
    parts = [encode(vectors.parameters, Encoding("fp32")), encode_buffers(vectors.buffers)]
    kind = pb.KIND_DELTA if step else pb.KIND_WEIGHTS
    packets = [
        pb.Packet(vector=pb.VECTOR_PARAMETERS, kind=kind, encoding="fp32", bytes=len(parts[0])),
        pb.Packet(vector=pb.VECTOR_BUFFERS, kind=kind, encoding="fp64", bytes=len(parts[1])),
    ]
    base = HeldModel(name_in_protocol_1(vectors), schema, vectors) if step else None
    download = Download(digest, schema, base)
    assert download.request.digest == digest
    download.begin(
        header(
            model,
            packets=packets,
            total_bytes=sum(map(len, parts)),
            model_digest=digest,
            base_digest=base.digest if base else "",
        )
    )
    payload = bytearray(b"".join(parts))
    if not sound:
        payload[100] ^= 1
    download.add(pb.Chunk(data=bytes(payload)))
    if not sound:
        with pytest.raises(BadModel, match="does not have the digest"):
            download.finish()
        return
    got = download.finish()
    assert got.digest == digest
    np.testing.assert_array_equal(got.vectors.parameters, result.parameters)
