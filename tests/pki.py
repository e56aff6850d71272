"""Certificates for tests: an authority as `flctl certs` makes it, and certificates that it would not make."""

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
    """An authority in a folder, which has signed server.crt and operator.crt."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        flctl("certs", "init", folder)

    def issue(self, *names: str, role: Role = Role.CLIENT) -> None:
        """Make a certificate and a key for each name."""
        for name in names:
            flctl("certs", "issue", self.folder, name, "--role", role)

    def tls(self, name: str, *, ca: "Pki | None" = None) -> Tls:
        """Return the TLS settings of the certificate's owner, who trusts `ca`, by default this authority."""
        trusted = (ca or self).folder / "ca.crt"
        return Tls(cert=self.folder / f"{name}.crt", key=self.folder / f"{name}.key", ca=trusted)

    def trust(self) -> Tls:
        """Return the TLS settings of somebody without a certificate who trusts this authority."""
        return Tls(ca=self.folder / "ca.crt")

    def table(self, name: str) -> dict[str, str]:
        """Return `tls(name)` as a table of a daemon's configuration."""
        return self.tls(name).model_dump(mode="json")

    def sign(self, name: str, *uris: str, ended: bool = False) -> None:
        """Make a certificate with only these URIs; if `ended`, it expired an hour ago."""
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
    """Run flctl in this process; it must succeed."""
    code = main([str(argument) for argument in arguments])
    assert code == 0, f"flctl {arguments} ended with {code}"
