"""A throw-away certificate authority, and one certificate that all ranks of a benchmark share."""

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_Key = ec.EllipticCurvePrivateKey


def write_certificates(folder: Path) -> dict[str, str]:
    """The environment of a rank that speaks mutual TLS with files in `folder`, valid for an hour."""
    authority, peer = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    root = _certificate("authority", authority, "authority", authority, is_authority=True)
    leaf = _certificate("peer", peer, "authority", authority, is_authority=False)
    files = {"ca": _pem(root), "cert": _pem(leaf), "key": _private(peer)}
    for name, content in files.items():
        (folder / f"{name}.pem").write_bytes(content)
    return {f"FEDRING_RING_TLS_{name.upper()}": str(folder / f"{name}.pem") for name in files} | {
        "FEDRING_RING_TLS_NAME": "peer"
    }


def _certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: str,
    issuer_key: ec.EllipticCurvePrivateKey,
    *,
    is_authority: bool,
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    alternative = x509.SubjectAlternativeName(
        [x509.DNSName(name), x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    )
    return (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(_name(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .add_extension(alternative, critical=False)
        .sign(issuer_key, hashes.SHA256())
    )


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _private(key: _Key) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
