"""Certificates as values: read from PEM, and judged."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from stat import S_IROTH

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from fedring.daemon.config import ConfigError
from fedring.rpc.identity import Identity, parse_uri


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and the private key that belongs to it, as PEM; the certificate as a value, too."""

    chain: bytes
    key: bytes
    certificate: x509.Certificate


def load_pair(cert: Path, key: Path) -> Pair:
    """What the two files hold; ConfigError if they do not belong together or anybody may read the key."""
    chain, private = read_secretly(cert, secret=False), read_secretly(key)
    certificate = _parse(chain, cert)[0]
    try:
        public = load_pem_private_key(private, None).public_key()
    except (ValueError, TypeError) as error:  # the second: it is encrypted
        raise ConfigError(f"{key} holds no private key in PEM without a password") from error
    if _bytes(public) != _bytes(certificate.public_key()):
        raise ConfigError(f"the key in {key} does not belong to the certificate in {cert}")
    return Pair(chain, private, certificate)


def load_authorities(path: Path) -> list[x509.Certificate]:
    """The certificates in the file, one or more; ConfigError if there is none."""
    return _parse(read_secretly(path, secret=False), path)


def read_secretly(path: Path, *, secret: bool = True) -> bytes:
    """The file's bytes; ConfigError if it cannot be read, or is a secret that any user of this host can read."""
    try:
        data = path.read_bytes()
        mode = path.stat().st_mode
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    if secret and mode & S_IROTH:
        raise ConfigError(f"every user of this host can read {path}: chmod 600 it")
    return data


def check_dates(certificate: x509.Certificate, what: str) -> timedelta:
    """How long the certificate is still valid; ConfigError if it is not now."""
    now = datetime.now(UTC)
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now < begins:
        raise ConfigError(f"the certificate in {what} is valid only from {begins:%Y-%m-%d %H:%M} UTC on")
    if now >= ends:
        raise ConfigError(f"the certificate in {what} expired at {ends:%Y-%m-%d %H:%M} UTC: renew it")
    return ends - now


def names_of(certificate: x509.Certificate) -> x509.SubjectAlternativeName:
    """The certificate's alternative names."""
    try:
        return certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return x509.SubjectAlternativeName([])


def identity_of(certificate: x509.Certificate) -> Identity | None:
    """Whose certificate it is; None if it names nobody that this system knows."""
    found = [parse_uri(uri) for uri in names_of(certificate).get_values_for_type(x509.UniformResourceIdentifier)]
    return next((identity for identity in found if identity), None)


def _parse(data: bytes, path: Path) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(data)
    except ValueError as error:
        raise ConfigError(f"{path} holds no certificate in PEM") from error


def _bytes(key: object) -> bytes:
    try:
        return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)  # type: ignore[attr-defined, no-any-return]  # a union of all kinds of keys
    except AttributeError as error:
        raise ConfigError("this kind of key is not supported: use ECDSA P-256 or RSA") from error
