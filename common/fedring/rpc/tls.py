"""The daemons' table `tls`, and gRPC credentials made from it.

Files that have changed are read again, so that certificates can be replaced without a restart.
"""

import logging
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Self

import grpc
from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedring.daemon.config import ConfigError, FixedPath

log = logging.getLogger(__name__)

_SOON = timedelta(days=14)

Stamp = tuple[tuple[int, int], ...]


class Tls(BaseModel):
    """The PEM files of the certificates. Without any, calls go in plaintext."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cert: FixedPath | None = Field(
        default=None, description="this daemon's certificate, followed by any intermediate ones"
    )
    key: FixedPath | None = Field(default=None, description="its private key, without a password")
    ca: FixedPath | None = Field(
        default=None,
        description="the authority that signs the other side's certificates; on fl-server, callers must then show one",
    )
    crl: FixedPath | None = Field(
        default=None, description="the authority's list of revoked certificates, which is read again when it changes"
    )

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.cert is None) != (self.key is None):
            raise ValueError("tls.cert and tls.key belong together: give both or none")
        if self.crl and not self.ca:
            raise ValueError("tls.crl needs tls.ca, which has signed it")
        return self

    @property
    def on(self) -> bool:
        """Whether calls are encrypted."""
        return bool(self.cert or self.ca)

    @property
    def mutual(self) -> bool:
        """Whether both sides prove who they are."""
        return bool(self.cert and self.ca)

    def stamp(self) -> Stamp:
        """Return a value that differs once a file has changed.

        Raises:
            OSError: If a file is missing.
        """
        facts = [path.stat() for path in (self.cert, self.key, self.ca) if path]
        return tuple((fact.st_mtime_ns, fact.st_ino) for fact in facts)


PLAINTEXT = Tls()


def check_tls(tls: Tls) -> None:
    """Check that the certificates can be used now.

    A certificate that expires soon causes a warning in the log.

    Raises:
        ConfigError: If they cannot be used.
    """
    from fedring.rpc.certificates import (
        check_dates,
        load_authorities,
        load_pair,
    )  # imported late: plaintext does not need it

    if tls.cert and tls.key:
        left = check_dates(load_pair(tls.cert, tls.key).certificate, str(tls.cert))
        if left < _SOON:
            log.warning("the certificate in %s expires in %d days", tls.cert, left.days)
    if tls.ca:
        authorities = load_authorities(tls.ca)
        for authority in authorities:
            check_dates(authority, str(tls.ca))
        if tls.crl:
            from fedring.rpc.revocation import load_revoked

            load_revoked(tls.crl, authorities)


def ends_at(tls: Tls) -> float | None:
    """Return the expiry of the certificate on disk, or None.

    It is in seconds since 1970.
    """
    from fedring.rpc.certificates import load_authorities

    try:
        return load_authorities(tls.cert)[0].not_valid_after_utc.timestamp() if tls.cert else None
    except ConfigError:  # The file is being written.
        return None


def server_credentials(tls: Tls, on_handshake: Callable[[], None]) -> grpc.ServerCredentials:
    """Return credentials for a port of this daemon.

    Each handshake uses the files as they are then.

    Args:
        tls: The certificates. With `ca`, callers must have a certificate that it signed.
        on_handshake: Called before each handshake, on a thread of gRPC's.

    Raises:
        ConfigError: If the files cannot be used now.
    """
    renewed = _Renewed(tls)

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        on_handshake()
        return renewed()

    return grpc.dynamic_ssl_server_credentials(
        renewed.first,
        fetch,  # type: ignore[arg-type]  # the stubs omit None, which means no change
        require_client_authentication=tls.ca is not None,
    )


def channel_credentials(tls: Tls, token: str = "") -> grpc.ChannelCredentials:
    """Return credentials for a new channel.

    They are made from the files as they are now.

    Args:
        tls: The certificates.
        token: Sent with every call, unless it is empty.

    Raises:
        ConfigError: If the files cannot be used.
    """
    from fedring.rpc.certificates import load_pair, read_secretly

    pair = load_pair(tls.cert, tls.key) if tls.cert and tls.key else None
    roots = read_secretly(tls.ca, secret=False) if tls.ca else None
    credentials = grpc.ssl_channel_credentials(roots, pair.key if pair else None, pair.chain if pair else None)
    if not token:
        return credentials
    return grpc.composite_channel_credentials(credentials, grpc.access_token_call_credentials(token))


def read_token(path: Path) -> str:
    """Return the token in a file.

    Raises:
        ConfigError: If the file holds no token, cannot be read, or can be read by any user of this host.
    """
    from fedring.rpc.certificates import read_secretly

    token = read_secretly(path).decode("ascii", "replace").strip()
    if not token.isprintable() or not token or " " in token:
        raise ConfigError(f"{path} must hold one token and nothing else")
    return token


class _Renewed:
    """Returns the certificates if their files have changed, else None.

    A change is one since the last call.
    """

    def __init__(self, tls: Tls) -> None:
        self._tls = tls
        self._complained = False
        try:
            self._stamp = tls.stamp()
        except OSError as error:
            raise ConfigError(f"cannot read {error.filename}: {error.strerror}") from error
        self.first = _configuration(tls)

    def __call__(self) -> grpc.ServerCertificateConfiguration | None:
        try:
            stamp = self._tls.stamp()
            if stamp == self._stamp:
                return None
            configuration = _configuration(self._tls)
        except (OSError, ConfigError) as error:  # The files are being written: the next handshake looks again.
            if not self._complained:
                log.warning("the new certificate cannot be used, so the old one stays in use: %s", error)
            self._complained = True
            return None
        self._stamp, self._complained = stamp, False
        log.info("the certificate in %s has changed and was read again", self._tls.cert)
        return configuration


def _configuration(tls: Tls) -> grpc.ServerCertificateConfiguration:
    from fedring.rpc.certificates import load_pair, read_secretly

    if tls.cert is None or tls.key is None:
        raise ConfigError("a server needs tls.cert and tls.key")
    pair = load_pair(tls.cert, tls.key)
    roots = read_secretly(tls.ca, secret=False) if tls.ca else None
    return grpc.ssl_server_certificate_configuration([(pair.key, pair.chain)], root_certificates=roots)
