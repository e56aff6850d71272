"""The guards of the server's ports: certificates, tokens, and audit log."""

import asyncio
import logging
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from stat import S_IRWXG, S_IRWXO

from grpc import aio

from fedring.daemon.config import ConfigError
from fedring.daemon.durable import private_opener
from fedring.daemon.logs import JsonFormatter
from fedring.rpc.channel import encrypts, is_loopback
from fedring.rpc.revocation import Revocations
from fedring.rpc.tls import check_tls, server_credentials
from fedring.server.config import ServerConfig
from fedring.server.guard.auth import REASONS, Auth, AuthCounts, PortPolicy
from fedring.server.guard.callers import Callers
from fedring.server.guard.descriptors import Shares
from fedring.server.guard.entrance import Entrance
from fedring.server.guard.tokens import Tokens
from fedring.server.state.facts import Facts

log = logging.getLogger(__name__)

_REFUSED = "refused.jsonl"
_FILE_BYTES = 4 << 20
_FILES = 5  # older files of each kind that are kept
_LOOK_SECONDS = 1.0
_FEW_CALLS = 48  # of one address at once; the port for flctl serves 64


class Security:
    """Guards the ports for clients and for flctl, and counts refusals."""

    def __init__(
        self,
        config: ServerConfig,
        facts: Facts,
        stack: ExitStack,
        most: Shares,
        *,
        for_clients: Collection[str],
        note: Callable[[str, str, str], None] = lambda who, verb, result: None,
    ) -> None:
        self._config = config
        self.tokens = Tokens(facts)
        self.tally = AuthCounts()
        check_tls(config.tls)
        self._revocations = Revocations(config.tls.crl, config.tls.ca)
        warn_of_insecurity(config)
        audit = AuditLog(config.state_dir / "audit.jsonl", note)
        stack.callback(audit.close)
        # One address may have half of the calls. A port for few clients has room for more calls than it serves at once.
        self.public_entrance = self._entrance(max(2 * config.max_clients, _FEW_CALLS), most.public)
        self.control_entrance = self._entrance(_FEW_CALLS, most.control)
        self.public = Auth(self._policy(config.listen, local=not config.tokens), audit, for_clients, self.tally)
        self.control = Auth(self._policy(config.control_listen, local=True), audit, for_clients, self.tally)

    def bind_public(self, server: aio.Server) -> str:
        """Bind the server for clients, and return its address and port.

        Raises ConfigError if that cannot be done.
        """
        return self.public_entrance.listen_at(self._bind(server, self._config.listen))

    def bind_control(self, server: aio.Server) -> str:
        """Bind the server that flctl calls, in the same way."""
        return self.control_entrance.listen_at(self._bind(server, self._config.control_listen))

    def _bind(self, server: aio.Server, address: str) -> str:
        plain = not encrypts(address, self._config.tls)
        others = os.umask(S_IRWXG | S_IRWXO)  # only its user may use a Unix socket
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

    async def look_after_connections(self) -> None:
        """End connections that do not keep to the limits of both ports."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.public_entrance.look_after_connections())
            tasks.create_task(self.control_entrance.look_after_connections())

    async def look_after_revocations(self) -> None:
        """End calls in progress soon after their certificates or tokens become bad."""
        while self._config.tls.crl or self._config.tokens:
            self.public.end_revoked()
            self.control.end_revoked()
            await asyncio.sleep(_LOOK_SECONDS)

    def _entrance(self, most_calls: int, connections: int) -> Entrance:
        config = self._config
        most_connections = min(config.max_connections_per_address, connections // 2)
        callers = Callers(most_calls, most_connections, config.exempt_addresses, self.tally)
        return Entrance(callers, config.no_progress_seconds)

    def _policy(self, address: str, *, local: bool) -> PortPolicy:
        """Return the demands of a port on its callers.

        With `local`, callers from this host in plaintext need to show nothing.
        """
        encrypted = encrypts(address, self._config.tls)
        exposed = not encrypted and not is_loopback(address)
        asks = self._config.tls.ca is not None or self._config.tokens
        unix = address.startswith("unix:")
        return PortPolicy(
            open=unix or (not encrypted and local) or exposed or not asks,
            exposed=exposed,
            encrypted=encrypted,
            tokens=self.tokens.identify if self._config.tokens else None,
            revocations=self._revocations if self._config.tls.crl else None,
            lapsed=self.tokens.lapsed,
        )


def warn_of_insecurity(config: ServerConfig) -> None:
    """Warn in the log of the gaps left by `insecure = true`."""
    for address in (config.listen, config.control_listen):
        if is_loopback(address):
            continue
        if not encrypts(address, config.tls):
            log.warning(
                "insecure: others can read and change the traffic to %s, and anybody can call: set tls.cert",
                address,
            )
        elif not (config.tls.ca or config.tokens):
            log.warning("insecure: anybody who reaches %s can call: set tls.ca, or tokens = true", address)


class AuditLog:
    """A log of verbs and refusals, with callers and times.

    Its lines go only to its files. Refusals have files of their own, since strangers can cause so many that no verb
    would be left.

    Args:
        path: The file of the verbs. That of the refusals is `refused.jsonl` beside it.
        note: Is called with who has used which verb with which result. Refusals are none.
    """

    def __init__(self, path: Path, note: Callable[[str, str, str], None] = lambda who, verb, result: None) -> None:
        self._note = note
        with ExitStack() as opened:
            self._verbs = opened.enter_context(_log_to(path, "audit"))
            self._refusals = opened.enter_context(_log_to(path.with_name(_REFUSED), "audit.refused"))
            self._stack = opened.pop_all()

    def write(self, *, identity: str, peer: str, verb: str, result: str) -> None:
        """Append a line."""
        facts = {"identity": identity, "peer": peer, "verb": verb, "result": result}
        refused = result in REASONS
        (self._refusals if refused else self._verbs).info("%s", verb, extra=facts)
        if not refused:
            self._note(identity, verb, result)

    def close(self) -> None:
        """Close the files."""
        self._stack.close()


@contextmanager
def _log_to(path: Path, name: str) -> Iterator[logging.Logger]:
    """Let a logger write to a file alone.

    Raises ConfigError if that cannot be written.
    """
    try:
        handler = _PrivateFiles(path, maxBytes=_FILE_BYTES, backupCount=_FILES, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger(name)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(handler)
    try:
        yield logger
    finally:
        logger.removeHandler(handler)
        handler.close()


class _PrivateFiles(RotatingFileHandler):
    """Rotates files that only their owner may read."""

    def _open(self) -> TextIOWrapper:
        # The handler opens each new file here, and would let the umask decide who may read it.
        os.close(private_opener(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND))
        return super()._open()
