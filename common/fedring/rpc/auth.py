"""Who may call what: the interceptor behind the Boundary. Whoever is refused reaches no handler."""

from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from grpc import aio

from fedring.rpc.errors import FedringError, IdInUse, NotAllowed, Unauthenticated
from fedring.rpc.handlers import FACTORY, around, unknown_method
from fedring.rpc.identity import IDENTITY, LOCAL, NOBODY, Identity, Role, certified
from fedring.v1.federation_pb2 import JoinRequest

REASONS = (
    "no_identity",
    "bad_token",
    "expired_token",
    "revoked_token",
    "tokens_off",
    "token_in_plaintext",
    "two_identities",
    "not_client",
    "not_operator",
    "other_client",
    "other_session",
    "wrong_client",
    "id_in_use",
)
"""Why a call can be refused; stable words, also in `fl-reason`."""

_HANDSHAKE = "handshake"
_MOST_PEERS = 1 << 16
_CLIENTS = {"TrainCmdService", "ModelBlobService", "ClientUpdateService", "RendezvousService"}
_OPERATORS = {"ControlService", "TokenService"}
_ANYBODY = {"grpc.health.v1.Health"}
_READS = ("Get", "List", "Watch")  # verbs that change nothing, and are not worth a line each


class Tally:
    """How often callers were refused, by reason; all reasons are there from the start."""

    def __init__(self) -> None:
        self.refused: Counter[str] = Counter(dict.fromkeys(REASONS, 0))
        self.handshakes = 0
        self.connections = 0
        self._peers: OrderedDict[str, None] = OrderedDict()  # the newest connections that a call came on

    def begin_handshake(self) -> None:
        """Somebody has connected to a port with TLS."""
        self.handshakes += 1

    def heard(self, peer: str) -> None:
        """A call came on the connection from `peer`: its handshake went well."""
        if peer not in self._peers:
            self.connections += 1
            self._peers[peer] = None
            if len(self._peers) > _MOST_PEERS:
                self._peers.popitem(last=False)

    def counts(self) -> Mapping[str, int]:
        """Refusals by reason; "handshake" counts connections on which no call ever came, and those that begin now.

        gRPC tells nobody of a handshake that fails: no certificate, a wrong or an expired one, plaintext.
        """
        return {_HANDSHAKE: max(0, self.handshakes - self.connections), **self.refused}


class Audit(Protocol):
    """Where verbs and refusals are written down."""

    def write(self, *, identity: str, peer: str, verb: str, result: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Door:
    """What a port asks of its callers."""

    open: bool = False  # nothing: everybody who gets here is as good as a local user
    exposed: bool = False  # other hosts can read what is said here
    encrypted: bool = False
    tokens: Callable[[str], Awaitable[Identity]] | None = None  # whose a token is

    async def identify(self, context: Any) -> Identity:
        """Who calls; Unauthenticated or NotAllowed if that is not clear."""
        bearer = _bearer(context)
        if bearer is not None and self.exposed:
            raise Unauthenticated("tokens must not travel in plaintext: revoke this one", reason="token_in_plaintext")
        if self.open:
            return LOCAL
        shown = certified(context) if self.encrypted else None
        told = await self._told(bearer) if bearer is not None else None
        if shown and told and (shown.role, shown.name) != (told.role, told.name):
            raise NotAllowed(f"the certificate is {shown}'s, the token {told}'s", reason="two_identities")
        identity = told or shown
        if identity is None:
            raise Unauthenticated("show a certificate that names you, or a token")
        return identity

    async def _told(self, bearer: str) -> Identity:
        if self.tokens is None:
            raise Unauthenticated("this server takes no tokens: set tokens = true there", reason="tokens_off")
        return await self.tokens(bearer)


@dataclass(eq=False)
class Auth(aio.ServerInterceptor):
    """Lets those in who may call, counts the others, and writes both down."""

    door: Door
    audit: Audit
    tally: Tally = field(default_factory=Tally)

    async def intercept_service(self, continuation: Callable[..., Awaitable[Any]], handler_call_details: Any) -> Any:
        method = verb = handler_call_details.method
        handler = await continuation(handler_call_details)
        if handler is None:
            # Whoever may not call learns nothing of what is served here, and writes no names of theirs into the log.
            handler, verb = unknown_method(method), "an unknown method"
        kind, _ = FACTORY[handler.request_streaming, handler.response_streaming]
        call = getattr(handler, kind)
        guarded = around(call, lambda request, context: self._watched(method, request, context, verb=verb))
        return handler._replace(**{kind: guarded})

    @asynccontextmanager
    async def _watched(self, method: str, request: Any, context: Any, *, verb: str) -> AsyncIterator[Any]:
        """Inside, IDENTITY is who calls; whoever may not call does not get inside. `verb` is for the audit log."""
        who, result, refused = NOBODY, "failed", False
        if self.door.encrypted:
            self.tally.heard(context.peer())
        try:
            if _service_of(method) not in _ANYBODY:
                who = await self.door.identify(context)
                allow(who, method, request)
                IDENTITY.set(who)
            yield context
            result = "ok"
        except FedringError as error:
            result = error.reason
            refused = isinstance(error, Unauthenticated | NotAllowed | IdInUse)
            if refused:
                self.tally.refused[result] += 1
            raise
        finally:
            if refused or _is_audited(verb):
                self.audit.write(identity=str(who), peer=context.peer(), verb=verb, result=result)


def allow(who: Identity, method: str, request: Any) -> None:
    """Return if they may make this call; NotAllowed if not."""
    service = _service_of(method).rpartition(".")[2]
    if service in _OPERATORS and not who.is_a(Role.OPERATOR):
        raise NotAllowed(f"{who} is no operator", reason="not_operator")
    if service in _CLIENTS and not who.is_a(Role.CLIENT):
        raise NotAllowed(f"{who} is no client", reason="not_client")
    if isinstance(request, JoinRequest) and not who.speaks_for(request.client_id):
        raise NotAllowed(f"{who} cannot join as another client: set client_id = {who.name!r}", reason="other_client")


def _is_audited(method: str) -> bool:
    verb = method.rpartition("/")[2]
    return _service_of(method).rpartition(".")[2] in _OPERATORS and not verb.startswith(_READS)


def _service_of(method: str) -> str:
    """Return the service in "/package.Service/Method"; empty if the path is none."""
    return method.rpartition("/")[0].removeprefix("/")


def _bearer(context: Any) -> str | None:
    """The token that the caller shows."""
    for key, value in context.invocation_metadata() or ():
        if key == "authorization":
            scheme, _, token = str(value).partition(" ")
            return token.strip() if scheme.lower() == "bearer" else ""
    return None
