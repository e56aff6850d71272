"""How the server's two ports are guarded."""

import logging
import os
from contextlib import ExitStack
from stat import S_IRWXG, S_IRWXO

from grpc import aio

from fedring.daemon.audit import AuditLog
from fedring.daemon.config import ConfigError
from fedring.rpc.auth import Auth, AuthCounts, PortPolicy
from fedring.rpc.channel import encrypts, is_loopback
from fedring.rpc.tls import check_tls, server_credentials
from fedring.server.config import ServerConfig
from fedring.server.operator.tokens import Tokens
from fedring.server.state.facts import Facts

log = logging.getLogger(__name__)


class Security:
    """The interceptors of the port for clients and of the port for flctl, and what both count."""

    def __init__(self, config: ServerConfig, facts: Facts, stack: ExitStack) -> None:
        self._config = config
        self.tokens = Tokens(facts)
        self.tally = AuthCounts()
        check_tls(config.tls)
        warn_of_insecurity(config)
        audit = AuditLog(config.state_dir / "audit.jsonl")
        stack.callback(audit.close)
        self.public = Auth(self._policy(config.listen, local=not config.tokens), audit, self.tally)
        self.control = Auth(self._policy(config.control_listen, local=True), audit, self.tally)

    def bind(self, server: aio.Server, address: str) -> str:
        """The address at which the server will listen; ConfigError if it cannot."""
        plain = not encrypts(address, self._config.tls)
        others = os.umask(S_IRWXG | S_IRWXO)  # a Unix socket is its user's alone
        try:
            if plain:
                port = server.add_insecure_port(address)
            else:
                credentials = server_credentials(self._config.tls, self.tally.begin_handshake)
                port = server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {address}: is another program using it?") from error
        finally:
            os.umask(others)
        return address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"

    def _policy(self, address: str, *, local: bool) -> PortPolicy:
        """What the port asks for; with `local` nothing of a caller of this host in plaintext."""
        encrypted = encrypts(address, self._config.tls)
        exposed = not encrypted and not is_loopback(address)
        asks = self._config.tls.ca is not None or self._config.tokens
        unix = address.startswith("unix:")
        return PortPolicy(
            open=unix or (not encrypted and local) or exposed or not asks,
            exposed=exposed,
            encrypted=encrypted,
            tokens=self.tokens.identify if self._config.tokens else None,
        )


def warn_of_insecurity(config: ServerConfig) -> None:
    """The log says what `insecure = true` leaves open."""
    for address in (config.listen, config.control_listen):
        if is_loopback(address):
            continue
        if not encrypts(address, config.tls):
            log.warning("insecure: whoever is between can read and change what goes to %s, and anybody call", address)
        elif not (config.tls.ca or config.tokens):
            log.warning("insecure: anybody who reaches %s can call: set tls.ca, or tokens = true", address)
