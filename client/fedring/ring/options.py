"""What a worker can be told about its streams to its peers."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from fedring.rpc.address import HostOrEmpty, TcpAddress

_MIB = 1 << 20


class RingOptions(BaseSettings):
    """Each key can be set by the environment variable FEDRING_RING_<KEY>, too."""

    model_config = SettingsConfigDict(env_prefix="FEDRING_RING_", extra="forbid", frozen=True)

    listen: TcpAddress = Field(default="127.0.0.1:0", description="host:port to listen on; port 0 = any free one")
    advertise: HostOrEmpty = Field(default="", description="host or host:port that peers dial; empty = as listened on")
    unix_sockets: bool = Field(default=False, description="streams on one host take Unix sockets")
    shared_memory: bool = Field(
        default=True, description="ranks on one host talk past gRPC, and pass large payloads in memory that both see"
    )
    frame_checksum: bool = Field(
        default=False,
        description="CRC-32 of each payload, on all ranks or none; 28 ms per 100 MB, and no shared memory",
    )
    lost_after_seconds: float = Field(default=4.0, ge=1, le=3600, description="a silent peer is lost after this long")
    max_early_bytes: int = Field(
        default=1 << 30, ge=_MIB, description="most bytes kept for operations not yet started here"
    )
    wire_dtype: Literal["same", "fp16", "bf16"] = Field(
        default="same", description="what float32 values of an all_reduce travel as; they are added as float32"
    )
    tls_ca: Path | None = Field(default=None, description="PEM file: who signs the peers' certificates")
    tls_cert: Path | None = Field(
        default=None, description="PEM file: this worker's certificate; with it, TLS is mutual"
    )
    tls_key: Path | None = Field(default=None, description="PEM file: its private key")
    tls_name: str = Field(
        default="", description="the name in every peer's certificate; empty = the host that is dialled"
    )
    tls_members_only: bool = Field(
        default=False, description="let in, and dial, only the identities that the rendezvous names; fl-client sets it"
    )

    @model_validator(mode="after")
    def _complete_tls(self) -> Self:
        given = [self.tls_ca, self.tls_cert, self.tls_key]
        if any(given) and not all(given):
            raise ValueError("tls_ca, tls_cert and tls_key belong together: give all three or none")
        if self.tls_members_only and not all(given):
            raise ValueError("tls_members_only needs tls_ca, tls_cert and tls_key")
        return self
