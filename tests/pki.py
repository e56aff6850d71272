"""Certificates for tests: an authority as `flctl certs` makes it, and certificates as nobody should make them."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fedring.ctl.admin.authority import load_authority, write_pair
from fedring.ctl.main import main
from fedring.rpc.identity import Role
from fedring.rpc.tls import Tls


class Pki:
    """An authority in a folder; it has signed server.crt and operator.crt."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        flctl("certs", "init", folder)

    def issue(self, *names: str, role: Role = Role.CLIENT) -> None:
        """The files of each name are there."""
        for name in names:
            flctl("certs", "issue", self.folder, name, "--role", role)

    def tls(self, name: str, *, ca: "Pki | None" = None) -> Tls:
        """What its owner shows, who trusts `ca`."""
        trusted = (ca or self).folder / "ca.crt"
        return Tls(cert=self.folder / f"{name}.crt", key=self.folder / f"{name}.key", ca=trusted)

    def trust(self) -> Tls:
        """What somebody without a certificate has."""
        return Tls(ca=self.folder / "ca.crt")

    def table(self, name: str) -> dict[str, str]:
        """As tls(), for a daemon's configuration."""
        return self.tls(name).model_dump(mode="json")

    def sign(self, name: str, *uris: str, ended: bool = False) -> None:
        """A certificate with these URIs alone; if it has ended, an hour ago."""
        authority = load_authority(self.folder)
        key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
        end = now - timedelta(hours=1) if ended else now + timedelta(hours=1)
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(uri) for uri in uris]
        certificate = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(authority.certificate.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=2))
            .not_valid_after(end)
            .add_extension(x509.SubjectAlternativeName([*names, x509.DNSName(name)]), critical=False)
            .sign(authority.key, hashes.SHA256())
        )
        write_pair(self.folder, name, certificate, key)


def flctl(*arguments: object) -> None:
    """It has done what it was told to."""
    code = main([str(argument) for argument in arguments])
    assert code == 0, f"flctl {arguments} ended with {code}"
