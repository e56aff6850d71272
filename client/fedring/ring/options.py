"""The options of a worker's links to its peers."""

import os
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from fedring.rpc.address import HostOrEmpty, TcpAddress

MAX_STREAMS = 16
"""The largest number of streams from one worker to another."""

_MIB = 1 << 20
_PREFIX = "FEDRING_RING_"


class RingOptions(BaseSettings):
    """The options of a worker's links.

    The environment variable FEDRING_RING_<KEY> sets a key that is not given. Unknown keys and variables are errors.
    """

    model_config = SettingsConfigDict(env_prefix=_PREFIX, extra="forbid", frozen=True)

    listen: TcpAddress = Field(default="127.0.0.1:0", description="host:port to listen on; port 0 = any free one")
    advertise: HostOrEmpty = Field(default="", description="host or host:port that peers dial; empty = as listened on")
    local_transport: bool = Field(
        default=True,
        description="ranks on one host use a Unix socket and shared memory between them; false = gRPC streams only",
    )
    streams: int = Field(
        default=1,
        ge=1,
        le=MAX_STREAMS,
        description="gRPC streams to each peer on another host, each with its own connection; several fill a long line "
        "better",
    )
    frame_checksum: bool = Field(
        default=False,
        description="CRC-32 of each frame, on all ranks or none; 28 ms per 100 MB, and gRPC streams only",
    )
    lost_after_seconds: float = Field(default=4.0, ge=1, le=3600, description="a silent peer is lost after this long")
    max_early_bytes: int = Field(
        default=1 << 30, ge=_MIB, description="most bytes kept for operations that have not started here yet"
    )
    wire_dtype: Literal["same", "fp16", "bf16"] = Field(
        default="same", description="dtype in which an all_reduce sends float32 values; they are added as float32"
    )
    tls_ca: Path | None = Field(default=None, description="PEM file: the authority that signs the peers' certificates")
    tls_cert: Path | None = Field(
        default=None, description="PEM file: this worker's certificate; with it, TLS is mutual"
    )
    tls_key: Path | None = Field(default=None, description="PEM file: the certificate's private key")
    tls_crl: Path | None = Field(
        default=None,
        description="PEM file: the authority's list of revoked certificates; peers that show one are refused",
    )
    tls_name: str = Field(default="", description="name in every peer's certificate; empty = the host that is dialled")
    tls_members_only: bool = Field(
        default=False,
        description="accept, and dial, only the identities that the rendezvous names; fl-client sets it",
    )

    @model_validator(mode="before")
    @classmethod
    def _known_variables(cls, given: Any) -> Any:
        """Refuse unknown environment variables.

        pydantic-settings would ignore them, and with them perhaps a safer choice.
        """
        for name in os.environ:
            if name.upper().startswith(_PREFIX) and name[len(_PREFIX) :].lower() not in cls.model_fields:
                keys = ", ".join(cls.model_fields)
                raise ValueError(f"environment variable {name} sets no option of the ring; valid keys: {keys}")
        return given

    @model_validator(mode="after")
    def _complete_tls(self) -> Self:
        given = [self.tls_ca, self.tls_cert, self.tls_key]
        if any(given) and not all(given):
            raise ValueError("tls_ca, tls_cert and tls_key belong together: give all three or none")
        if self.tls_crl and not all(given):
            raise ValueError("tls_crl needs tls_ca, tls_cert and tls_key")
        if self.tls_members_only and not all(given):
            raise ValueError("tls_members_only needs tls_ca, tls_cert and tls_key")
        return self
