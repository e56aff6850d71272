"""The wire contract of a real fl-server, tested with a client that is written from the .proto files."""

import queue
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from grpc import StatusCode

from fedring.codec import decode
from fedring.codec.digest import name_of
from fedring.rpc.contract import PROTOCOL
from fedring.server.sessions.sessions import MOST_CALLS
from fedring.v1 import federation_pb2 as pb
from tests.fleets import Control, Fleet
from tests.system.wire import SECONDS, SIZE, Refused, WireClient, offer_of, payload_of, published_version, vector_job

ONES = np.ones(SIZE, np.float32)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Start one fl-server for all tests of this file, which must survive everything that they send."""
    with Fleet(tmp_path_factory.mktemp("wire")) as fleet:
        yield fleet


@pytest.fixture
def command(control: Control, wire: WireClient) -> pb.TrainCmd:
    """Open a round of one client; return its command."""
    control.start_job(vector_job())
    received: pb.TrainCmd = wire.expect("train")
    return received


def published(control: Control, wire: WireClient, command: pb.TrainCmd) -> np.ndarray[Any, Any]:
    """Wait until the round is published; return its parameters, [SIZE]."""
    return parameters_of(wire, published_version(control, command.round))


def parameters_of(wire: WireClient, version: int) -> np.ndarray[Any, Any]:
    header, payload = wire.fetch(version)
    assert header.version == version
    assert len(payload) == header.total_bytes
    values = decode(payload[: header.packets[0].bytes], name="fp32", length=SIZE)
    assert name_of(values.tobytes()) == header.model_digest
    return values


def packet(size: int, **changes: Any) -> pb.Packet:
    facts = {"vector": pb.VECTOR_PARAMETERS, "kind": pb.KIND_DELTA, "encoding": "fp32", "num_samples": 10}
    return pb.Packet(**{**facts, "bytes": size, **changes})


def test_an_update_moves_the_model(control: Control, wire: WireClient, command: pb.TrainCmd) -> None:
    base = parameters_of(wire, command.model_version)
    payload = payload_of(ONES)
    reply = wire.push(wire.header(command, payload), payload)
    assert reply is not None
    assert reply.HasField("accepted")
    assert not reply.accepted.already
    np.testing.assert_array_equal(published(control, wire, command), base + ONES)


def test_an_update_may_contain_weights_instead_of_deltas(
    control: Control, wire: WireClient, command: pb.TrainCmd
) -> None:
    payload = payload_of(3 * ONES)
    header = wire.header(command, payload, packets=[packet(len(payload), kind=pb.KIND_WEIGHTS)])
    wire.push(header, payload)
    np.testing.assert_array_equal(published(control, wire, command), 3 * ONES)


def test_packets_of_one_update_add_up_whatever_their_encodings(
    control: Control, wire: WireClient, command: pb.TrainCmd
) -> None:
    base = parameters_of(wire, command.model_version)
    parts = [payload_of(ONES), payload_of(4 * ONES, "fp32_sparse", keep_ratio=1.0)]
    packets = [packet(len(parts[0])), packet(len(parts[1]), encoding="fp32_sparse")]
    payload = b"".join(parts)
    wire.push(wire.header(command, payload, packets=packets), payload)
    np.testing.assert_array_equal(published(control, wire, command), base + 5 * ONES)


def test_the_sample_count_of_the_last_packet_is_the_weight_of_the_update(server: Fleet, control: Control) -> None:
    control.start_job(vector_job(min_clients=2))
    with WireClient(server.listen, "a") as a, WireClient(server.listen, "b") as b:
        commands = [client.expect("train") for client in (a, b)]
        base = parameters_of(a, commands[0].model_version)
        zeros, fours = payload_of(0 * ONES), payload_of(4 * ONES)
        a.push(a.header(commands[0], zeros, packets=[packet(len(zeros), num_samples=10)]), zeros)
        both = fours + zeros
        packets = [packet(len(fours), num_samples=1), packet(len(zeros), num_samples=30)]
        b.push(b.header(commands[1], both, packets=packets), both)
        np.testing.assert_array_equal(published(control, a, commands[0]), base + 3 * ONES)


def test_a_broken_upload_resumes_at_the_servers_offset(server: Fleet, control: Control) -> None:
    size = 600_000
    control.start_job(vector_job(model_args={"size": size}))
    with WireClient(server.listen) as wire:
        command = wire.expect("train")
        payload = payload_of(np.arange(size, dtype=np.float32))
        header = wire.header(command, payload)
        with pytest.raises(Refused, match="truncated"):
            wire.push(header, payload, stop_at=1 << 20)
        offsets: list[int] = []

        def rest() -> Iterator[pb.ClientUpdate]:
            yield pb.ClientUpdate(offer=offer_of(header, payload))
            for offset in range(1 << 20, len(payload), 1 << 20):
                yield pb.ClientUpdate(chunk=pb.Chunk(offset=offset, data=payload[offset : offset + (1 << 20)]))

        replies = list(wire.updates.PushUpdate(rest(), metadata=wire.metadata))
        offsets = [reply.resume_offset for reply in replies if reply.WhichOneof("reply") == "resume_offset"]
        assert offsets == [1 << 20]
        assert replies[-1].HasField("accepted")


def test_a_retry_of_an_accepted_update_is_accepted_and_another_update_is_refused(
    server: Fleet, control: Control
) -> None:
    control.start_job(vector_job(min_clients=2))
    with WireClient(server.listen, "a") as a, WireClient(server.listen, "b") as b:
        command, _ = a.expect("train"), b.expect("train")
        payload, other = payload_of(ONES), payload_of(2 * ONES)
        header = a.header(command, payload)
        a.push(header, payload)
        again = a.push(header, payload)
        assert again is not None
        assert again.accepted.already
        with pytest.raises(Refused) as refused:
            a.push(a.header(command, other), other)
        assert (refused.value.code, refused.value.reason) == (StatusCode.ALREADY_EXISTS, "already_accepted_other")


def test_a_retry_after_the_end_of_the_round_is_accepted(
    control: Control, wire: WireClient, command: pb.TrainCmd
) -> None:
    payload = payload_of(ONES)
    header = wire.header(command, payload)
    wire.push(header, payload)
    published(control, wire, command)
    again = wire.push(header, payload)
    assert again is not None
    assert again.accepted.already


NAN = payload_of(ONES)[:-4] + b"\x00\x00\xc0\x7f"
CASES: dict[str, tuple[bytes, dict[str, Any], StatusCode, str]] = {
    "another run": (payload_of(ONES), {"run_id": "x"}, StatusCode.FAILED_PRECONDITION, "unknown_round"),
    "another round": (payload_of(ONES), {"round": 9999}, StatusCode.FAILED_PRECONDITION, "unknown_round"),
    "another client": (payload_of(ONES), {"client_id": "eve"}, StatusCode.PERMISSION_DENIED, "wrong_client"),
    "another schema": (payload_of(ONES), {"schema_hash": bytes(32)}, StatusCode.INVALID_ARGUMENT, "wrong_schema"),
    "another model": (
        payload_of(ONES),
        {"base_digest": 64 * "0"},
        StatusCode.INVALID_ARGUMENT,
        "wrong_model",
    ),
    "NaN": (NAN, {}, StatusCode.INVALID_ARGUMENT, "non_finite"),
    "no samples": (
        payload_of(ONES),
        {"packets": [packet(4016, num_samples=0)]},
        StatusCode.INVALID_ARGUMENT,
        "bad_samples",
    ),
    "2^63 samples": (
        payload_of(ONES),
        {"packets": [packet(4016, num_samples=2**63)]},
        StatusCode.INVALID_ARGUMENT,
        "bad_samples",
    ),
    "an unknown encoding": (
        payload_of(ONES),
        {"packets": [packet(4016, encoding="zip")]},
        StatusCode.INVALID_ARGUMENT,
        "unknown_encoding",
    ),
    "sparse weights": (
        payload_of(ONES, "packed"),
        {"packets": [packet(len(payload_of(ONES, "packed")), encoding="packed", kind=pb.KIND_WEIGHTS)]},
        StatusCode.INVALID_ARGUMENT,
        "mixed_kinds",
    ),
    "weights and deltas": (
        payload_of(ONES) * 2,
        {"packets": [packet(4016), packet(4016, kind=pb.KIND_WEIGHTS)]},
        StatusCode.INVALID_ARGUMENT,
        "mixed_kinds",
    ),
    "no packets": (payload_of(ONES), {"packets": []}, StatusCode.INVALID_ARGUMENT, "bad_packets"),
    "a false total": (payload_of(ONES), {"total_bytes": 5000}, StatusCode.INVALID_ARGUMENT, "bad_packets"),
    "2^50 bytes": (payload_of(ONES), {"total_bytes": 2**50}, StatusCode.RESOURCE_EXHAUSTED, "too_large"),
    "rubbish": (b"\x07" * 4016, {}, StatusCode.INVALID_ARGUMENT, "bad_header"),
    "a short vector": (payload_of(ONES[:-1]), {}, StatusCode.INVALID_ARGUMENT, "wrong_length"),
    "infinite seconds": (payload_of(ONES), {"train_seconds": float("inf")}, StatusCode.INVALID_ARGUMENT, "bad_metrics"),
    "endless seconds": (payload_of(ONES), {"train_seconds": 1e308}, StatusCode.INVALID_ARGUMENT, "bad_metrics"),
    "a huge metric": (payload_of(ONES), {"metrics": {"loss": 1e308}}, StatusCode.INVALID_ARGUMENT, "bad_metrics"),
}


def test_a_bad_update_is_refused_with_its_reason_and_changes_nothing(server: Fleet, control: Control) -> None:
    control.start_job(vector_job())
    with WireClient(server.listen) as wire:
        command = wire.expect("train")
        outcomes = {}
        for name, (payload, changes, code, reason) in CASES.items():
            for push in (wire.push, wire.push_small):
                with pytest.raises(Refused) as refused:
                    push(wire.header(command, payload, **changes), payload)
                outcomes[name] = (refused.value.code, refused.value.reason)
                assert outcomes[name] == (code, reason), f"{name}: {refused.value}"
        base = parameters_of(wire, command.model_version)
        payload = payload_of(ONES)
        wire.push(wire.header(command, payload), payload)
        np.testing.assert_array_equal(published(control, wire, command), base + ONES)


def chunk(offset: int, data: bytes) -> pb.ClientUpdate:
    return pb.ClientUpdate(chunk=pb.Chunk(offset=offset, data=data))


@pytest.mark.parametrize(
    ("name", "code", "reason"),
    [
        ("no header", StatusCode.INVALID_ARGUMENT, "bad_request"),
        ("nothing", StatusCode.INVALID_ARGUMENT, "bad_request"),
        ("a gap", StatusCode.INVALID_ARGUMENT, "bad_chunk"),
        ("an empty chunk", StatusCode.INVALID_ARGUMENT, "bad_chunk"),
        ("too much", StatusCode.RESOURCE_EXHAUSTED, "too_large"),
        ("too little", StatusCode.INVALID_ARGUMENT, "truncated"),
    ],
)
def test_a_bad_stream_is_refused(
    control: Control, wire: WireClient, command: pb.TrainCmd, name: str, code: StatusCode, reason: str
) -> None:
    payload = payload_of(ONES)
    header = pb.ClientUpdate(offer=offer_of(wire.header(command, payload), payload))
    streams = {
        "no header": [chunk(0, payload[:10])],
        "nothing": [],
        "a gap": [header, chunk(5, payload[5:15])],
        "an empty chunk": [header, chunk(0, b"")],
        "too much": [header, chunk(0, payload + b"x")],
        "too little": [header, chunk(0, payload[:10])],
    }
    with pytest.raises(Refused) as refused:
        wire.push_raw(streams[name])
    assert (refused.value.code, refused.value.reason) == (code, reason)
    wire.push(wire.header(command, payload), payload)
    published(control, wire, command)


def test_a_partial_upload_that_was_damaged_is_sent_again(server: Fleet, control: Control) -> None:
    size = 100_000  # a smaller payload is kept in memory, and is always sent from the start
    control.start_job(vector_job(model_args={"size": size}))
    with WireClient(server.listen) as wire:
        command = wire.expect("train")
        payload = payload_of(np.ones(size, np.float32))
        header = wire.header(command, payload)
        with pytest.raises(Refused, match="truncated"):
            wire.push_raw([pb.ClientUpdate(offer=offer_of(header, payload)), chunk(0, bytes(100))])
        with pytest.raises(Refused) as refused:
            wire.push(header, payload)
        assert (refused.value.code, refused.value.reason) == (StatusCode.UNAVAILABLE, "damaged")
        wire.push(header, payload)
        assert published_version(control, command.round)


def test_a_call_without_a_session_is_refused(wire: WireClient, command: pb.TrainCmd) -> None:
    wire.metadata = (("fl-session", "made up"),)
    for call in (wire.fetch, lambda: wire.push(wire.header(command, b"x"), b"x")):
        with pytest.raises(Refused) as refused:
            call()
        assert (refused.value.code, refused.value.reason) == (StatusCode.UNAUTHENTICATED, "no_session")


def test_malformed_messages_get_a_clear_error(wire: WireClient, command: pb.TrainCmd) -> None:
    raw: Any = wire.channel.stream_stream("/fedring.v1.ClientUpdateService/PushUpdate")
    with pytest.raises(Exception, match="the bytes are not a valid message") as refused:
        list(raw(iter([b"\xff\xff\xff"]), metadata=wire.metadata))
    assert "Traceback" not in str(refused.value)


def test_another_protocol_is_refused_with_advice(wire: WireClient) -> None:
    for other, side in ((PROTOCOL - 1, "the client"), (PROTOCOL + 1, "fl-server")):
        with pytest.raises(Exception, match=f"speaks protocol {PROTOCOL}, the client {other}: update {side}"):
            wire.commands.Join(pb.JoinRequest(client_id="new", protocol=other))


@pytest.mark.parametrize("client_id", ["", "a b", "x" * 129, "../../etc"])
def test_a_bad_client_id_is_refused(wire: WireClient, client_id: str) -> None:
    with pytest.raises(Exception, match="client_id"):
        wire.commands.Join(pb.JoinRequest(client_id=client_id, protocol=PROTOCOL))


def test_the_newest_session_of_a_client_wins(server: Fleet, wire: WireClient, command: pb.TrainCmd) -> None:
    with WireClient(server.listen) as newer:
        ended = wire.ended.get(timeout=SECONDS)
        assert ended is not None
        assert ended.code() is StatusCode.ABORTED
        assert newer.expect("train").round == command.round


def test_a_broken_download_resumes_at_the_offset(wire: WireClient, command: pb.TrainCmd) -> None:
    header, payload = wire.fetch(command.model_version)
    request = pb.FetchModelRequest(digest=command.model_digest, offset=1000, payload_name=header.payload_name)
    messages = list(wire.models.FetchModel(request, metadata=wire.metadata))
    assert b"".join(message.chunk.data for message in messages[1:]) == payload[1000:]
    request.payload_name = "another"
    messages = list(wire.models.FetchModel(request, metadata=wire.metadata))
    assert b"".join(message.chunk.data for message in messages[1:]) == payload


def test_one_client_cannot_take_all_streams(server: Fleet, wire: WireClient) -> None:
    for _ in range(2 * MOST_CALLS):  # calls that have ended do not count
        with pytest.raises(Refused, match="unknown_model"):
            wire.fetch(777)
    silent: queue.Queue[pb.WatchRequest | None] = queue.Queue()
    streams = [wire.commands.Watch(iter(silent.get, None), metadata=wire.metadata) for _ in range(MOST_CALLS - 1)]
    for stream in streams:
        next(stream)
    with pytest.raises(Refused) as refused:
        wire.fetch(777)
    assert (refused.value.code, refused.value.reason) == (StatusCode.RESOURCE_EXHAUSTED, "overloaded")
    with WireClient(server.listen, "other") as other:
        other.expect("heartbeat")
    for _ in streams:
        silent.put(None)


def test_an_unknown_model_is_refused(wire: WireClient, command: pb.TrainCmd) -> None:
    with pytest.raises(Refused) as refused:
        wire.fetch(777)
    assert (refused.value.code, refused.value.reason) == (StatusCode.NOT_FOUND, "unknown_model")


def test_a_round_does_not_wait_for_a_client_that_reports_a_failure(wire: WireClient, command: pb.TrainCmd) -> None:
    failure = pb.Failure(round=command.round, reason="no_data", detail="the folder is gone")
    wire.say(pb.WatchRequest(matched=True, failure=failure))
    ended = wire.expect("round_ended")
    assert ended.reason == "too_few_clients"


def test_a_late_update_of_a_closed_round_is_refused(server: Fleet, control: Control) -> None:
    control.start_job(vector_job(min_clients=2, close_at_minimum=True))
    with WireClient(server.listen, "a") as a, WireClient(server.listen, "b") as b:
        command, _ = a.expect("train"), b.expect("train")
        payload = payload_of(ONES)
        a.push(a.header(command, payload), payload)
        b.expect("round_ended")
        with pytest.raises(Refused) as refused:
            b.push(b.header(command, payload), payload)
        assert refused.value.reason in ("unknown_round", "round_closed")


def test_losses_without_a_finite_sum_are_refused(server: Fleet, control: Control) -> None:
    job_id = control.start_job(vector_job(min_clients=2, evaluate=True)).job_id
    with WireClient(server.listen, "a") as a, WireClient(server.listen, "b") as b:
        for client in (a, b):
            payload = payload_of(ONES)
            client.push(client.header(client.expect("train"), payload), payload)
        for client in (a, b):
            order = client.expect("evaluate")
            for loss in (1.7e308, float("inf"), float("nan"), 1.0):
                report = pb.EvaluationReport(round=order.round, model_digest=order.model_digest, total=1, loss_sum=loss)
                with nullcontext() if loss == 1 else pytest.raises(Exception, match="a number of at most"):
                    client.commands.ReportEvaluation(report, metadata=client.metadata)
        assert list(control.follow_job(job_id))[-1].kind == "job_ended"
    assert control.rounds(limit=1)[0].eval_loss_sum == 2
