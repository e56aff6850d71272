"""Limits on the connections of the page's listener.

uvicorn counts connections only when a request is complete, and bounds only the time between two requests. A connection
that sends half a request, or nothing at all, would stay open forever, and a few hundred of those would leave no room
for anybody else.
"""

import asyncio
import logging
from ipaddress import ip_address
from typing import ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

log = logging.getLogger(__name__)

HEAD_SECONDS = 5.0
"""Seconds that a connection may take to send the head of its next request: the first line and all headers."""
MOST_CONNECTIONS = 128
MOST_PER_ADDRESS = 32
"""Connections of one address. A browser opens up to six, and an office, or everybody behind a proxy, shares one
address. This many leave room for all 16 event streams and for as many other requests."""
MOST_FROM_LOOPBACK = MOST_CONNECTIONS - MOST_PER_ADDRESS
"""A proxy or an SSH tunnel on this host brings everybody's connections from one loopback address, so that address may
have all connections but those of one other address. Users of this host are trusted; the others come through the proxy,
which passes on complete requests only."""


class LimitedProtocol(H11Protocol):
    """A connection with a deadline for requests and a limit by address.

    It must send each request's head in time, and is closed if its address has too many others.

    The time counts from the beginning of the connection, and again from the end of each response. A request in progress
    has no deadline, since an event stream lasts as long as somebody looks.
    """

    head_seconds: ClassVar[float] = HEAD_SECONDS

    _deadline: asyncio.TimerHandle | None = None
    _caller = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Admit the connection and await a request, or close it at once."""
        super().connection_made(transport)
        if self._admit():
            self._expect_head()
            return
        log.debug("too many connections: closed one of %s", self.client)
        # It gets no answer, which would keep its file open until the request is complete. And it is no longer counted:
        # the event loop removes it only after all connections that have arrived together with it.
        self.connections.discard(self)
        transport.abort()

    def on_response_complete(self) -> None:
        """Wait for the next request, or serve one that has come."""
        self._expect_head()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting for requests."""
        if self._deadline:
            self._deadline.cancel()
        super().connection_lost(exc)

    def _admit(self) -> bool:
        """Return whether there is room for this connection, which `self.connections` contains already."""
        if self.client is None:  # the other side has closed it meanwhile
            return False
        address = ip_address(self.client[0].partition("%")[0])
        # The whole of an IPv4 address, the first half of an IPv6 address: a host can choose the other half freely.
        self._caller = address.packed[:8]
        same = sum(isinstance(other, LimitedProtocol) and other._caller == self._caller for other in self.connections)
        most = MOST_FROM_LOOPBACK if address.is_loopback else MOST_PER_ADDRESS
        return same <= most and len(self.connections) <= MOST_CONNECTIONS

    def _expect_head(self) -> None:
        """Set the deadline for the head of the next request.

        No single byte of the head can put it off.
        """
        if self._deadline:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(self.head_seconds, self._close_unless_busy)

    def _close_unless_busy(self) -> None:
        """Close the connection if no request is in progress.

        uvicorn does the same with one that has been idle for long.
        """
        if self.cycle is None or self.cycle.response_complete:
            self.timeout_keep_alive_handler()
