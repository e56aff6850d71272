"""Shares of the ports' connections, so that files keep descriptors."""

from collections.abc import Iterator
from dataclasses import dataclass

from fedring.daemon.checks import Check, Level
from fedring.server.config import ServerConfig

_OTHERS = 192
"""Descriptors besides those of transfers and of the two ports: libraries, the database, fsyncs, health, metrics."""
_PAGE = 128  # connections
_CONTROL = 64


@dataclass(frozen=True, slots=True)
class Shares:
    """The parts of the process's descriptors."""

    files: int
    public: int  # connections to the port for clients
    control: int  # connections to the port for flctl

    @property
    def total(self) -> int:
        """The sum of all."""
        return self.files + self.public + self.control


def wanted(config: ServerConfig) -> Shares:
    """Return the ideal shares for the configuration.

    They are four connections a client.
    """
    page = _PAGE if config.web_port is not None else 0
    return Shares(2 * config.max_transfers + _OTHERS + page, 4 * config.max_clients, _CONTROL)


def shares(config: ServerConfig, limit: int) -> Shares:
    """Return the shares of the descriptors that this process may open.

    Files come first, but where the limit is small, they leave half of it to connections.
    """
    best = wanted(config)
    files = min(best.files, limit // 2)
    control = min(best.control, limit // 8)
    return Shares(files, min(best.public, limit - files - control), control)


def check_descriptors(config: ServerConfig, limit: int) -> Iterator[Check]:
    """Warn if the limit of descriptors is too low for all clients."""
    best = wanted(config)
    fit = shares(config, limit).public
    if fit < config.max_clients:
        needed = best.files + best.control + config.max_clients
        yield Check(
            "max_clients",
            Level.WARN,
            f"this process may open {limit} files and connections, which leaves {fit} connections, "
            f"but max_clients = {config.max_clients} needs {needed}",
            "raise the limit (ulimit -n, LimitNOFILE= in a unit, ulimits of a container), or lower "
            "max_clients or max_transfers",
        )
