"""Certificates and private keys: read from PEM files and checked."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from stat import S_IROTH

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from fedring.daemon.config import ConfigError
from fedring.rpc.identity import Identity, parse_uri


@dataclass(frozen=True, slots=True)
class CertifiedKey:
    """A private key and the certificate that belongs to it."""

    chain: bytes  # PEM: the certificate, followed by any intermediate ones
    key: bytes  # PEM
    certificate: x509.Certificate  # the first of the chain


def load_pair(cert: Path, key: Path) -> CertifiedKey:
    """Read a certificate and its private key.

    Raises:
        ConfigError: If a file cannot be read, has other content, or if any user of this host can read the key; or if
            the key belongs to another certificate.
    """
    chain, private = read_secretly(cert, secret=False), read_secretly(key)
    certificate = _parse(chain, cert)[0]
    try:
        public = load_pem_private_key(private, None).public_key()
    except (ValueError, TypeError) as error:  # TypeError: the key is encrypted
        raise ConfigError(f"{key} holds no private key in PEM without a password") from error
    if _bytes(public) != _bytes(certificate.public_key()):
        raise ConfigError(f"the key in {key} does not belong to the certificate in {cert}")
    return CertifiedKey(chain, private, certificate)


def load_authorities(path: Path) -> list[x509.Certificate]:
    """Return the certificates in a PEM file, at least one.

    Raises:
        ConfigError: If the file cannot be read or holds none.
    """
    return _parse(read_secretly(path, secret=False), path)


def read_secretly(path: Path, *, secret: bool = True) -> bytes:
    """Return the content of a file.

    Args:
        path: The file.
        secret: Whether it holds a secret, so that other users of this host must not be able to read it.

    Raises:
        ConfigError: If it cannot be read, or is a secret that any user of this host can read.
    """
    try:
        data = path.read_bytes()
        mode = path.stat().st_mode
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    if secret and mode & S_IROTH:
        raise ConfigError(f"every user of this host can read {path}: chmod 600 it")
    return data


def check_dates(certificate: x509.Certificate, what: str) -> timedelta:
    """Return the time for which a certificate is still valid.

    Args:
        certificate: The certificate.
        what: Its name in an error, such as the name of its file.

    Raises:
        ConfigError: If it is not valid yet, or has expired.
    """
    now = datetime.now(UTC)
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now < begins:
        raise ConfigError(
            f"the certificate in {what} is not valid before {begins:%Y-%m-%d %H:%M} UTC: check this host's clock"
        )
    if now >= ends:
        raise ConfigError(f"the certificate in {what} expired at {ends:%Y-%m-%d %H:%M} UTC: renew it")
    return ends - now


def names_of(certificate: x509.Certificate) -> x509.SubjectAlternativeName:
    """Return the alternative names in a certificate; empty if it has none."""
    try:
        return certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return x509.SubjectAlternativeName([])


def identity_of(certificate: x509.Certificate) -> Identity | None:
    """Return the identity in a certificate, or None.

    It is None if the certificate holds no `fedring://` URI.
    """
    found = [parse_uri(uri) for uri in names_of(certificate).get_values_for_type(x509.UniformResourceIdentifier)]
    return next((identity for identity in found if identity), None)


def _parse(data: bytes, path: Path) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(data)
    except ValueError as error:
        raise ConfigError(f"{path} holds no certificate in PEM") from error


def _bytes(key: object) -> bytes:
    try:
        return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)  # type: ignore[attr-defined, no-any-return]  # the type is a union of all kinds of keys
    except AttributeError as error:
        raise ConfigError("this kind of key is not supported: use ECDSA P-256 or RSA") from error
