"""Identities, and the rights that they give.

An identity is the role and the name that a certificate or a token stands for. In a certificate, it is a URI among the
alternative names: `fedring://client/NAME`, `fedring://operator/NAME` or `fedring://server/NAME`.
"""

import hashlib
import re
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
"""The form of an identity's name. A client's name is its client_id."""

_URI = re.compile(rf"fedring://(client|operator|server)/({NAME.pattern})")


class Role(StrEnum):
    """The rights of an identity: train, operate the server, or serve."""

    CLIENT = "client"
    OPERATOR = "operator"
    SERVER = "server"


@dataclass(frozen=True, slots=True)
class Identity:
    """A caller who has proven who they are.

    Without a role, it is a local user who could read the daemon's own files.
    """

    role: Role | None
    name: str
    token: str = ""  # the id of the token that proved the identity; empty if a certificate did
    ends_at: float | None = None  # when the token expires, in seconds since 1970

    def is_a(self, role: Role) -> bool:
        """Return whether the caller has the rights of that role."""
        return self.role in (None, role)

    def speaks_for(self, client_id: str) -> bool:
        """Return whether the caller may join as the client of this id."""
        return self.role is None or (self.role, self.name) == (Role.CLIENT, client_id)

    def owns(self, other: "Identity") -> bool:
        """Return whether the caller may continue work begun by `other`.

        An upload is an example.
        """
        return self.role is None or (self.role, self.name) == (other.role, other.name)

    def __str__(self) -> str:
        return uri_of(self.role, self.name) if self.role else self.name


LOCAL = Identity(None, "local")
"""The caller of a port that only this host can reach, or that the operator has opened to everybody."""

NOBODY = Identity(None, "nobody")
"""A caller without an identity, for the audit log. Such a call is never let in."""

IDENTITY: ContextVar[Identity] = ContextVar("IDENTITY")
"""The caller of the call that the running handler serves. It has no value unless `Auth` has set it."""


def uri_of(role: Role, name: str) -> str:
    """Return the URI by which certificates name an identity."""
    return f"fedring://{role}/{name}"


def parse_uri(uri: str) -> Identity | None:
    """Return the identity that a URI names; None if it names none."""
    match = _URI.fullmatch(uri)
    return Identity(Role(match[1]), match[2]) if match else None


def certified(context: Any) -> Identity | None:
    """Return the identity in the caller's certificate, or None.

    It is None without a certificate, and if the certificate names no identity.
    """
    uris: Any = context.auth_context().get("peer_uri", ())
    found = (parse_uri(bytes(uri).decode("utf-8", "replace")) for uri in uris)
    return next((identity for identity in found if identity), None)


def peer_name(uri: str) -> str:
    """Return the host name in a worker's certificate.

    Args:
        uri: The identity of the worker.

    A peer that connects to the worker demands this name, and so this identity, whatever the worker's address is. The
    name is a digest because DNS does not distinguish upper and lower case.
    """
    return f"{hashlib.sha256(uri.encode()).hexdigest()[:32]}.peer.fedring"
