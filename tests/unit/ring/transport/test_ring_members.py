"""A ring with tls_members_only: the authority's signature is not enough, the certificate must be a member's."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from tests.pki import Pki, flctl
from tests.ring_endpoints import SECONDS, World, allreduce, close

from fedring.ring.engine.endpoint import Endpoint
from fedring.ring.errors import PeerLost, RingError
from fedring.ring.options import RingOptions
from fedring.ring.transport.channels import EXCHANGE, GENERATION_KEY, PEER_KEY, PULSE, dial, is_serving
from fedring.rpc.errors import reason_of
from fedring.rpc.identity import peer_name

REFUSED = (grpc.StatusCode.PERMISSION_DENIED, "not_a_member")


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    made = Pki(tmp_path_factory.mktemp("pki"))
    made.issue("ann", "bob", "carol")
    return made


def uri(name: str) -> str:
    return f"fedring://client/{name}"


def options(pki: Pki, name: str) -> RingOptions:
    tls = pki.tls(name)
    return RingOptions(tls_ca=tls.ca, tls_cert=tls.cert, tls_key=tls.key, tls_members_only=True, local_transport=False)


@pytest.fixture
def endpoints(pki: Pki) -> Iterator[list[Endpoint]]:
    """Make the endpoints of ann and bob, which know each other."""
    made = [Endpoint(options(pki, name)) for name in ("ann", "bob")]
    for endpoint in made:
        endpoint.members.expect({made[0].address: uri("ann"), made[1].address: uri("bob")})
    yield made
    close(made)


def refusal(pki: Pki, name: str, host: Endpoint, *, claims: str) -> tuple[grpc.StatusCode, str]:
    """Return how a stream with the certificate of `name` is refused that claims to come from the address `claims`."""
    metadata = ((PEER_KEY, claims), (GENERATION_KEY, str(host.generation)))
    with dial(host.address, options(pki, name), name=peer_name(uri("ann"))) as channel:
        call: Any = channel.stream_unary(EXCHANGE)
        with pytest.raises(grpc.RpcError) as refused:
            call(iter(()), metadata=metadata, timeout=SECONDS)
    return refused.value.code(), reason_of(refused.value)


def add_up(endpoints: list[Endpoint]) -> None:
    """Match the endpoints, and add over them."""
    ring = World(endpoints)
    ring.match()
    values = [torch.ones(4), torch.full((4,), 2.0)]
    for operation in [allreduce(group, tensor) for group, tensor in zip(ring.groups, values, strict=True)]:
        assert operation.wait(SECONDS)
    assert all(tensor.tolist() == [3.0] * 4 for tensor in values)


def test_members_add_up(endpoints: list[Endpoint]) -> None:
    add_up(endpoints)


def test_a_certificate_that_is_not_a_members_is_refused_and_does_no_harm(pki: Pki, endpoints: list[Endpoint]) -> None:
    ann, bob = endpoints
    assert refusal(pki, "carol", ann, claims=bob.address) == REFUSED
    assert ann.traffic.refused_streams == 1
    assert ann.traffic.received_frames == 0
    add_up(endpoints)


def test_a_member_speaks_for_itself_alone(pki: Pki, endpoints: list[Endpoint]) -> None:
    ann, bob = endpoints
    assert refusal(pki, "ann", ann, claims=bob.address) == REFUSED
    assert refusal(pki, "bob", ann, claims="127.0.0.1:9") == REFUSED


def test_a_stranger_gets_no_pulse(pki: Pki, endpoints: list[Endpoint]) -> None:
    with dial(endpoints[0].address, options(pki, "carol"), name=peer_name(uri("ann"))) as channel:
        call: Any = channel.unary_unary(PULSE)
        with pytest.raises(grpc.RpcError) as refused:
            call(b"", timeout=SECONDS)
    assert (refused.value.code(), reason_of(refused.value)) == REFUSED


@pytest.mark.slow
def test_a_listener_in_the_place_of_a_member_receives_nothing(pki: Pki, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedring.ring.transport.stream.PROBE_SECONDS", SECONDS)
    ann, carol = Endpoint(options(pki, "ann")), Endpoint(options(pki, "carol"))
    identities = {ann.address: uri("ann"), carol.address: uri("bob")}
    for endpoint in (ann, carol):
        endpoint.members.expect(identities)
    ring = World([ann], [carol.address])
    with pytest.raises(PeerLost, match=r"(?i)ssl|handshake|verif|name"):
        ann.wait_until_matched(ring.groups[0], timeout=1)
    assert carol.traffic.received_frames == 0
    close([ann, carol])


def test_without_identities_there_is_no_group(pki: Pki) -> None:
    endpoint = Endpoint(options(pki, "ann"))
    with pytest.raises(RingError, match="names the members' identities"):
        World([endpoint])
    endpoint.close()


def test_members_only_needs_certificates(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tls_members_only needs"):
        RingOptions(tls_members_only=True)


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_worker_can_be_asked_whether_it_takes_part_in_a_generation(pki: Pki, encrypted: bool) -> None:
    plain = RingOptions(local_transport=False)
    tls = options(pki, "ann").model_copy(update={"tls_members_only": False, "tls_name": peer_name(uri("ann"))})
    settings, others = (tls, plain) if encrypted else (plain, tls)
    endpoint = Endpoint(settings, generation=7)
    assert is_serving(endpoint.address, settings, generation=7)
    assert endpoint.traffic.dropped_frames == 0
    assert not is_serving(endpoint.address, settings, generation=8)
    assert not is_serving(endpoint.address, others, generation=7)
    endpoint.close()
    assert not is_serving(endpoint.address, settings, generation=7)


def test_a_revoked_member_is_refused_by_who_listened_before(tmp_path: Path) -> None:
    pki = Pki(tmp_path / "pki")
    pki.issue("ann", "bob")
    crl = {"tls_crl": pki.folder / "ca.crl"}
    made = [Endpoint(options(pki, name).model_copy(update=crl)) for name in ("ann", "bob")]
    for endpoint in made:
        endpoint.members.expect({made[0].address: uri("ann"), made[1].address: uri("bob")})
    add_up(made)
    flctl("certs", "revoke", pki.folder, "bob")
    revoked = (grpc.StatusCode.PERMISSION_DENIED, "revoked_certificate")
    assert refusal(pki, "bob", made[0], claims=made[1].address) == revoked
    close(made)


def test_a_list_of_revoked_certificates_that_cannot_be_used_is_an_error(pki: Pki) -> None:
    missing = options(pki, "ann").model_copy(update={"tls_crl": pki.folder / "none.crl"})
    with pytest.raises(RingError, match=r"cannot read .*none\.crl"):
        Endpoint(missing)
    with pytest.raises(ValueError, match="tls_crl needs"):
        RingOptions(tls_crl=pki.folder / "ca.crl")
