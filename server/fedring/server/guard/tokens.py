"""Bearer tokens in the form `fr_ID_SECRET`.

The secret is 32 random bytes; only its digest is kept.
"""

import asyncio
import hashlib
import hmac
import secrets
import time
from pathlib import Path
from typing import Any

from fedring.daemon.config import ConfigError
from fedring.rpc.errors import BadRequest, FedringError, NoSuchToken, Unauthenticated
from fedring.rpc.identity import NAME, Identity, Role
from fedring.server.sessions.sessions import Sessions
from fedring.server.state.facts import Facts
from fedring.server.state.failures import StorageError
from fedring.server.state.identity import add_token_offline
from fedring.server.state.journal import rfc3339
from fedring.server.state.rows import TokenRow
from fedring.v1 import control_pb2 as pb
from fedring.v1 import control_pb2_grpc as rpc

_PREFIX = "fr"
_ROLES = (Role.CLIENT, Role.OPERATOR)
_MOST_SECONDS = 100 * 365 * 24 * 3600
_LOOK_SECONDS = 1.0  # least time between two reads of the store because of an unknown token


def new_token(role: str, name: str, valid_seconds: int) -> tuple[TokenRow, str]:
    """Make a token.

    Args:
        role: client or operator.
        name: whose it is.
        valid_seconds: how long it is valid; 0 means without end.

    Returns:
        The row to keep, and the token itself, which is shown once.

    Raises:
        BadRequest: "bad_role", "bad_name" or "bad_duration".
    """
    if role not in _ROLES:
        raise BadRequest(f"the role {role!r} is none of client, operator", reason="bad_role")
    if not NAME.fullmatch(name):
        raise BadRequest("a name must be 1 to 128 characters of A-Z a-z 0-9 . _ -", reason="bad_name")
    if valid_seconds > _MOST_SECONDS:
        raise BadRequest("a token cannot be valid for more than a hundred years", reason="bad_duration")
    token_id, secret, now = secrets.token_hex(6), secrets.token_urlsafe(32), time.time()
    expires = now + valid_seconds if valid_seconds else None
    return TokenRow(token_id, _digest(secret), role, name, now, expires), f"{_PREFIX}_{token_id}_{secret}"


def create_offline(state_dir: Path, role: str, name: str, valid_seconds: int) -> tuple[TokenRow, str]:
    """Make a token in the state folder of a server.

    The server may be running. Raises ConfigError if there is no such folder.
    """
    row, token = new_token(role, name, valid_seconds)
    try:
        add_token_offline(state_dir, row)
    except StorageError as error:
        raise ConfigError(f"state_dir {state_dir} cannot be used: {error}") from error
    return row, token


class Tokens:
    """The tokens of a run.

    They are in memory for comparing, in the store to last. The thread of the store changes both: so no caller that goes
    away, and no read that fails, comes between a commit and its note in memory.
    """

    def __init__(self, facts: Facts) -> None:
        self._facts, self._store = facts, facts.store.tokens
        self._rows: dict[str, TokenRow] = {}
        self._looked = 0.0  # when the store was read last, monotonic seconds
        self._looking = asyncio.Lock()

    async def load(self) -> list[TokenRow]:
        """Read all tokens from the store."""
        self._looked = time.monotonic()
        return await self._facts.db(self._load)

    async def create(self, role: str, name: str, valid_seconds: int) -> tuple[TokenRow, str]:
        """Make and store a token, and return its row and text."""
        row, token = new_token(role, name, valid_seconds)
        await self._facts.db(self._add, row)
        return row, token

    async def revoke(self, token_id: str) -> TokenRow:
        """Revoke a token at once, and return its row.

        Raises NoSuchToken if there is none.
        """
        # PostgreSQL refuses to look for a text with a NUL.
        row = await self._facts.db(self._revoke, token_id) if token_id.isprintable() else None
        if row is None:
            raise NoSuchToken(f"there is no token {token_id!r}: see `flctl token list`")
        return row

    async def identify(self, token: str) -> Identity:
        """Return whose the token is.

        Raises:
            Unauthenticated: "bad_token", "revoked_token" or "expired_token".
        """
        prefix, _, rest = token.partition("_")
        token_id, _, secret = rest.partition("_")
        if token_id not in self._rows:
            await self._look()
        row = self._rows.get(token_id)
        known = row.digest if row else _digest("")
        if not hmac.compare_digest(_digest(secret), known) or row is None or prefix != _PREFIX:
            raise Unauthenticated("this token is not known here", reason="bad_token")
        who = Identity(Role(row.role), row.name, token_id, row.expires_at)
        if refusal := self.lapsed(who):
            raise refusal
        return who

    def lapsed(self, who: Identity) -> Unauthenticated | None:
        """Return why a caller's token is bad by now, or None."""
        row = self._rows.get(who.token)
        if row is not None and row.revoked_at is not None:
            return Unauthenticated(f"the token {who.token} was revoked", reason="revoked_token")
        if who.ends_at is not None and time.time() >= who.ends_at:
            return Unauthenticated(f"the token {who.token} has expired", reason="expired_token")
        return None

    def _load(self) -> list[TokenRow]:
        rows = self._store.all()
        self._rows = {row.token_id: row for row in rows}
        return rows

    def _add(self, row: TokenRow) -> None:
        self._store.add(row)
        self._rows[row.token_id] = row

    def _revoke(self, token_id: str) -> TokenRow | None:
        row = self._store.revoke(token_id, time.time())
        if row is not None:
            self._rows[token_id] = row
        return row

    async def _look(self) -> None:
        """Read the store, once for all waiting callers.

        A token may have been made beside this process.

        However many ask, once in a while is enough: nobody can keep the store busy with tokens that he makes up.
        """
        asked = time.monotonic()
        async with self._looking:
            if self._looked < asked:
                await asyncio.sleep(self._looked + _LOOK_SECONDS - asked)
                await self.load()


class TokenService(rpc.TokenServiceServicer):
    """The service with which operators make, list and revoke tokens.

    Args:
        tokens: that are known.
        sessions: which end if their token is revoked.
        taken: whether this server takes tokens.
    """

    def __init__(self, tokens: Tokens, sessions: Sessions, *, taken: bool) -> None:
        self._tokens, self._sessions, self._taken = tokens, sessions, taken

    async def CreateToken(self, request: pb.CreateTokenRequest, context: Any) -> pb.CreatedToken:
        row, token = await self._tokens.create(request.role, request.name, request.valid_seconds)
        warning = "" if self._taken else "this fl-server takes no tokens: set tokens = true, and start it again"
        return pb.CreatedToken(secret=token, token=_message(row), warning=warning)

    async def ListTokens(self, request: pb.ListTokensRequest, context: Any) -> pb.TokenList:
        return pb.TokenList(tokens=[_message(row) for row in await self._tokens.load()])

    async def RevokeToken(self, request: pb.RevokeTokenRequest, context: Any) -> pb.Token:
        row = await self._tokens.revoke(request.token_id)
        revoked: FedringError = Unauthenticated("its token was revoked", reason="revoked_token")
        for session in self._sessions:
            if session.owner.token == row.token_id:
                session.close(revoked)  # the service that has its stream drops it, and tells the round
        return _message(row)


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _message(row: TokenRow) -> pb.Token:
    return pb.Token(
        token_id=row.token_id,
        role=row.role,
        name=row.name,
        created_at=rfc3339(row.created_at),
        expires_at=rfc3339(row.expires_at),
        revoked_at=rfc3339(row.revoked_at),
    )
