"""The interceptor that checks callers and their permissions.

It goes after the Boundary.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from grpc import aio

from fedring.rpc.errors import FedringError, IdInUse, NotAllowed, Unauthenticated
from fedring.rpc.handlers import FACTORY, around, unknown_method
from fedring.rpc.identity import IDENTITY, LOCAL, NOBODY, Identity, Role, certified
from fedring.rpc.revocation import Revocations, Serial, shown
from fedring.rpc.streams import WRITE_GRACE
from fedring.v1.federation_pb2 import JoinRequest

REASONS = (
    "no_identity",
    "bad_token",
    "expired_token",
    "revoked_token",
    "revoked_certificate",
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
"""The reasons for which a call can be refused: stable words, in `fl-reason` and as labels of metrics."""

_HANDSHAKE = "handshake"
_MOST_PEERS = 1 << 16
_OPERATORS = {"ControlService", "TokenService"}
_ANYBODY = {"grpc.health.v1.Health"}
_READS = ("Get", "List", "Watch")  # calls that change nothing, so they are not written to the audit log
_VERBS = {
    "StartRound": "start-round",
    "StartJob": "run",
    "StopRound": "stop --round",
    "StopJob": "stop",
    "MoveJob": "jobs move",
    "ForgetClient": "clients forget",
    "ExportModel": "models export",
    "CreateToken": "token create",
    "RevokeToken": "token revoke",
}
"""The verbs of flctl for the calls in the audit log."""


class AuthCounts:
    """Counts refusals by reason, TLS handshakes, and connections with a call.

    Every reason starts at 0.
    """

    def __init__(self) -> None:
        self.refused: Counter[str] = Counter(dict.fromkeys(REASONS, 0))
        self.handshakes = 0  # of TLS that began
        self.connections = 0  # on which a call came
        self.ended = 0  # connections that did not keep to a limit
        self._peers: OrderedDict[str, None] = OrderedDict()  # the newest connections on which a call came

    def begin_handshake(self) -> None:
        """Note that somebody has connected to a port with TLS."""
        self.handshakes += 1

    def note_call(self, peer: str) -> None:
        """Note a call on the connection from `peer`, whose handshake therefore succeeded."""
        if peer not in self._peers:
            self.connections += 1
            self._peers[peer] = None
            if len(self._peers) > _MOST_PEERS:
                self._peers.popitem(last=False)

    def counts(self) -> Mapping[str, int]:
        """Return the number of refusals by reason.

        gRPC does not report a handshake that fails, because of plaintext or of a certificate that is missing, wrong or
        expired. So "handshake" counts the connections on which no call has come; that includes those that have only
        just been opened.
        """
        return {_HANDSHAKE: max(0, self.handshakes - self.connections), **self.refused}


class Audit(Protocol):
    """Where operators' verbs and refused calls are recorded."""

    def write(self, *, identity: str, peer: str, verb: str, result: str) -> None:
        """Record one call.

        Args:
            identity: Who made it, as text.
            peer: The address that it came from, as gRPC writes it.
            verb: The path of its method.
            result: "ok", "failed", or the reason for which it was refused.
        """
        ...


@dataclass(frozen=True, slots=True)
class PortPolicy:
    """The demands of a port on its callers."""

    open: bool = False  # demands nothing: whoever reaches it counts as a local user
    exposed: bool = False  # it takes calls from other hosts in plaintext
    encrypted: bool = False
    tokens: Callable[[str], Awaitable[Identity]] | None = None  # finds the identity of a token; None = takes no tokens
    revocations: Revocations | None = None  # the certificates that it refuses
    lapsed: Callable[[Identity], Unauthenticated | None] = lambda who: None  # why a token that was taken is bad by now

    async def identify(self, context: Any) -> Identity:
        """Return who makes the call of this context.

        Raises:
            Unauthenticated: If the caller shows neither a certificate that names an identity nor a valid token, or a
                certificate that was revoked.
            NotAllowed: If the caller shows two different identities.
        """
        bearer = _bearer(context)
        # Refused even where everybody may call: its readers could use the token elsewhere.
        if bearer is not None and self.exposed:
            raise Unauthenticated(
                "a token came in plaintext, so others may have read it: revoke it, and use TLS",
                reason="token_in_plaintext",
            )
        if self.open:
            return LOCAL
        # Checked before the token is looked up, so that a token does not make good a stolen key.
        if self.revocations and self.revocations.holds(self.certificate(context)):
            raise _revoked()
        of_certificate = certified(context) if self.encrypted else None
        of_token = await self._identity_of(bearer) if bearer is not None else None
        if of_certificate and of_token and (of_certificate.role, of_certificate.name) != (of_token.role, of_token.name):
            text = f"the certificate is {of_certificate}'s, but the token is {of_token}'s: use one identity"
            raise NotAllowed(text, reason="two_identities")
        identity = of_token or of_certificate
        if identity is None:
            raise Unauthenticated("show a certificate that names you, or a token")
        return identity

    def certificate(self, context: Any) -> Serial | None:
        """Return the serial of the caller's certificate, if it is revocable."""
        return shown(context) if self.encrypted and self.revocations else None

    def ended(self, who: Identity, certificate: Serial | None) -> Unauthenticated | None:
        """Return why a call may not go on; None if it may.

        Its caller was let in when it began.
        """
        if self.revocations and certificate and self.revocations.holds(certificate):
            return _revoked()
        return self.lapsed(who) if who.token else None

    async def _identity_of(self, bearer: str) -> Identity:
        if self.tokens is None:
            raise Unauthenticated(
                "this server takes no tokens: set tokens = true in its configuration", reason="tokens_off"
            )
        return await self.tokens(bearer)


@dataclass(eq=False)
class Auth(aio.ServerInterceptor):
    """Admits permitted calls, counts refusals, and writes the audit log.

    The audit log has refusals and verbs.

    A call that is refused reaches no handler.
    """

    policy: PortPolicy
    audit: Audit
    for_clients: Collection[str]  # the full names of the services that only clients may call
    tally: AuthCounts = field(default_factory=AuthCounts)
    _calls: set["CallInProgress"] = field(
        default_factory=set
    )  # in progress, of callers that may lose their right to it

    def end_revoked(self) -> None:
        """End calls in progress whose certificate or token has become bad.

        They end with "revoked_certificate", "revoked_token" or "expired_token".
        """
        for call in [*self._calls]:
            if call.refusal is None and (refusal := self.policy.ended(call.who, call.certificate)):
                call.end(refusal)

    async def intercept_service(self, continuation: Callable[..., Awaitable[Any]], handler_call_details: Any) -> Any:
        method = known = handler_call_details.method
        handler = await continuation(handler_call_details)
        if handler is None:
            # Callers without permission must not learn which methods exist, nor write names of theirs into the log.
            handler, known = unknown_method(method), "an unknown method"
        kind, _ = FACTORY[handler.request_streaming, handler.response_streaming]
        call = getattr(handler, kind)
        guarded = around(call, lambda request, context: self._watched(method, request, context, known=known))
        return handler._replace(**{kind: guarded})

    @asynccontextmanager
    async def _watched(self, method: str, request: Any, context: Any, *, known: str) -> AsyncIterator[Any]:
        """Check the caller before the body runs, and record the result.

        IDENTITY is set for the body; the result is recorded under the `known` name.
        """
        who, result, refused = NOBODY, "failed", False
        if self.policy.encrypted:
            self.tally.note_call(context.peer())
        try:
            if _service_of(method) not in _ANYBODY:
                who = await self.policy.identify(context)
                allow(who, method, request, self.for_clients)
                IDENTITY.set(who)
            async with self._until_revoked(who, context) as entered:
                yield entered
            result = "ok"
        except FedringError as error:
            result = error.reason
            refused = isinstance(error, Unauthenticated | NotAllowed | IdInUse)
            if refused:
                self.tally.refused[result] += 1
            raise
        finally:
            if refused or _is_audited(known):
                verb = _VERBS.get(known.rpartition("/")[2], known)
                self.audit.write(identity=str(who), peer=context.peer(), verb=verb, result=result)

    @asynccontextmanager
    async def _until_revoked(self, who: Identity, context: Any) -> AsyncIterator[Any]:
        """Run a call's body until it ends, or may not go on."""
        certificate = self.policy.certificate(context)
        if certificate is None and not who.token:
            yield context
            return
        call = CallInProgress(asyncio.timeout(None), who, certificate)
        try:
            async with call.scope:
                self._calls.add(call)
                try:
                    yield WholeSends(context, call)
                finally:
                    self._calls.remove(call)
                    call.over = True
        except TimeoutError:
            if not call.scope.expired() or call.refusal is None:
                raise
            raise call.refusal from None


@dataclass(eq=False, slots=True)
class CallInProgress:
    """A call in progress, with the credentials of its caller."""

    scope: asyncio.Timeout
    who: Identity
    certificate: Serial | None
    refusal: Unauthenticated | None = None  # why it is being ended
    sending: bool = False
    over: bool = False

    def end(self, refusal: Unauthenticated) -> None:
        """Cancel the call, but no send in the middle: see `WholeSends`."""
        self.refusal = refusal
        if self.sending:
            asyncio.get_running_loop().call_later(WRITE_GRACE, self.cancel)
        else:
            self.cancel()

    def cancel(self) -> None:
        """Cancel the call, unless that was done or it is over."""
        if not self.over and not self.scope.expired():
            self.scope.reschedule(asyncio.get_running_loop().time())


class WholeSends:
    """A call's context that ends no send in the middle.

    gRPC notes that the initial metadata are sent when their send has ended. If that is cancelled, or that of a first
    message that they go with, it sends them again with the status, which fails: the caller would never learn of it. So
    they go first, since no slow reader delays them. A send that has begun has half a second to end, and after it, no
    other begins. (To shield each of them by a task of its own would cost three times as much as the waiting.)
    """

    def __init__(self, context: Any, call: CallInProgress) -> None:
        self._context, self._call, self._begun = context, call, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def send_initial_metadata(self, metadata: Sequence[tuple[str, str]]) -> None:
        """Send the initial metadata."""
        self._begun = True
        await self._whole(self._context.send_initial_metadata, metadata)

    async def write(self, message: Any) -> None:
        """Send a message."""
        if not self._begun:
            await self.send_initial_metadata(())
        await self._whole(self._context.write, message)

    async def _whole(self, send: Callable[[Any], Awaitable[None]], what: Any) -> None:
        call = self._call
        if call.refusal is not None:
            await asyncio.get_running_loop().create_future()  # until the call is cancelled, in a moment
        call.sending = True
        try:
            await send(what)
        finally:
            call.sending = False
            if call.refusal is not None:
                call.cancel()


def allow(who: Identity, method: str, request: Any, for_clients: Collection[str]) -> None:
    """Check that a caller may make a call.

    Args:
        who: The caller.
        method: The path of the method, "/package.Service/Method".
        request: The first message of the call; a JoinRequest is checked against the caller's name.
        for_clients: The full names of the services that only clients may call.

    Raises:
        NotAllowed: If the caller may not.
    """
    service = _service_of(method)
    if service.rpartition(".")[2] in _OPERATORS and not who.is_a(Role.OPERATOR):
        raise NotAllowed(f"{who} is not an operator", reason="not_operator")
    if service in for_clients and not who.is_a(Role.CLIENT):
        raise NotAllowed(f"{who} is not a client", reason="not_client")
    if isinstance(request, JoinRequest) and not who.speaks_for(request.client_id):
        raise NotAllowed(
            f"{who} cannot join as {request.client_id!r}: set client_id = {who.name!r}", reason="other_client"
        )


def _revoked() -> Unauthenticated:
    return Unauthenticated("this certificate was revoked: ask for a new one", reason="revoked_certificate")


def _is_audited(method: str) -> bool:
    call = method.rpartition("/")[2]
    return _service_of(method).rpartition(".")[2] in _OPERATORS and not call.startswith(_READS)


def _service_of(method: str) -> str:
    """Return the service in "/package.Service/Method".

    Empty if the path has no such form.
    """
    return method.rpartition("/")[0].removeprefix("/")


def _bearer(context: Any) -> str | None:
    """Return the token that the caller shows.

    Empty if the header holds none, None if there is no header.
    """
    for key, value in context.invocation_metadata() or ():
        if key == "authorization":
            scheme, _, token = str(value).partition(" ")
            return token.strip() if scheme.lower() == "bearer" else ""
    return None
