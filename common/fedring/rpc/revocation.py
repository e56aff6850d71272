"""Lists of revoked certificates, signed by an authority (X.509 CRLs).

They are read again whenever their file changes. gRPC's Python API takes no such list, and shows a caller's certificate
only to the side that was called. So the handlers of a port look here at each call, and nobody can look at the
certificate of a port that they call.
"""

import logging
import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedring.daemon.config import ConfigError

if TYPE_CHECKING:  # cryptography is imported late: plaintext does not need it
    from cryptography import x509

log = logging.getLogger(__name__)

_PEM = re.compile(rb"-----BEGIN X509 CRL-----.*?-----END X509 CRL-----", re.DOTALL)

Serial = tuple[bytes, int]
"""The key of a certificate: the name of its issuer, in DER, and its serial number."""


def shown(context: Any) -> Serial | None:
    """Return the serial of the caller's certificate, or None."""
    (pem, *_) = context.auth_context().get("x509_pem_cert") or (b"",)
    return _serial_in(bytes(pem)) if pem else None


def serial_of(certificate: "x509.Certificate") -> Serial:
    """Return the serial of a certificate."""
    return certificate.issuer.public_bytes(), certificate.serial_number


def load_revoked(crl: Path, authorities: "Iterable[x509.Certificate]") -> frozenset[Serial]:
    """Return the serials of all certificates revoked in a PEM file.

    The end of a list's validity is not checked: an old list is better than none.

    Raises:
        ConfigError: If the file cannot be read, holds no list, or a list that none of the authorities has signed.
    """
    from cryptography import x509

    from fedring.rpc.certificates import read_secretly

    keys: list[Any] = [authority.public_key() for authority in authorities]
    lists = _PEM.findall(read_secretly(crl, secret=False))
    if not lists:
        raise ConfigError(f"{crl} holds no list of revoked certificates in PEM: make one with `flctl certs revoke`")
    revoked: set[Serial] = set()
    for pem in lists:
        try:
            parsed = x509.load_pem_x509_crl(pem)
        except ValueError as error:
            raise ConfigError(f"{crl} holds a damaged list of revoked certificates") from error
        # One list from elsewhere refuses the whole file: used in part, it would look as if all were in force.
        if not any(_signed(parsed, key) for key in keys):
            raise ConfigError(f"the list of revoked certificates in {crl} is not signed by an authority in tls.ca")
        revoked.update((parsed.issuer.public_bytes(), entry.serial_number) for entry in parsed)
    return frozenset(revoked)


class Revocations:
    """The revoked certificates, from a file that may change.

    Args:
        crl: The file of the lists; None = nothing is revoked.
        ca: The file of the authorities that sign them.

    Raises:
        ConfigError: If the file cannot be used now. Later, the last good content stays in use.
    """

    def __init__(self, crl: Path | None, ca: Path | None) -> None:
        self._crl, self._ca = crl, ca
        self._complained = False
        self._stamp = _stamp(crl) if crl else None
        self._revoked = self._load()

    def holds(self, serial: Serial | None) -> bool:
        """Return whether this certificate is revoked, as the file is now."""
        self.refresh()
        return serial in self._revoked

    def refresh(self) -> None:
        """Read the file if it has changed."""
        if self._crl is None:
            return
        try:
            stamp = _stamp(self._crl)
            if stamp == self._stamp:
                return
            revoked = self._load()
        except ConfigError as error:  # the file is being written: the next look reads it
            if not self._complained:
                log.warning("the list of revoked certificates cannot be used, so the last one stays in use: %s", error)
            self._complained = True
            return
        self._stamp, self._revoked, self._complained = stamp, revoked, False
        log.info("the list of revoked certificates in %s was read again: it has %d", self._crl, len(revoked))

    def _load(self) -> frozenset[Serial]:
        if self._crl is None or self._ca is None:
            return frozenset()
        from fedring.rpc.certificates import load_authorities

        return load_revoked(self._crl, load_authorities(self._ca))


def _stamp(path: Path) -> tuple[int, int, int]:
    """Return a value that differs once the file has changed."""
    try:
        found = path.stat()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    return found.st_mtime_ns, found.st_ino, found.st_size


def _signed(crl: "x509.CertificateRevocationList", key: Any) -> bool:
    try:
        return crl.is_signature_valid(key)
    except (TypeError, ValueError):  # the key is of another kind than the signature
        return False


@lru_cache(4096)
def _serial_in(pem: bytes) -> Serial:
    from cryptography import x509

    return serial_of(x509.load_pem_x509_certificate(pem))
