"""Who calls: the role and the name that a certificate or a token stands for, and what they allow.

In a certificate an identity is a URI among its alternative names: `fedring://client/NAME`, `fedring://operator/NAME`,
`fedring://server/NAME`.
"""

import hashlib
import re
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
"""What an identity may be called; a client is called as its client_id."""

_URI = re.compile(rf"fedring://(client|operator|server)/({NAME.pattern})")


class Role(StrEnum):
    """What somebody is here for."""

    CLIENT = "client"
    OPERATOR = "operator"
    SERVER = "server"


@dataclass(frozen=True, slots=True)
class Identity:
    """Somebody who has proven to be that; with no role, somebody who could read the daemon's own files."""

    role: Role | None
    name: str
    token: str = ""  # the id of the token that proved it
    ends_at: float | None = None  # when that expires, in seconds since 1970

    def is_a(self, role: Role) -> bool:
        """Whether they may do what that role may."""
        return self.role in (None, role)

    def speaks_for(self, client_id: str) -> bool:
        """Whether they may join as this client."""
        return self.role is None or (self.role, self.name) == (Role.CLIENT, client_id)

    def owns(self, other: "Identity") -> bool:
        """Whether what `other` has begun may be gone on with."""
        return self.role is None or (self.role, self.name) == (other.role, other.name)

    def __str__(self) -> str:
        return uri_of(self.role, self.name) if self.role else self.name


LOCAL = Identity(None, "local")
"""The caller of a port that only this host can reach, or that the operator has left open."""

NOBODY = Identity(None, "nobody")
"""For the audit log: who has not proven to be anybody. Never let in."""

IDENTITY: ContextVar[Identity] = ContextVar("IDENTITY")
"""Who makes the call that the running handler serves. Without an interceptor that sets it, there is none."""


def uri_of(role: Role, name: str) -> str:
    """The identity as certificates carry it."""
    return f"fedring://{role}/{name}"


def parse_uri(uri: str) -> Identity | None:
    """The identity that the URI stands for; None if it stands for none."""
    match = _URI.fullmatch(uri)
    return Identity(Role(match[1]), match[2]) if match else None


def certified(context: Any) -> Identity | None:
    """Whose certificate the caller has proven to own; None if it names nobody, or there is none."""
    uris: Any = context.auth_context().get("peer_uri", ())
    found = (parse_uri(bytes(uri).decode("utf-8", "replace")) for uri in uris)
    return next((identity for identity in found if identity), None)


def peer_name(uri: str) -> str:
    """The host name in the certificate of a worker: who dials it asks for this name, and so for this identity.

    A worker is found by its identity, wherever it listens. A digest, as DNS knows no capitals.
    """
    return f"{hashlib.sha256(uri.encode()).hexdigest()[:32]}.peer.fedring"
