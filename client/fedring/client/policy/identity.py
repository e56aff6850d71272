"""The identity of this client, and the check of its peers.

Peers are known by certificates, by keys without one, or by pinned fingerprints.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from fedring.daemon.config import ConfigError
from fedring.daemon.durable import create_durably, replace_with_digest, text_after_digest, with_digest
from fedring.rpc.certificates import identity_of, load_authorities, load_pair, read_secretly
from fedring.rpc.identity import Role
from fedring.rpc.revocation import Revocations, serial_of
from fedring.rpc.tls import Tls
from fedring.signatures.proofs import BadProof, PrivateKey, Proof, check_chain, fingerprint, public_bytes

KEY_FILE = "signing.key"


@dataclass(frozen=True, slots=True, repr=False)
class Signer:
    """The key that proves a client's identity, with its proof."""

    key: PrivateKey
    proof: Proof

    @property
    def fingerprint(self) -> str:
        """The fingerprint that other sites pin, 64 hexadecimal digits."""
        return fingerprint(self.key)


def load_signer(tls: Tls, state_dir: Path) -> Signer:
    """Return the signing key of this client, with its proof.

    It is the key of tls.cert with its chain, or else the key in the state folder, which is made if there is none.

    Raises:
        ConfigError: if a file cannot be used.
    """
    if tls.cert and tls.key:
        pair = load_pair(tls.cert, tls.key)
        key = _private_key(pair.key, tls.key)
        chain = [each.public_bytes(Encoding.DER) for each in x509.load_pem_x509_certificates(pair.chain)]
        proof = Proof(certificates=tuple(chain))
    else:
        key = _own_key(state_dir / KEY_FILE)
        proof = Proof(public_key=public_bytes(key.public_key()))
    try:
        proof.key()
    except BadProof as error:
        raise ConfigError(f"{tls.cert} cannot be shown to other clients: {error}") from error
    return Signer(key, proof)


def check_own_key(tls: Tls, state_dir: Path) -> None:
    """Check the key in the state folder, if this client uses it.

    Raises:
        ConfigError: if it cannot be used.
    """
    path = state_dir / KEY_FILE
    if path.exists() and not (tls.cert and tls.key):
        _own_key(path)


class PeerCheck:
    """Checks whether a proof belongs to a client id.

    Args:
        client_id: of this client.
        own: what it shows itself.
        peers: the fingerprints of the only clients that may be peers; empty = any that the authority has certified.
        tls: of this client.
        revoked: the certificates that its authority has revoked.

    Raises:
        ConfigError: if tls.ca cannot be read.
    """

    def __init__(self, client_id: str, own: Proof, *, peers: Mapping[str, str], tls: Tls, revoked: Revocations) -> None:
        self._client_id, self._own = client_id, own
        self._peers, self._tls, self._revoked = peers, tls, revoked
        self._authorities = load_authorities(tls.ca) if tls.ca else []

    def __call__(self, name: str, proof: Proof) -> None:
        """Check that the proof belongs to the client of this name.

        Raises:
            BadProof: if it does not.
        """
        if name == self._client_id and proof == self._own:
            return
        if self._peers:
            self._check_pinned(name, proof)
        elif proof.certificates and self._tls.on:
            self._check_certified(name, proof)
        elif self._tls.on:
            raise BadProof("it shows a key without a certificate, and is not among privacy.peers")

    def _check_pinned(self, name: str, proof: Proof) -> None:
        pinned = self._peers.get(name)
        if pinned is None:
            raise BadProof("it is not among privacy.peers")
        if (found := fingerprint(proof.key())) != pinned:
            raise BadProof(f"privacy.peers names another fingerprint for it than {found}")

    def _check_certified(self, name: str, proof: Proof) -> None:
        chain = proof.chain()
        check_chain(chain, self._authorities)
        identity = identity_of(chain[0])
        if identity is None or (identity.role, identity.name) != (Role.CLIENT, name):
            raise BadProof("its certificate names another identity")
        if any(self._revoked.holds(serial_of(each)) for each in chain):
            raise BadProof("its certificate is revoked")


def _own_key(path: Path) -> PrivateKey:
    if not path.exists():
        pem = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        try:
            create_durably(path, with_digest(pem))
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    data = read_secretly(path)
    if data.startswith(b"-----"):  # of an earlier version, or by hand
        key = _private_key(data, path)
        try:
            replace_with_digest(path, data)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from error
        return key
    try:
        return _private_key(text_after_digest(data), path)
    except ValueError as error:
        raise ConfigError(f"{path} is damaged ({error}): restore it; other sites may have pinned it") from error


def _private_key(pem: bytes, path: Path) -> PrivateKey:
    try:
        key = load_pem_private_key(pem, None)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{path} holds no private key in PEM without a password: restore it; other sites may have pinned it"
        ) from error
    if not isinstance(key, PrivateKey):
        raise ConfigError(f"{path} holds a key that cannot sign: use ECDSA, RSA or Ed25519")
    return key
