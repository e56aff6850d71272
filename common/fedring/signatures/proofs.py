"""Signatures that prove a client's identity.

Keys make them, and certificates name the owners of keys.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePrivateKey, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, RSAPublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_der_public_key

PrivateKey = EllipticCurvePrivateKey | RSAPrivateKey | Ed25519PrivateKey
PublicKey = EllipticCurvePublicKey | RSAPublicKey | Ed25519PublicKey

MAX_CERTIFICATES = 4
MAX_CHAIN_BYTES = 8192
MAX_KEY_BYTES = 1024
MAX_SIGNATURE_BYTES = 1024


class BadProof(Exception):
    """A proof of identity fails.

    A key, a certificate or a signature does not prove enough; the text is a clause that gives the reason.
    """


@dataclass(frozen=True, slots=True)
class Proof:
    """A client's proof of identity: certificates, or only a public key.

    All are in DER; the client's own certificate is the first.
    """

    certificates: tuple[bytes, ...] = ()
    public_key: bytes = b""

    def key(self) -> PublicKey:
        """Return the public key that checks the client's signatures.

        Raises:
            BadProof: if there is none of a kind that is supported, or the proof is too long.
        """
        if len(self.certificates) > MAX_CERTIFICATES or sum(map(len, self.certificates)) > MAX_CHAIN_BYTES:
            raise BadProof("its certificates are too long")
        if bool(self.certificates) == bool(self.public_key) or len(self.public_key) > MAX_KEY_BYTES:
            raise BadProof("it must show either certificates or a public key")
        key: object
        try:
            if self.certificates:
                key = x509.load_der_x509_certificate(self.certificates[0]).public_key()
            else:
                key = load_der_public_key(self.public_key)
        except Exception as error:  # the parser raises errors of many kinds
            raise BadProof("its certificate or public key cannot be read") from error
        if not isinstance(key, EllipticCurvePublicKey | RSAPublicKey | Ed25519PublicKey):
            raise BadProof("its key is neither ECDSA, RSA nor Ed25519")
        return key

    def chain(self) -> list[x509.Certificate]:
        """Return the certificates; BadProof if one cannot be read."""
        try:
            return [x509.load_der_x509_certificate(each) for each in self.certificates]
        except Exception as error:  # as above
            raise BadProof("its certificate cannot be read") from error


def fingerprint(key: PublicKey | PrivateKey) -> str:
    """Return a key's fingerprint, 64 hexadecimal digits.

    It is SHA-256 of the SubjectPublicKeyInfo in DER, by which people compare keys.
    """
    public = key if isinstance(key, PublicKey) else key.public_key()
    return hashlib.sha256(public_bytes(public)).hexdigest()


def public_bytes(key: PublicKey) -> bytes:
    """Return a public key as SubjectPublicKeyInfo in DER."""
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def sign(key: PrivateKey, text: bytes) -> bytes:
    """Return a signature of a text.

    It is ECDSA or RSA (PKCS #1 v1.5) with SHA-256, or Ed25519, as the key is.
    """
    if isinstance(key, EllipticCurvePrivateKey):
        return key.sign(text, ECDSA(SHA256()))
    return key.sign(text, PKCS1v15(), SHA256()) if isinstance(key, RSAPrivateKey) else key.sign(text)


def verify(key: PublicKey, signature: bytes, text: bytes) -> None:
    """Check that a signature is that of a text.

    Raises:
        BadProof: if it is not.
    """
    if len(signature) > MAX_SIGNATURE_BYTES:
        raise BadProof("its signature is too long")
    try:
        if isinstance(key, EllipticCurvePublicKey):
            key.verify(signature, text, ECDSA(SHA256()))
        elif isinstance(key, RSAPublicKey):
            key.verify(signature, text, PKCS1v15(), SHA256())
        else:
            key.verify(signature, text)
    except InvalidSignature:
        raise BadProof("its signature is not that of its key") from None


def check_chain(chain: Sequence[x509.Certificate], authorities: Sequence[x509.Certificate]) -> None:
    """Check that certificates lead to one of the authorities.

    All must be valid now, and none out of place. The first is the client's own.

    Raises:
        BadProof: if it does not.
    """
    now = datetime.now(UTC)
    for place, certificate in enumerate(chain):
        if not certificate.not_valid_before_utc <= now < certificate.not_valid_after_utc:
            raise BadProof("its certificate is not valid now")
        if place and not _is_authority(certificate):
            raise BadProof("its certificate was issued by one that is no authority's")
        if any(_issued(certificate, authority) for authority in authorities):
            return
        if place + 1 < len(chain) and not _issued(certificate, chain[place + 1]):
            raise BadProof("its certificates do not follow from one another")
    raise BadProof("its certificate is of an authority that is not known here")


def _is_authority(certificate: x509.Certificate) -> bool:
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except Exception:  # noqa: BLE001  # it has none, or the parser, which reads extensions only now, fails in its way
        return False


def _issued(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except Exception:  # noqa: BLE001  # names, keys and signatures that do not fit raise errors of many kinds
        return False
    return True
