"""Whose keys a server takes in secure aggregation."""

from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding
from tests.pki import Pki

from fedring.rpc.certificates import load_authorities
from fedring.rpc.identity import Role
from fedring.server.secure.rounds import check_identity
from fedring.signatures.proofs import BadProof, Proof, public_bytes


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    made = Pki(tmp_path_factory.mktemp("pki"))
    made.issue("a", "b")
    made.issue("eve", role=Role.OPERATOR)
    made.sign("late", "fedring://client/late", ended=True)
    return made


def proof_of(pki: Pki, name: str) -> Proof:
    """Return what the owner of a certificate shows."""
    chain = load_authorities(pki.folder / f"{name}.crt")
    return Proof(tuple(certificate.public_bytes(Encoding.DER) for certificate in chain))


def bare_key() -> Proof:
    return Proof(public_key=public_bytes(Ed25519PrivateKey.generate().public_key()))


def test_a_certificate_must_name_the_client(pki: Pki) -> None:
    authority = pki.folder / "ca.crt"
    check_identity("a", proof_of(pki, "a"), authority=authority)
    for client, shown in (("a", "b"), ("eve", "eve"), ("late", "late")):  # eve is an operator, and late has expired
        with pytest.raises(BadProof):
            check_identity(client, proof_of(pki, shown), authority=authority)
    with pytest.raises(BadProof):
        check_identity("a", bare_key(), authority=authority)


def test_a_certificate_of_another_authority_proves_nothing(pki: Pki, tmp_path: Path) -> None:
    other = Pki(tmp_path / "other")
    other.issue("a")
    with pytest.raises(BadProof):
        check_identity("a", proof_of(other, "a"), authority=pki.folder / "ca.crt")


def test_without_an_authority_the_session_says_who_the_client_is() -> None:
    check_identity("a", bare_key(), authority=None)
