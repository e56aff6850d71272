"""What PROTOCOL.md allows clients: other encodings, when to close their side, and calls that outlive their session."""

import queue
from collections.abc import Iterator

import grpc
import numpy as np
import pytest
from grpc import StatusCode

from fedring.codec import NAMES, decode
from fedring.rpc.contract import PROTOCOL
from fedring.rpc.errors import reason_of
from fedring.v1 import federation_pb2 as pb
from fedring.v1.federation_pb2_grpc import ModelBlobServiceStub, TrainCmdServiceStub
from tests.fleets import Control, Fleet
from tests.system.wire import (
    CHUNK,
    SECONDS,
    SIZE,
    Refused,
    WireClient,
    offer_of,
    parameters,
    payload_of,
    published_version,
    run,
)

ONES = np.ones(SIZE, np.float32)
LARGE = 300_000  # values, which are more than one chunk


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Start one fl-server for all tests of this file."""
    with Fleet(tmp_path_factory.mktemp("freedoms")) as fleet:
        yield fleet


class Upload:
    """A PushUpdate call whose messages are sent one by one; its side stays open until it is closed."""

    def __init__(self, client: WireClient) -> None:
        self._messages: queue.Queue[pb.ClientUpdate | None] = queue.Queue()
        self.replies = client.updates.PushUpdate(
            iter(self._messages.get, None), metadata=client.metadata, timeout=SECONDS
        )

    def offer(self, offer: pb.UpdateOffer) -> pb.UpdateReply:
        """Send the offer; return the server's answer."""
        self._messages.put(pb.ClientUpdate(offer=offer))
        return self.reply()

    def chunk(self, offset: int, data: bytes) -> None:
        """Send these bytes of the payload."""
        self._messages.put(pb.ClientUpdate(chunk=pb.Chunk(offset=offset, data=data)))

    def reply(self) -> pb.UpdateReply:
        """Return the server's next reply."""
        reply: pb.UpdateReply = next(self.replies)
        return reply

    def close(self) -> None:
        """Close the client's side of the call."""
        self._messages.put(None)

    @property
    def ended_well(self) -> bool:
        """Whether the server ends the call without another reply and without an error; waits for the end."""
        return list(self.replies) == [] and self.replies.code() is StatusCode.OK


def test_an_update_may_have_another_encoding_than_the_command_asks_for(server: Fleet, control: Control) -> None:
    run(control, encoding="int8", rounds=len(NAMES))
    with WireClient(server.listen) as wire:
        values = np.linspace(-1, 1, SIZE, dtype=np.float32)
        for name in NAMES:
            command = wire.expect("train")
            assert command.encoding.name == "int8"
            before, payload = parameters(wire, command.model_version), payload_of(values, name, chunk=77)
            packet = pb.Packet(
                vector=pb.VECTOR_PARAMETERS, kind=pb.KIND_DELTA, encoding=name, bytes=len(payload), num_samples=3
            )
            wire.push(wire.header(command, payload, packets=[packet]), payload)
            after = parameters(wire, published_version(control, command.round))
            delta = decode(payload, name=name, length=SIZE).astype(np.float64)
            np.testing.assert_array_equal(after, (before + delta * 3 / 3).astype(np.float32))


def test_an_update_is_accepted_before_the_client_closes_its_side(control: Control, wire: WireClient) -> None:
    run(control)
    command, payload = wire.expect("train"), payload_of(ONES)
    upload = Upload(wire)
    assert upload.offer(offer_of(wire.header(command, payload), payload)).resume_offset == 0
    upload.chunk(0, payload)
    assert upload.reply().HasField("accepted")
    assert upload.ended_well
    upload.close()


def test_messages_after_the_last_byte_are_ignored(control: Control, wire: WireClient) -> None:
    run(control)
    command, payload = wire.expect("train"), payload_of(ONES)
    upload = Upload(wire)
    upload.offer(offer_of(wire.header(command, payload), payload))
    upload.chunk(0, payload)
    upload.chunk(len(payload), b"more")
    upload.close()
    assert upload.reply().HasField("accepted")
    assert upload.ended_well


def test_the_payload_of_an_accepted_update_is_not_requested_again(control: Control, wire: WireClient) -> None:
    run(control)
    command, payload = wire.expect("train"), payload_of(ONES)
    header = wire.header(command, payload)
    wire.push(header, payload)
    upload = Upload(wire)
    assert upload.offer(offer_of(header, payload)).accepted.already
    assert upload.ended_well
    upload.close()


def test_an_upload_goes_on_after_its_session_has_ended(server: Fleet, control: Control) -> None:
    job_id, events = run(control, model_args={"size": LARGE})
    with WireClient(server.listen) as wire:
        command, payload = wire.expect("train"), payload_of(np.ones(LARGE, np.float32))
        upload = Upload(wire)
        upload.offer(offer_of(wire.header(command, payload), payload))
        upload.chunk(0, payload[:CHUNK])
        wire.stop_watching()
        assert next(event.client_id for event in events if event.kind == "client_lost") == wire.client_id
        with pytest.raises(Refused) as refused:  # a new call of the ended session
            wire.fetch(command.model_version)
        assert (refused.value.code, refused.value.reason) == (StatusCode.UNAUTHENTICATED, "no_session")
        upload.chunk(CHUNK, payload[CHUNK:])
        upload.close()
        assert upload.reply().HasField("accepted")
        assert [event.kind for event in events][-1] == "job_ended"
    assert control.job(job_id).state == "completed"


def test_a_download_goes_on_after_its_session_has_ended(server: Fleet, control: Control) -> None:
    _, events = run(control, model_args={"size": 40 * LARGE})  # more than fits into buffers on the way
    with WireClient(server.listen) as wire:
        command = wire.expect("train")
        stream = wire.models.FetchModel(pb.FetchModelRequest(digest=command.model_digest), metadata=wire.metadata)
        header = next(stream).header
        wire.stop_watching()
        assert next(event.client_id for event in events if event.kind == "client_lost") == wire.client_id
        assert sum(len(message.chunk.data) for message in stream) == header.total_bytes


def test_a_client_that_rejoins_gets_its_command_again_and_resumes_its_upload(server: Fleet, control: Control) -> None:
    run(control, model_args={"size": LARGE})
    payload = payload_of(np.ones(LARGE, np.float32))
    with WireClient(server.listen) as before:
        command = before.expect("train")
        offer = offer_of(before.header(command, payload), payload)
        with pytest.raises(Refused, match="truncated"):
            before.push(offer, payload, stop_at=CHUNK)
    with WireClient(server.listen) as after:
        again = after.expect("train")
        assert again.deadline_seconds <= command.deadline_seconds
        for each in (command, again):
            each.ClearField("deadline_seconds")
            each.ClearField("model")
        assert again == command
        upload = Upload(after)
        assert upload.offer(offer).resume_offset == CHUNK
        upload.chunk(CHUNK, payload[CHUNK:])
        upload.close()
        assert upload.reply().HasField("accepted")


def offer_until_admitted(wire: WireClient, offer: pb.UpdateOffer) -> tuple[Upload, int]:
    """Offer the update until the server has room for the call; return the call and the offset to resume from."""
    while True:
        upload = Upload(wire)
        try:
            return upload, upload.offer(offer).resume_offset
        except grpc.RpcError as error:
            if reason_of(error) != "overloaded":
                raise


def test_a_newer_upload_of_a_client_replaces_its_older_one(server: Fleet, control: Control) -> None:
    run(control, model_args={"size": LARGE})
    payload = payload_of(np.ones(LARGE, np.float32))
    with WireClient(server.listen) as wire:
        offer = offer_of(wire.header(wire.expect("train"), payload), payload)
        older = Upload(wire)
        older.offer(offer)
        older.chunk(0, payload[:CHUNK])
        newer, start = offer_until_admitted(wire, offer)
        assert start in (0, CHUNK)
        for offset in range(start, len(payload), CHUNK):
            newer.chunk(offset, payload[offset : offset + CHUNK])
        assert newer.reply().HasField("accepted")
        older.replies.cancel()  # the server does not answer it any more
        for upload in (older, newer):
            upload.close()


def test_a_client_may_leave_by_closing_its_side_of_watch(server: Fleet, control: Control) -> None:
    events = control.events()
    with WireClient(server.listen, "leaver") as wire:
        wire.expect("heartbeat")
        next(event for event in events if event.kind == "client_joined" and event.client_id == "leaver")
        wire.leave()
        assert wire.ended.get(timeout=SECONDS) is None  # status OK
        next(event for event in events if event.kind == "client_lost" and event.client_id == "leaver")
    events.cancel()


def test_two_watches_of_a_session_end_together(server: Fleet) -> None:
    with grpc.insecure_channel(server.listen) as channel:
        commands = TrainCmdServiceStub(channel)
        joined = commands.Join(pb.JoinRequest(client_id="two", protocol=PROTOCOL))
        silent: queue.Queue[pb.WatchRequest | None] = queue.Queue()
        first, second = (
            commands.Watch(iter(silent.get, None), metadata=(("fl-session", joined.session_id),)) for _ in range(2)
        )
        next(first)  # a heartbeat, so the call is open
        next(second)
        first.cancel()
        with pytest.raises(grpc.RpcError) as caught:
            list(second)
        assert Refused(caught.value).reason == "no_session"
        for _ in range(2):
            silent.put(None)


def test_the_sample_counts_of_all_packets_are_checked(control: Control, wire: WireClient) -> None:
    run(control)
    command, payload = wire.expect("train"), payload_of(ONES)
    packets = [
        pb.Packet(
            vector=pb.VECTOR_PARAMETERS, kind=pb.KIND_DELTA, encoding="fp32", bytes=len(payload), num_samples=samples
        )
        for samples in (0, 5)
    ]
    with pytest.raises(Refused) as refused:
        wire.push(wire.header(command, 2 * payload, packets=packets), 2 * payload)
    assert (refused.value.code, refused.value.reason) == (StatusCode.INVALID_ARGUMENT, "bad_samples")


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Start a server that takes a silent client for lost after a tenth of a second."""
    patience = {"heartbeat_seconds": 0.05, "lost_after_seconds": 0.1}
    with Fleet(tmp_path_factory.mktemp("impatient"), patience) as fleet:
        yield fleet


def test_a_client_that_sends_nothing_gets_nothing_but_heartbeats(impatient: Fleet) -> None:
    with grpc.insecure_channel(impatient.listen) as channel:
        commands, heard = TrainCmdServiceStub(channel), set[str | None]()
        while not heard:
            joined = commands.Join(pb.JoinRequest(client_id="silent", protocol=PROTOCOL))
            silent: queue.Queue[pb.WatchRequest | None] = queue.Queue()
            watch = commands.Watch(iter(silent.get, None), metadata=(("fl-session", joined.session_id),))
            try:
                heard = {event.WhichOneof("event") for event in watch}
                assert watch.code() is StatusCode.OK
            except grpc.RpcError as error:
                if reason_of(error) != "no_session":  # it watched too late, as in the next test
                    raise
            silent.put(None)
        assert heard == {"heartbeat"}


def test_a_session_that_does_not_watch_in_time_ends(impatient: Fleet) -> None:
    with grpc.insecure_channel(impatient.listen) as channel:
        joined = TrainCmdServiceStub(channel).Join(pb.JoinRequest(client_id="idle", protocol=PROTOCOL))
        fetch, metadata = ModelBlobServiceStub(channel).FetchModel, (("fl-session", joined.session_id),)
        reasons: list[str] = []
        while "no_session" not in reasons:  # other calls do not keep the session alive
            with pytest.raises(grpc.RpcError) as caught:
                list(fetch(pb.FetchModelRequest(digest="none"), metadata=metadata))
            reasons.append(Refused(caught.value).reason)
        assert set(reasons) <= {"unknown_model", "no_session"}
