"""A small certificate authority: certificates are made, renewed and written, never half."""

import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedring.ctl.failure import Failure
from fedring.daemon.config import ConfigError
from fedring.rpc.certificates import load_pair
from fedring.rpc.identity import Identity, Role, peer_name, uri_of

_EARLIER = timedelta(minutes=5)  # clocks differ
_BOTH = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
_USES = {
    Role.SERVER: _BOTH,  # it asks itself for its health
    Role.OPERATOR: [ExtendedKeyUsageOID.CLIENT_AUTH],
    Role.CLIENT: _BOTH,  # it serves its peers
}

_Key = ec.EllipticCurvePrivateKey


@dataclass(frozen=True, slots=True)
class Authority:
    """Who signs: its own certificate and its key."""

    certificate: x509.Certificate
    key: _Key

    def sign(self, identity: Identity, names: Sequence[x509.GeneralName], days: int) -> tuple[x509.Certificate, _Key]:
        """A certificate for the identity, with further names, and a new key that belongs to it."""
        if identity.role is None:
            raise ValueError("a certificate needs a role")
        key = ec.generate_private_key(ec.SECP256R1())
        uri = x509.UniformResourceIdentifier(uri_of(identity.role, identity.name))
        builder = _builder(identity.name, key.public_key(), self._end(days))
        certificate = (
            builder.issuer_name(self.certificate.subject)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([uri, *names]), critical=False)
            .add_extension(x509.ExtendedKeyUsage(_USES[identity.role]), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()),
                critical=False,
            )
            .sign(self.key, hashes.SHA256())
        )
        return certificate, key

    def _end(self, days: int) -> datetime:
        """No certificate outlives its authority's."""
        return min(datetime.now(UTC) + timedelta(days=days), self.certificate.not_valid_after_utc)


def make_authority(days: int, key: _Key | None = None) -> Authority:
    """A new authority; with the key of an old one, what that has signed stays valid."""
    key = key or ec.generate_private_key(ec.SECP256R1())
    builder = _builder("fedring authority", key.public_key(), datetime.now(UTC) + timedelta(days=days))
    usage = dict.fromkeys(
        ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"), False
    )
    certificate = (
        builder.issuer_name(_name("fedring authority"))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(
            x509.KeyUsage(**usage, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False),
            critical=True,
        )
        .sign(key, hashes.SHA256())
    )
    return Authority(certificate, key)


def load_authority(folder: Path) -> Authority:
    """The authority whose files are in the folder; Failure if there is none."""
    cert, key = folder / "ca.crt", folder / "ca.key"
    if not (cert.exists() and key.exists()):
        raise Failure(f"there is no authority in {folder}: make one with `flctl certs init {folder}`")
    pair = load_pair(cert, key)
    private = load_pem_private_key(pair.key, None)
    if not isinstance(private, _Key):
        raise ConfigError(f"{key} is no key of flctl's")
    return Authority(pair.certificate, private)


def names_for(identity: Identity, hosts: Sequence[str]) -> list[x509.GeneralName]:
    """The names beside the identity: a server's hosts, a client's name among its peers."""
    names: list[x509.GeneralName] = [host_name(host) for host in hosts]
    if identity.role is Role.CLIENT:
        names.append(x509.DNSName(peer_name(str(identity))))
    return names


def host_name(host: str) -> x509.GeneralName:
    """A host's name or address, as certificates have it; Failure if it is neither."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        pass
    try:
        if not host or ":" in host or "/" in host:
            raise ValueError
        return x509.DNSName(host)
    except ValueError as error:
        raise Failure(f"{host!r} is neither a host's name nor its address; a port does not belong to it") from error


def write_pair(folder: Path, name: str, certificate: x509.Certificate, key: _Key, *, replace: bool = False) -> None:
    """`name`.crt and `name`.key are in the folder; Failure if one was there before, unless it is to be replaced."""
    files = {
        folder / f"{name}.key": (key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), 0o600),
        folder / f"{name}.crt": (certificate.public_bytes(Encoding.PEM), 0o644),
    }
    for path in files:
        if path.exists() and not replace:
            raise Failure(f"{path} is there already: remove it, or use `flctl certs renew`")
    try:
        for path, (data, mode) in files.items():
            _write(path.with_name(f"{path.name}.new"), data, mode)
        for path in files:  # a daemon that looks in between sees that they do not match, and looks again
            path.with_name(f"{path.name}.new").replace(path)
    except OSError as error:
        raise Failure(f"cannot write {folder}: {error.strerror}") from error


def _write(path: Path, data: bytes, mode: int) -> None:
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _builder(name: str, public: ec.EllipticCurvePublicKey, end: datetime) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.now(UTC) - _EARLIER)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
