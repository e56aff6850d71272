"""Downloads: a client that holds a version gets deltas, others get the whole model, and all get the same bits."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fedring.codec import BUFFERS, Vectors, decode, encode_buffers
from fedring.train.tensors.state import schema_of
from fedring.v1 import federation_pb2 as pb
from tests.fleets import Control, Fleet, run_job
from tests.system.user_models import normed
from tests.system.wire import WireClient, payload_of, published_version, vector_job

SIZE = 50_000
ROUNDS = 4
HERE = {"PYTHONPATH": str(Path(__file__).parent)}
TRUSTED = {"trusted": ["fedring", "user_models"]}
ENCODINGS = {"packed": 0.1, "uniform": 0.12, "int8": 0.26}
"""Encodings of downloads, and the largest part of the whole model's bytes that a delta may have."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Start one fl-server for all tests of this file."""
    with Fleet(tmp_path_factory.mktemp("downloads"), TRUSTED, env=HERE) as fleet:
        yield fleet


def noise(size: int, seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32) * np.float32(0.01)


def received(header: pb.ModelHeader, payload: bytes, base: Vectors | None, sizes: tuple[int, int]) -> Vectors:
    """Decode a download as FORMATS.md says, by adding its packets in order; check its digest."""
    assert len(payload) == header.total_bytes
    if header.base_digest:
        assert base is not None
        parameters, buffers = base.parameters, base.buffers
    else:
        parameters, buffers = np.zeros(sizes[0], np.float32), np.zeros(sizes[1])
    at = 0
    for packet in header.packets:
        data, at = payload[at : at + packet.bytes], at + packet.bytes
        assert packet.kind == (pb.KIND_DELTA if header.base_digest else pb.KIND_WEIGHTS)
        if packet.vector == pb.VECTOR_PARAMETERS:
            parameters = parameters + decode(data, name=packet.encoding, length=sizes[0]).astype(np.float32)
        else:
            assert packet.encoding == BUFFERS
            buffers = buffers + decode(data, name=packet.encoding, length=sizes[1])
    vectors = Vectors(parameters, buffers)
    assert vectors.digest() == header.model_digest
    return vectors


class Holder:
    """A client that keeps the versions that it has fetched."""

    def __init__(self, wire: WireClient, sizes: tuple[int, int]) -> None:
        self.wire, self.sizes = wire, sizes
        self.held: dict[int, Vectors] = {}

    def fetch(self, version: int, held: int = 0) -> pb.ModelHeader:
        """Fetch a version, given one that is held; assert that it has the same bits each time."""
        header, payload = self.wire.fetch(version, held)
        vectors = received(header, payload, self.held.get(held), self.sizes)
        known = self.held.setdefault(version, vectors)
        assert (known.parameters.tobytes(), known.buffers.tobytes()) == (
            vectors.parameters.tobytes(),
            vectors.buffers.tobytes(),
        )
        return header


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_deltas_from_any_held_version_lead_to_the_same_bits(server: Fleet, control: Control, encoding: str) -> None:
    events = control.events()
    keys = {"model_args": {"size": SIZE}, "download_encoding": encoding, "rounds": ROUNDS}
    job_id = control.start_job(vector_job(**keys, seed=sorted(ENCODINGS).index(encoding))).job_id
    with WireClient(server.listen) as wire:
        holder = Holder(wire, (SIZE, 0))
        versions: list[int] = []
        whole, wanted, round_ = 0, np.zeros(SIZE), 0
        for number in range(ROUNDS):
            command: pb.TrainCmd = wire.expect("train")
            held = versions[-1] if versions else 0
            header = holder.fetch(command.model_version, held)
            assert wire.base_of(header) == held
            whole = whole or header.total_bytes
            assert not held or header.total_bytes <= ENCODINGS[encoding] * whole
            versions.append(command.model_version)
            round_ = command.round
            wanted = wanted + noise(SIZE, number)
            payload = payload_of(noise(SIZE, number))
            wire.push(wire.header(command, payload), payload)
        last = published_version(control, round_)
        for held in (*versions[::-1], 0):  # one delta, chains of deltas, and the whole model
            header = holder.fetch(last, held)
            assert wire.base_of(header) == held
            assert len(header.packets) == (last - held if held else 1)
        # Errors of an encoding go into the residual and are not lost.
        moved = holder.held[last].parameters - holder.held[versions[0]].parameters
        assert np.dot(moved, wanted) / np.dot(wanted, wanted) > {"packed": 0.3}.get(encoding, 0.95)
    for _ in control.follow_job(job_id, events):
        pass


def test_buffers_are_sent_exactly_and_averaged_by_samples(server: Fleet, control: Control) -> None:
    schema = schema_of(normed())
    sizes = schema.num_parameters, schema.num_buffers
    events = control.events()
    keys = {"model": "user_models:normed", "model_args": {}, "min_clients": 2, "rounds": 2}
    job_id = control.start_job(vector_job(**keys, download_encoding="int8")).job_id
    count = next(span.start for entry, span in schema.spans("buffer") if entry.dtype == "int64")
    with WireClient(server.listen, "a") as a, WireClient(server.listen, "b") as b:
        holder, last = Holder(a, sizes), 0
        for number in range(2):
            parts = {}
            for client, samples in ((a, 1), (b, 3)):
                command: pb.TrainCmd = client.expect("train")
                buffers = np.arange(sizes[1]) * samples / 3 + number
                buffers[count] = 10 * samples + number
                parts[samples] = buffers
                push(client, command, noise(sizes[0], number), buffers, samples)
            if not last:
                last = command.model_version
                holder.fetch(last)
            version = published_version(control, command.round)
            header = holder.fetch(version, last)
            assert a.base_of(header) == last
            assert [packet.vector for packet in header.packets] == [pb.VECTOR_PARAMETERS, pb.VECTOR_BUFFERS]
            got = holder.held[version].buffers
            mean = (parts[1] + 3 * parts[3]) / 4
            assert got[count] == 25 + number  # rounded to an integer
            np.testing.assert_allclose(np.delete(got, count), np.delete(mean, count), rtol=1e-14)
            last = version
        holder.fetch(last)  # the whole model has the same bits
    for _ in control.follow_job(job_id, events):
        pass


def push(
    client: WireClient, command: pb.TrainCmd, delta: NDArray[np.float32], buffers: NDArray[np.float64], samples: int
) -> None:
    """Push an update: parameters as a delta, buffers as values."""
    payloads = [payload_of(delta), encode_buffers(buffers)]
    packets = [
        pb.Packet(vector=pb.VECTOR_PARAMETERS, kind=pb.KIND_DELTA, encoding="fp32"),
        pb.Packet(vector=pb.VECTOR_BUFFERS, kind=pb.KIND_WEIGHTS, encoding=BUFFERS),
    ]
    for packet, payload in zip(packets, payloads, strict=True):
        packet.bytes, packet.num_samples = len(payload), samples
    payload = b"".join(payloads)
    client.push(client.header(command, payload, packets=packets), payload)


def test_real_clients_fetch_deltas_and_a_new_client_the_whole_model(tmp_path: Path) -> None:
    keys = {"model": "user_models:normed", "download_encoding": "uniform", "rounds": 3, "evaluate": False}
    fleet = Fleet(tmp_path, TRUSTED, [TRUSTED] * 3, env=HERE)
    new_client = fleet.clients.pop()
    with fleet, Control(fleet.control) as control:
        first = bytes_to_clients(control, {**keys, "min_clients": 2})
        new_client.settings["server"] = fleet.listen
        fleet.clients.append(new_client)
        fleet.restart(2)
        second = bytes_to_clients(control, {**keys, "min_clients": 3})
    whole = 4 * schema_of(normed()).num_parameters
    old = ("client-0", "client-1")
    assert all(first[0][name] > whole for name in old)
    assert all(round_[name] < 0.4 * whole for round_ in first[1:] + second for name in old)
    assert second[0]["client-2"] > whole
    assert all(round_["client-2"] < 0.4 * whole for round_ in second[1:])


def bytes_to_clients(control: Control, job: dict[str, Any]) -> list[dict[str, int]]:
    """Run the job; return the bytes that each client downloaded, by round."""
    rounds = control.rounds(job_id=run_job(control, job).job_id)[::-1]
    assert [round_.phase for round_ in rounds] == ["published"] * len(rounds)
    return [{client.client_id: client.download_bytes for client in round_.clients} for round_ in rounds]


def test_a_job_without_a_download_encoding_sends_whole_models(server: Fleet, control: Control) -> None:
    events = control.events()
    job_id = control.start_job(vector_job(model_args={"size": 77}, rounds=2)).job_id
    with WireClient(server.listen) as wire:
        holder = Holder(wire, (77, 0))
        first: pb.TrainCmd = wire.expect("train")
        holder.fetch(first.model_version)
        wire.push(wire.header(first, payload_of(noise(77, 1))), payload_of(noise(77, 1)))
        second: pb.TrainCmd = wire.expect("train")
        assert not holder.fetch(second.model_version, first.model_version).base_digest
        wire.push(wire.header(second, payload_of(noise(77, 1))), payload_of(noise(77, 1)))
    for _ in control.follow_job(job_id, events):
        pass
