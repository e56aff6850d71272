"""Collectives over links of every kind: streams with and without TLS, the local transport, and checksums."""

import datetime
import gc
import ipaddress
import threading
from pathlib import Path

import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from pydantic import ValidationError
from tests.ring_endpoints import SECONDS, World, allreduce, close, start, world
from tests.waiting import until

from fedring.ring.engine import collectives
from fedring.ring.engine.endpoint import Endpoint
from fedring.ring.engine.reduction import Reduction
from fedring.ring.errors import NotSupported, PeerLost
from fedring.ring.options import RingOptions

SIZES = [1, 1000, 700_001]  # directly, and in parts around the ring
DAY = datetime.timedelta(days=1)


class Authority:
    """Signs certificates for 127.0.0.1."""

    def __init__(self, folder: Path) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, folder.name)])
        self.folder = folder
        folder.mkdir()
        self._write("ca.pem", self._signed(self._key, self._name, is_ca=True))
        key = ec.generate_private_key(ec.SECP256R1())
        self._write("cert.pem", self._signed(key, x509.Name([]), is_ca=False))
        encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        self._write("key.pem", key.private_bytes(encoding, form, serialization.NoEncryption()))

    def options(self, ca: "Authority | None" = None) -> RingOptions:
        """Return options for TLS with a certificate of this authority, and with trust in `ca`."""
        trusted = (ca or self).folder / "ca.pem"
        return RingOptions(tls_ca=trusted, tls_cert=self.folder / "cert.pem", tls_key=self.folder / "key.pem")

    def _signed(self, key: ec.EllipticCurvePrivateKey, name: x509.Name, *, is_ca: bool) -> bytes:
        now = datetime.datetime.now(datetime.UTC)
        host = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        builder = (
            x509.CertificateBuilder(
                self._name, name, key.public_key(), x509.random_serial_number(), now - DAY, now + DAY
            )
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
            .add_extension(host, critical=True)
        )
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def _write(self, name: str, data: bytes) -> None:
        (self.folder / name).write_bytes(data)


def check_sums(ring: World) -> None:
    for size in SIZES:
        tensors = [torch.full((size,), float(rank + 1)) for rank in range(len(ring.groups))]
        running = [allreduce(group, one) for group, one in zip(ring.groups, tensors, strict=True)]
        for operation, tensor in zip(running, tensors, strict=True):
            assert operation.wait(SECONDS)
            assert torch.equal(tensor, torch.full((size,), float(sum(range(1, len(tensors) + 1)))))


@pytest.mark.parametrize("local_transport", [False, True])
@pytest.mark.parametrize("frame_checksum", [False, True])
def test_an_allreduce_is_right_over_links_of_every_kind(local_transport: bool, frame_checksum: bool) -> None:
    options = RingOptions(local_transport=local_transport, frame_checksum=frame_checksum)
    with world(3, options) as ring:
        check_sums(ring)
        assert all(endpoint.traffic.dropped_frames == 0 for endpoint in ring.endpoints)


def test_many_operations_of_many_threads_are_right() -> None:
    """Operations with keys of their own start in another order on each rank."""
    count = 40
    with world(3) as ring:
        tensors = [[torch.full((100 * (n + 1),), 1.0) for n in range(count)] for _ in ring.groups]

        def run(rank: int) -> None:
            group = ring.groups[rank]
            running = []
            for n in torch.randperm(count, generator=torch.Generator().manual_seed(rank)).tolist():
                data = tensors[rank][n].view(torch.uint8).numpy().data
                program = collectives.allreduce(rank, group.size, data, Reduction("sum", torch.float32))
                running.append(group.start(f"bucket {n}", program, timeout=SECONDS, key=f"bucket {n}"))
            assert all(operation.wait(SECONDS) for operation in running)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
        assert all(torch.all(tensor == 3) for mine in tensors for tensor in mine)


def test_every_rank_gathers_messages_of_any_length() -> None:
    lengths = [0, 10_000_000, 77]
    with world(3) as ring:
        outputs = [[memoryview(b"")] * 3 for _ in range(3)]
        running = []
        for rank, group in enumerate(ring.groups):
            outputs[rank][rank] = memoryview(bytes([rank]) * lengths[rank])
            running.append(start(group, collectives.allgather_bytes(rank, 3, outputs[rank], 1 << 30)))
        assert all(operation.wait(SECONDS) for operation in running)
        for mine in outputs:
            assert [bytes(one) for one in mine] == [bytes([rank]) * length for rank, length in enumerate(lengths)]


def test_mutual_tls_carries_an_allreduce(tmp_path: Path) -> None:
    with world(3, Authority(tmp_path / "ours").options()) as ring:
        check_sums(ring)


@pytest.mark.slow
@pytest.mark.parametrize("trusting", [False, True])
def test_a_peer_of_another_authority_is_refused_in_time_and_with_the_reason(
    tmp_path: Path, trusting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer is refused whether or not it trusts the other ranks' authority."""
    monkeypatch.setattr("fedring.ring.transport.stream.PROBE_SECONDS", SECONDS)
    ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    ring = World([Endpoint(ours.options()), Endpoint(theirs.options(ours if trusting else None))])
    with pytest.raises(PeerLost, match=r"(?i)certificate|ssl") as raised:
        ring.endpoints[0].wait_until_matched(ring.groups[0], timeout=1)
    assert raised.value.rank == 1
    close(ring.endpoints)


@pytest.mark.parametrize("key", ["unix_sockets", "shared_memory"])
def test_keys_that_local_transport_has_replaced_are_errors(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValidationError, match=key):
        RingOptions.model_validate({key: True})
    monkeypatch.setenv(f"FEDRING_RING_{key.upper()}", "true")
    with pytest.raises(ValidationError, match=key.upper()):
        RingOptions()


@pytest.mark.parametrize(("op", "dtype"), [("avg", torch.bool), ("bxor", torch.float32), ("max", torch.complex64)])
def test_what_cannot_be_reduced_is_refused_with_a_sentence(op: str, dtype: torch.dtype) -> None:
    with pytest.raises(NotSupported, match=f"there is no {op} of"):
        Reduction(op, dtype)


def test_a_port_that_is_taken_is_an_error() -> None:
    endpoint = Endpoint()
    with pytest.raises(RuntimeError, match="cannot listen"):
        Endpoint(RingOptions(listen=endpoint.address.partition(";")[0]))
    endpoint.close()


def test_generations_leave_neither_threads_nor_files_behind() -> None:
    def generation(number: int) -> None:
        with world(3, generation=number) as ring:
            tensors = [torch.ones(20_000) for _ in range(3)]
            for operation in [allreduce(group, one) for group, one in zip(ring.groups, tensors, strict=True)]:
                assert operation.wait(SECONDS)

    def held() -> tuple[int, int]:
        gc.collect()  # gRPC's objects refer to each other
        return threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))

    for number in range(3):
        generation(number)
    before = held()
    for number in range(20):
        generation(number)
    until(lambda: held()[0] <= before[0] and held()[1] <= before[1] + 3)
