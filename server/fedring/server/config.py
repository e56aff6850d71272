"""The configuration of fl-server."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from fedring.daemon.config import FixedPath
from fedring.rpc.address import Address, AddressOrEmpty, HostName, Network, TcpAddressOrEmpty
from fedring.rpc.channel import encrypts, is_loopback
from fedring.rpc.metrics import check_metrics_address
from fedring.rpc.tls import Tls
from fedring.train.bounds import Seconds
from fedring.train.jobs.job import Job


class ServerConfig(BaseSettings):
    """Every key of fl-server's configuration. Unknown keys are errors."""

    model_config = SettingsConfigDict(
        env_prefix="FEDRING_SERVER_", env_nested_delimiter="__", extra="forbid", frozen=True
    )

    listen: Address = Field("127.0.0.1:8443", description="address for clients, host:port; port 0 = any free one")
    control_listen: Address = Field("127.0.0.1:8444", description="address for flctl, host:port")
    web_port: int | None = Field(None, ge=0, le=65535, description="port of the web page; 0 = any free one")
    web_host: str = Field(
        "127.0.0.1", min_length=1, description="address of the page; another than loopback needs web_insecure = true"
    )
    web_allowed_hosts: list[HostName] = Field(
        [],
        description="names by which browsers may call the page, such as fl.example.org; IP addresses, localhost and "
        "web_host are always allowed",
    )
    web_insecure: bool = Field(False, description="let other hosts read the page, in plaintext and without a login")
    insecure: bool = Field(False, description="let everybody in on an address that other hosts can reach")
    tls: Tls = Field(Tls(), description="certificates; with ca, callers must show a certificate that it has signed")
    tokens: bool = Field(False, description="accept bearer tokens, too (flctl token create)")
    metrics_listen: TcpAddressOrEmpty = Field(
        "", description="where Prometheus reads metrics, host:port; empty = nowhere"
    )
    metrics_insecure: bool = Field(False, description="let other hosts read metrics, in plaintext")
    health_listen: AddressOrEmpty = Field(
        "", description="address that answers only health checks, in plaintext; empty = none"
    )
    reflection: bool = Field(False, description="let callers list the services")
    state_dir: FixedPath = Field(Path("fl-server-state"), description="folder for models, updates and the database")
    state_url: str = Field(
        "",
        description="database of a state that servers share, postgresql://USER@HOST/DATABASE; empty = the state "
        "is in state_dir",
    )
    name: HostName | Literal[""] = Field(
        "",
        description="name or address by which others reach this server, of those that share a state; empty = the host "
        "of listen, or the name of this machine",
    )
    blob_url: str = Field("", description="object store of that state, such as s3://BUCKET/PREFIX")
    audit_chain: bool = Field(
        False,
        description="keep a chained log of all updates in state_dir/receipts, each with the head of its client's log",
    )
    init_path: FixedPath | None = Field(
        None,
        description="weights that jobs may start from, .safetensors or .pt: a file, which jobs read that start fresh; "
        "or a folder, of which jobs name the files with start",
    )
    trusted: list[str] = Field(
        ["fedring"],
        description="what jobs may name: fedring, torchvision (its models), modules with marked functions, or "
        '"module:attribute as kind" (docs/clients.md)',
    )
    download: bool = Field(False, description="let weights of torchvision's models be downloaded")
    data_root: FixedPath | None = Field(None, description="folder of the data sets, for evaluate_on_server")

    heartbeat_seconds: Seconds = Field(1.0, description="period of the heartbeats of a client in a round")
    idle_heartbeat_seconds: Seconds = Field(
        30.0, description="the same of other clients; counts as heartbeat_seconds if it is less"
    )
    lost_after_seconds: Seconds = Field(
        5.0,
        description="silence after which a client in a round is lost, others idle_heartbeat_seconds later; and the "
        "time to return; above heartbeat_seconds",
    )
    no_progress_seconds: Seconds = Field(30.0, description="longest pause within an upload or a download")

    max_running_jobs: PositiveInt = Field(
        1, description="jobs that run at once, each with rounds of its own; further ones wait in the queue"
    )
    max_clients: PositiveInt = Field(1000, description="sessions that may be open at once")
    max_connected: NonNegativeInt = Field(
        0,
        description="clients beyond which those that no round needs are told when to come back, and disconnect; well "
        "above the clients of a round; 0 = all stay connected",
    )
    max_connections_per_address: PositiveInt = Field(
        256, description="connections of one IP address (of IPv6, of its first half) to each of the two ports"
    )
    exempt_addresses: list[Network] = Field(
        [],
        description="IP addresses and networks, such as 10.0.0.0/8, to which no limit of one address applies: "
        "proxies, sites behind one address, load tests",
    )
    max_transfers: PositiveInt = Field(
        128, description="uploads, and as many downloads, at once; at most 8 MiB of memory each"
    )
    max_update_bytes: NonNegativeInt = Field(0, description="longest update; 0 = twice the dense model")
    threads: PositiveInt = Field(2, description="threads for checking and adding updates")
    keep_models: PositiveInt = Field(10, description="newest model versions to keep")
    keep_jobs: NonNegativeInt = Field(
        10, description="newest jobs of which to keep the newest and the best model version, besides keep_models"
    )
    keep_update_rounds: PositiveInt = Field(2, description="newest rounds whose updates to keep")
    keep_rounds: PositiveInt = Field(
        10_000, description="newest rounds whose facts to keep: some 250 bytes for each client of a round"
    )
    keep_unnamed_days: NonNegativeInt = Field(
        7, description="how long unnamed/ keeps files that the database did not name at a start"
    )
    database_log_bytes: int = Field(
        4 << 20,
        ge=1 << 16,
        description="length of the database's log at which it is emptied, unless it is being read",
    )
    drain_seconds: Seconds = Field(10.0, description="time that calls in progress have to end when the server stops")

    log_style: Literal["auto", "text", "json"] = Field("auto", description="auto = text on a terminal, else JSON")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="messages below this level are not logged"
    )
    job: Job = Field(
        default_factory=lambda: Job.model_validate({}), description="defaults of every job, and the job of start-round"
    )

    @property
    def idle_seconds(self) -> float:
        """Period of the heartbeats of clients outside of rounds."""
        return max(self.heartbeat_seconds, self.idle_heartbeat_seconds)

    @property
    def unnamed_seconds(self) -> float:
        """How long unnamed/ keeps files."""
        return 86_400.0 * self.keep_unnamed_days

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        check_metrics_address(self.metrics_listen, insecure=self.insecure or self.metrics_insecure)
        if self.lost_after_seconds <= self.heartbeat_seconds:
            raise ValueError("lost_after_seconds must be above heartbeat_seconds")
        for address in (self.listen, self.control_listen):
            if not is_loopback(address):
                self._check_exposed(address)
        if bool(self.state_url) != bool(self.blob_url):
            raise ValueError("state_url and blob_url belong together: give both, or none")
        if self.tls.ca and not self.tls.cert:
            raise ValueError("tls.ca needs tls.cert and tls.key")
        return self

    @model_validator(mode="after")
    def _page_is_local(self) -> Self:
        local = is_loopback(f"{self.web_host}:0")
        if self.web_port is not None and not (local or self.web_insecure or self.insecure):
            raise ValueError(
                f"web_host {self.web_host!r} can be reached from other hosts, and the page asks nobody for a name: "
                "set web_insecure = true to allow it"
            )
        return self

    def _check_exposed(self, address: str) -> None:
        if not encrypts(address, self.tls):
            if self.tokens:
                raise ValueError(f"tokens must not travel in plaintext to {address!r}: set tls.cert and tls.key")
            if not self.insecure:
                raise ValueError(
                    f"{address!r} can be reached from other hosts in plaintext: set tls.cert and tls.key, "
                    "or insecure = true to allow it"
                )
        elif not (self.tls.ca or self.tokens or self.insecure):
            raise ValueError(
                f"{address!r} can be reached from other hosts, and nothing says who may call: set tls.ca, "
                "or tokens = true, or insecure = true to allow it"
            )
