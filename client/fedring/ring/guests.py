"""Whom an endpoint lets in: with the option tls_members_only, the certificates of the group's members alone."""

import threading
from collections.abc import Mapping
from typing import Any

from fedring.rpc.identity import certified, peer_name

_PATIENCE = 60.0  # seconds that a stream waits until it is known who is a member


class Guests:
    """Knows the identity behind each address, once it was told; until then whoever comes waits."""

    def __init__(self, *, members_only: bool) -> None:
        self.members_only = members_only
        self._identities: Mapping[str, str] = {}
        self._told = threading.Event()

    def expect(self, identities: Mapping[str, str]) -> None:
        """These are the members: identities by address."""
        self._identities = dict(identities)
        self._told.set()

    @property
    def known(self) -> bool:
        """Whether streams can be let in, or none has to be looked at."""
        return not self.members_only or bool(self._identities)

    def close(self) -> None:
        """Nobody waits any more, and nobody else is let in."""
        self._told.set()

    def admits(self, address: str, context: Any) -> bool:
        """Whether the caller may speak as the peer at the address; empty = as any member."""
        if not self.members_only or context.peer().startswith("unix:"):  # only this user can open the socket
            return True
        self._told.wait(_PATIENCE)
        who = certified(context)
        members = [self._identities.get(address, "")] if address else self._identities.values()
        return who is not None and str(who) in members

    def name_of(self, address: str) -> str:
        """The name that the peer's certificate must carry; empty = any."""
        identity = self._identities.get(address, "")
        return peer_name(identity) if identity else ""
