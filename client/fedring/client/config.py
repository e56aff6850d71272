"""The configuration of fl-client."""

import re
import socket
from pathlib import Path
from typing import Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    model_validator,
)
from pydantic_settings import BaseSettings, SettingsConfigDict

from fedring.client.consent.approval import Approval
from fedring.client.consent.audit import AuditTable
from fedring.client.policy.privacy import SitePolicy
from fedring.daemon.config import FixedPath
from fedring.rpc.address import Address, AddressOrEmpty, HostOrEmpty, TcpAddress, TcpAddressOrEmpty
from fedring.rpc.channel import encrypts, is_loopback
from fedring.rpc.metrics import check_metrics_address
from fedring.rpc.tls import Tls
from fedring.train.jobs.labels import Labels


def _own_name() -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:128] or "client"


class CodeLimits(BaseModel):
    """The table [training] of fl-client.

    It says where the code of jobs runs, and its limits.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    process: bool = Field(
        False,
        description="whether the code of jobs runs in a process of its own, which fl-client can end; "
        "only for jobs of the mode federated",
    )
    max_seconds: NonNegativeFloat = Field(
        0.0, description="seconds after which a load, a training or an evaluation is ended, with process; 0 = no limit"
    )
    max_memory_bytes: NonNegativeInt = Field(
        0, description="resident memory at which that process is ended, in bytes, with process; 0 = no limit"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.process and (self.max_seconds or self.max_memory_bytes):
            raise ValueError("max_seconds and max_memory_bytes are limits of a process: set training.process = true")
        return self


class ClientConfig(BaseSettings):
    """The configuration of fl-client.

    It is read from a file, the environment and the command line. Unknown keys are errors.
    """

    model_config = SettingsConfigDict(
        env_prefix="FEDRING_CLIENT_", env_nested_delimiter="__", extra="forbid", frozen=True, protected_namespaces=()
    )

    server: Address = Field("127.0.0.1:8443", description="the address of fl-server, host:port")
    other_servers: list[Address] = Field(
        [],
        max_length=8,
        description="more addresses of the same server, or of servers that share its state: asked in turn while one "
        "cannot be reached",
    )
    insecure: bool = Field(False, description="allow plaintext to and from other hosts")
    tls: Tls = Field(Tls(), description="certificates; `ca` signs those of the server and of the other workers")
    token_file: FixedPath | None = Field(None, description="file with a bearer token (flctl token create)")
    health_listen: AddressOrEmpty = Field(
        "", description="address where health checks are answered, in plaintext; empty = none"
    )
    client_id: str = Field(
        default_factory=_own_name,
        pattern=r"^[A-Za-z0-9._-]{1,128}$",
        description="stable name, unique in the fleet: 1 to 128 of A-Z a-z 0-9 . _ -",
    )
    labels: Labels = Field(
        default_factory=dict, description='what jobs can choose clients by, such as { site = "eu" }; at most 16'
    )
    state_dir: FixedPath = Field(
        Path("fl-client-state"),
        description="folder for the residual, private tensors, an unsent update, checkpoints, the secret of the "
        "session, and the account of privacy",
    )
    trusted: list[str] = Field(
        ["fedring"],
        description="what jobs may name: fedring, torchvision (its models), modules with marked functions, or "
        '"module:attribute as kind" (docs/clients.md)',
    )

    private: list[str] = Field(
        [],
        description="globs over the names of parameters and buffers that never leave this client, whatever a job says",
    )

    privacy: SitePolicy = Field(
        SitePolicy.model_validate({}), description="what this client demands of the jobs that it takes part in"
    )

    approval: Approval = Field(
        Approval.model_validate({}), description="which jobs a person at this client approves first"
    )

    audit: AuditTable = Field(AuditTable.model_validate({}), description="a chained log of what this client does")

    data_root: FixedPath | None = Field(None, description="folder of the data sets")
    download: bool = Field(False, description="let data sets, and weights of torchvision's models, be downloaded")
    partition_index: NonNegativeInt = Field(
        0, description="this client's part of a shared data set, 0 to partition_count - 1"
    )
    partition_count: PositiveInt = Field(1, description="number of parts of the shared data set; 1 = all of it")

    model: str = Field("", description="module:attribute to use instead of the job's model")
    data: str = Field("", description="module:attribute to use instead of the job's data")
    loss: str = Field("", description="module:attribute to use instead of the job's loss")
    optimizer: str = Field("", description="module:attribute to use instead of the job's optimizer")
    trainer: str = Field("", description="module:attribute to use instead of the job's trainer")
    evaluator: str = Field("", description="module:attribute to use instead of the job's evaluator")

    max_jobs: int = Field(
        1,
        ge=0,
        le=64,
        description="jobs in whose rounds this client takes part at once, training in turns; 0 = none: it is "
        "in session, and never asked",
    )
    training: CodeLimits = Field(
        CodeLimits.model_validate({}), description="where the code of jobs runs, and what it may use"
    )

    peer_listen: TcpAddress = Field(
        "127.0.0.1:0", description="address where this worker listens for others of its group; port 0 = any"
    )
    peer_address: HostOrEmpty = Field(
        "", description="host or host:port where the others can reach it; empty = as in peer_listen"
    )

    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")
    threads: NonNegativeInt = Field(0, description="threads for training; 0 = cores / clients_on_host")
    clients_on_host: PositiveInt = Field(1, description="number of clients that share the cores of this host")

    metrics_listen: TcpAddressOrEmpty = Field(
        "", description="address where Prometheus reads metrics, host:port; empty = none"
    )
    metrics_insecure: bool = Field(False, description="allow other hosts to read metrics in plaintext")
    log_style: Literal["auto", "text", "json"] = Field("auto", description="auto = text on a terminal, else JSON")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="the lowest level that is logged"
    )

    @property
    def servers(self) -> tuple[str, ...]:
        """All addresses of the server."""
        return (self.server, *self.other_servers)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        check_metrics_address(self.metrics_listen, insecure=self.insecure or self.metrics_insecure)
        if self.partition_index >= self.partition_count:
            raise ValueError(
                f"partition_index={self.partition_index} must be below partition_count={self.partition_count}"
            )
        if self.approval.allowed_operators and not self.tls.ca:
            raise ValueError("approval.allowed_operators needs tls.ca, the authority of the operators' certificates")
        self._check_exposed()
        return self

    def _check_exposed(self) -> None:
        for address in self.servers:
            plain = not encrypts(address, self.tls) and not is_loopback(address)
            if plain and self.token_file:
                raise ValueError(f"a token must not travel in plaintext to {address!r}: set tls.ca")
            if plain and not self.insecure:
                raise ValueError(
                    f"{address!r} is another host, and plaintext is not allowed: set tls.ca, or insecure = true"
                )
        if not (is_loopback(self.peer_listen) or self.tls.mutual or self.insecure):
            raise ValueError(
                f"{self.peer_listen!r} can be reached from other hosts in plaintext: set tls.ca, tls.cert and tls.key, "
                "or insecure = true to allow it"
            )
