"""A small certificate authority.

It signs certificates, and writes each with its key as a pair of files.
"""

import ipaddress
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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

from fedring.control.failure import Failure
from fedring.daemon.config import ConfigError
from fedring.daemon.durable import make_durable, sync
from fedring.daemon.lock import held_alone
from fedring.rpc.certificates import load_authorities, load_pair
from fedring.rpc.identity import Identity, Role, peer_name, uri_of

_EARLIER = timedelta(minutes=5)  # certificates begin earlier, since clocks of hosts differ
_BOTH = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
_USES = {
    Role.SERVER: _BOTH,  # it is its own client when it checks its health
    Role.OPERATOR: [ExtendedKeyUsageOID.CLIENT_AUTH],
    Role.CLIENT: _BOTH,  # other workers of its group connect to it
}

CRL = "ca.crl"
"""The authority's list of revoked certificates, in its folder."""

_ISSUED = "issued.pem"  # all certificates of the authority, also those that were renewed

_Key = ec.EllipticCurvePrivateKey


@dataclass(frozen=True, slots=True)
class Authority:
    """The certificate and the key of an authority, with which it signs."""

    certificate: x509.Certificate
    key: _Key

    def sign(self, identity: Identity, names: Sequence[x509.GeneralName], days: int) -> tuple[x509.Certificate, _Key]:
        """Make a new key, and a certificate for it.

        Args:
            identity: Whose certificate it is, with a role.
            names: Host names and addresses in addition to the identity's URI.
            days: Days of validity; it ends with the authority's certificate at the latest.
        """
        if identity.role is None:
            raise ValueError(f"the identity {identity.name!r} has no role: a certificate needs one")
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
        """Return the end of validity.

        It is at the latest that of the authority's certificate.
        """
        return min(datetime.now(UTC) + timedelta(days=days), self.certificate.not_valid_after_utc)

    def revoke(self, serials: Iterable[int], since: Mapping[int, datetime]) -> bytes:
        """Return the list of revoked certificates, in PEM.

        Args:
            serials: The serial numbers of all certificates to revoke now.
            since: Those that were revoked before, and when.
        """
        now = datetime.now(UTC)
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self.certificate.subject)
            .last_update(now)
            .next_update(self.certificate.not_valid_after_utc)  # the list changes when somebody is revoked, not before
        )
        for serial, at in {**dict.fromkeys(serials, now), **since}.items():
            entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(at).build()
            builder = builder.add_revoked_certificate(entry)
        return builder.sign(self.key, hashes.SHA256()).public_bytes(Encoding.PEM)


def make_authority(days: int, key: _Key | None = None) -> Authority:
    """Make an authority, with a new key or an earlier one.

    With the key of an earlier authority, certificates that it has signed stay valid.
    """
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


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Let no other flctl change an authority's folder meanwhile.

    Raises:
        Failure: Nothing can be written there.
    """
    try:
        # Of all its files, only this one is never replaced. The folder itself could be a daemon's, which has locked it.
        fd = os.open(folder / _ISSUED, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise _unwritable(folder, error) from error
    with held_alone(fd):
        yield


def load_authority(folder: Path) -> Authority:
    """Load the authority from ca.crt and ca.key in the folder.

    Raises:
        Failure: The folder has no authority.
        ConfigError: A file cannot be used.
    """
    cert, key = folder / "ca.crt", folder / "ca.key"
    if not (cert.exists() and key.exists()):
        raise Failure(f"there is no authority in {folder}: make one with `flctl certs init {folder}`")
    pair = load_pair(cert, key)
    private = load_pem_private_key(pair.key, None)
    if not isinstance(private, _Key):
        raise ConfigError(f"{key} is not an elliptic-curve key, as `flctl certs init` makes it")
    return Authority(pair.certificate, private)


def issued(folder: Path) -> list[x509.Certificate]:
    """Return all certificates known to be issued by a folder's authority.

    Its own is not among them.

    Raises:
        ConfigError: A file cannot be used.
    """
    files = [path for path in (folder / _ISSUED, *folder.glob("*.crt")) if path.exists() and path.name != "ca.crt"]
    found = [certificate for path in files for certificate in load_authorities(path)]
    return list({certificate.serial_number: certificate for certificate in found}.values())


def revoked(folder: Path) -> dict[int, datetime]:
    """Return the revoked serial numbers, with the time of each revocation.

    Raises:
        Failure: The list cannot be read.
    """
    path = folder / CRL
    if not path.exists():
        return {}
    try:
        entries = x509.load_pem_x509_crl(path.read_bytes())
    except (OSError, ValueError) as error:
        raise Failure(f"{path} cannot be read as a list of revoked certificates: {error}") from error
    return {entry.serial_number: entry.revocation_date_utc for entry in entries}


def names_for(identity: Identity, hosts: Sequence[str]) -> list[x509.GeneralName]:
    """Return the names of a certificate in addition to its URI.

    They are the hosts, and the name by which peers know a client.
    """
    names: list[x509.GeneralName] = [host_name(host) for host in hosts]
    if identity.role is Role.CLIENT:
        names.append(x509.DNSName(peer_name(str(identity))))
    return names


def host_name(host: str) -> x509.GeneralName:
    """Return a host's name or address as an entry of a certificate.

    Raises:
        Failure: It is neither a name nor an address.
    """
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        pass
    try:
        if not host or ":" in host or "/" in host:
            raise ValueError
        return x509.DNSName(host)
    except ValueError as error:
        raise Failure(f"{host!r} is neither a host's name nor an address: give it without a port") from error


def write_pair(folder: Path, name: str, certificate: x509.Certificate, key: _Key, *, replace: bool = False) -> None:
    """Write `name`.crt and `name`.key, and note the issued certificate.

    Raises:
        Failure: A file exists and `replace` is not set, or a file cannot be written.
    """
    files = {
        folder / f"{name}.key": (key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), 0o600),
        folder / f"{name}.crt": (certificate.public_bytes(Encoding.PEM), 0o644),
    }
    for path in files:
        if path.exists() and not replace:
            raise Failure(f"{path} exists already: remove it, or use `flctl certs renew`")
    try:
        with (folder / _ISSUED).open("ab") as history:  # first, so that every certificate can be revoked
            history.write(certificate.public_bytes(Encoding.PEM))
            make_durable(history)
        for path, (data, mode) in files.items():
            _write(path.with_name(f"{path.name}.new"), data, mode)
        for path in files:  # a daemon that reads them in between sees that they do not match, and reads them again
            path.with_name(f"{path.name}.new").replace(path)
        sync(folder)
    except OSError as error:
        raise _unwritable(folder, error) from error


def replace_file(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write a file that others may be reading, at once and durably.

    Raises:
        Failure: It cannot be written.
    """
    new = path.with_name(f"{path.name}.new")
    try:
        _write(new, data, mode)
        new.replace(path)
        sync(path.parent)
    except OSError as error:
        raise _unwritable(path.parent, error) from error


def _unwritable(folder: Path, error: OSError) -> Failure:
    return Failure(f"cannot write to {folder}: {error.strerror}")


def _write(path: Path, data: bytes, mode: int) -> None:
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
        file.write(data)
        make_durable(file)


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
