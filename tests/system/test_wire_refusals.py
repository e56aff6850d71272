"""Refusals beside those of updates: invalid downloads, evaluations and ids, and what gRPC itself refuses."""

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc import StatusCode

from fedring.rpc.errors import reason_in, reason_of
from fedring.v1 import control_pb2 as control_pb
from fedring.v1 import federation_pb2 as pb
from fedring.v1.control_pb2_grpc import ControlServiceStub
from tests.fleets import Control, Fleet
from tests.system.wire import SECONDS, SIZE, Refused, WireClient, deliver, payload_of, run, vector_job

ONES = np.ones(SIZE, np.float32)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Start one fl-server for all tests of this file."""
    with Fleet(tmp_path_factory.mktemp("refusals")) as fleet:
        yield fleet


@pytest.fixture
def operator(server: Fleet) -> Iterator[ControlServiceStub]:
    """Connect to the control port, to make calls by hand."""
    with grpc.insecure_channel(server.control) as channel:
        yield ControlServiceStub(channel)


def refusal(call: Callable[[], object]) -> Refused:
    """Make the call, which must be refused; return the error."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return Refused(caught.value)


def report(order: Any, **changes: Any) -> pb.EvaluationReport:
    """Return a valid report for the command, with these changes."""
    facts = {"round": order.round, "model_digest": order.model_digest, "correct": 1, "total": 2, "loss_sum": 3.0}
    return pb.EvaluationReport(**{**facts, **changes})


@pytest.mark.parametrize("name", ["FetchModel", "ExportModel"])
def test_a_download_from_an_invalid_offset_is_refused(
    control: Control, wire: WireClient, operator: ControlServiceStub, name: str
) -> None:
    control.start_job(vector_job())
    version = wire.expect("train").model_version
    header, payload = wire.fetch(version)
    payload_name = header.payload_name

    def ask(offset: int, named: str) -> list[pb.ModelBlob]:
        request = pb.FetchModelRequest(version=version, offset=offset, payload_name=named)
        if name == "FetchModel":
            return list(wire.models.FetchModel(request, metadata=wire.metadata, timeout=SECONDS))
        return list(operator.ExportModel(request, timeout=SECONDS))

    for offset, named in ((len(payload) + 1, payload_name), (2**64 - 1, payload_name), (1, "")):
        error = refusal(lambda offset=offset, named=named: ask(offset, named))  # type: ignore[misc]  # bound now
        assert (error.code, error.reason) == (StatusCode.INVALID_ARGUMENT, "bad_offset")
        assert f"offset {offset}" in str(error)
    assert len(ask(len(payload), payload_name)) == 1  # nothing is left to send but the header
    assert b"".join(message.chunk.data for message in ask(2**63, "another")[1:]) == payload


def test_a_report_that_fits_no_evaluation_in_progress_is_refused(
    server: Fleet, control: Control, wire: WireClient
) -> None:
    job_id, events = run(control, evaluate=True, evaluate_seconds=600)

    def refused(message: pb.EvaluationReport, client: WireClient = wire) -> tuple[StatusCode, str]:
        error = refusal(lambda: client.commands.ReportEvaluation(message, metadata=client.metadata, timeout=SECONDS))
        return error.code, error.reason

    unknown = (StatusCode.FAILED_PRECONDITION, "unknown_round")
    command = wire.expect("train")
    assert refused(report(command)) == unknown  # the round is still training
    payload = payload_of(ONES)
    wire.push(wire.header(command, payload), payload)
    order = wire.expect("evaluate")
    with WireClient(server.listen, "late") as late:
        late.expect("heartbeat")
        assert refused(report(order), late) == (StatusCode.FAILED_PRECONDITION, "not_selected")
    for number in (0, order.round + 1, 2**64 - 1):
        assert refused(report(order, round=number)) == unknown
    for digest in ("", order.model_digest[:-1], "blake3-" + 64 * "0"):
        assert refused(report(order, model_digest=digest)) == (StatusCode.INVALID_ARGUMENT, "wrong_model")
    for counts in ({"correct": 3}, {"total": 2**48}, {"loss_sum": 1e308}):
        assert refused(report(order, **counts)) == (StatusCode.INVALID_ARGUMENT, "bad_evaluation")
    wire.commands.ReportEvaluation(report(order), metadata=wire.metadata)
    assert [event.kind for event in events][-1] == "job_ended"
    (round_,) = control.rounds(job_id=job_id)
    assert (round_.eval_correct, round_.eval_total, round_.eval_loss_sum) == (1, 2, 3.0)
    assert refused(report(order)) == (StatusCode.FAILED_PRECONDITION, "round_closed")


def test_a_repeated_evaluation_report_counts_once(server: Fleet, control: Control) -> None:
    job_id, events = run(control, min_clients=2, evaluate=True, evaluate_seconds=600)
    with WireClient(server.listen, "a") as a, WireClient(server.listen, "b") as b:
        for client in (a, b):
            deliver(client)
        orders = [client.expect("evaluate") for client in (a, b)]
        for _ in range(2):  # as a client does when the answer was lost
            a.commands.ReportEvaluation(report(orders[0]), metadata=a.metadata)
        b.commands.ReportEvaluation(report(orders[1]), metadata=b.metadata)
        assert [event.kind for event in events][-1] == "job_ended"
    assert control.rounds(job_id=job_id)[0].eval_total == 4


@pytest.mark.parametrize("number", [2**63, 2**64 - 1])
def test_an_id_that_is_too_large_is_refused_or_finds_nothing(operator: ControlServiceStub, number: int) -> None:
    watched = operator.WatchEvents(control_pb.WatchEventsRequest(after=number), timeout=SECONDS)
    error = refusal(lambda: next(watched))
    assert (error.code, error.reason) == (StatusCode.INVALID_ARGUMENT, "bad_event_id")
    assert f"after = {number}" in str(error)
    error = refusal(lambda: operator.StopJob(control_pb.StopJobRequest(job_id=number), timeout=SECONDS))
    assert (error.code, error.reason) == (StatusCode.NOT_FOUND, "unknown_job")
    assert f"job {number} is neither running nor queued" in str(error)
    error = refusal(lambda: list(operator.ExportModel(pb.FetchModelRequest(version=number), timeout=SECONDS)))
    assert (error.code, error.reason) == (StatusCode.NOT_FOUND, "unknown_model")
    assert not operator.ListJobs(control_pb.ListRequest(job_id=number)).jobs
    assert not operator.ListRounds(control_pb.ListRequest(job_id=number)).rounds
    assert not operator.ListRounds(control_pb.ListRequest(round=number)).rounds
    assert operator.ListRounds(control_pb.ListRequest(below=number)) == operator.ListRounds(control_pb.ListRequest())


def test_an_unknown_method_is_refused_with_a_reason(server: Fleet) -> None:
    for address in (server.listen, server.control):
        with grpc.insecure_channel(address) as channel:
            for path in ("/fedring.v1.TrainCmdService/Leave", "/fedring.v1.ControlService/Leave", "/a.B/c", "x", ""):
                error = refusal(lambda path=path, channel=channel: channel.unary_unary(path)(b"", timeout=SECONDS))  # type: ignore[misc]  # bound now
                assert (error.code, error.reason) == (StatusCode.UNIMPLEMENTED, "unknown_method")


def test_a_path_that_is_not_utf_8_ends_only_its_own_call(server: Fleet) -> None:
    for address in (server.listen, server.control):
        headers = {":method": "POST", ":scheme": "http", ":path": "/\xe6", ":authority": "x"}
        headers |= {"te": "trailers", "content-type": "application/grpc"}
        fields = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        block = b"".join(bytes([0, len(name)]) + name + bytes([len(value)]) + value for name, value in fields)
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), SECONDS) as peer, peer.makefile("rb") as answers:
            peer.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0) + frame(1, 5, 1, block))
            while head := answers.read(9):  # until the call has been answered
                answers.read(int.from_bytes(head[:3], "big"))
                if int.from_bytes(head[5:], "big") == 1:
                    break
        with grpc.insecure_channel(address) as channel:
            error = refusal(lambda channel=channel: channel.unary_unary("/a.B/c")(b"", timeout=SECONDS))  # type: ignore[misc]  # bound now
        assert error.reason == "unknown_method"


def frame(kind: int, flags: int, stream: int, content: bytes = b"") -> bytes:
    """Return a frame of HTTP/2: kind 4 is settings, 1 is headers; flag 1 ends the stream, 4 ends the headers."""
    return len(content).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + content


class TestRefusalsOfGrpcItself:
    """What gRPC refuses before any code of ours runs, as federation.proto lists; these errors have no reason."""

    def check(self, call: Callable[[], object], code: StatusCode, words: str) -> None:
        with pytest.raises(grpc.RpcError) as caught:
            call()
        error: Any = caught.value
        assert (error.code(), reason_in(error.trailing_metadata())) == (code, "")
        assert words in error.details()
        assert reason_of(error) == code.name.lower()  # what callers use instead

    def test_a_message_above_4_mib(self, wire: WireClient) -> None:
        limit = 4 << 20
        raw: Any = wire.channel.unary_unary("/fedring.v1.TrainCmdService/Join")
        words = "larger than max"
        self.check(lambda: raw(bytes(limit + 1), timeout=SECONDS), StatusCode.RESOURCE_EXHAUSTED, words)
        packed = grpc.Compression.Gzip  # about 4 KB on the wire
        self.check(
            lambda: raw(bytes(limit + 1), timeout=SECONDS, compression=packed), StatusCode.RESOURCE_EXHAUSTED, words
        )
        assert (
            refusal(lambda: raw(b"\xff" * limit, timeout=SECONDS)).reason == "bad_request"
        )  # this one reaches our code

    def test_a_message_above_4_mib_in_a_stream(self, wire: WireClient) -> None:
        push: Any = wire.channel.stream_stream("/fedring.v1.ClientUpdateService/PushUpdate")
        stream = push(iter([bytes((4 << 20) + 1)]), metadata=wire.metadata, timeout=SECONDS)
        self.check(lambda: next(stream), StatusCode.RESOURCE_EXHAUSTED, "larger than max")

    def test_metadata_above_16_kib(self, wire: WireClient) -> None:
        request = pb.FetchModelRequest(version=777)
        for size, refused in ((7 << 10, False), ((16 << 10) + 1, True)):
            metadata = (*wire.metadata, ("x-more", "x" * size))
            stream = wire.models.FetchModel(request, metadata=metadata, timeout=SECONDS)
            if refused:
                self.check(lambda: next(stream), StatusCode.RESOURCE_EXHAUSTED, "metadata size")  # noqa: B023  # called now
            else:
                assert refusal(lambda: next(stream)).reason == "unknown_model"  # noqa: B023  # called now

    def test_more_calls_than_a_port_serves(self, tmp_path: Path) -> None:
        request, status = control_pb.WatchEventsRequest(), control_pb.GetStatusRequest()
        with (
            Fleet(tmp_path, {"exempt_addresses": ["127.0.0.1"]}) as server,
            grpc.insecure_channel(server.control) as channel,
        ):
            stub = ControlServiceStub(channel)
            streams = [stub.WatchEvents(request, timeout=SECONDS) for _ in range(80)]  # the port serves 64
            for stream in streams:
                stream.initial_metadata()  # now the call is served or refused
            self.check(
                lambda: stub.GetStatus(status, timeout=SECONDS),
                StatusCode.RESOURCE_EXHAUSTED,
                "Concurrent RPC limit exceeded",
            )
            for stream in streams:
                stream.cancel()
