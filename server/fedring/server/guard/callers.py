"""What each connection and each address has asked of a port, and who therefore gets nothing for a while.

A call that its caller cancels soon costs the caller two small frames, and the server all that a call costs. So a
connection that cancels more than it lets end is ended, and its address is blocked. Nothing here performs I/O.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Protocol
from urllib.parse import unquote

from fedring.rpc.errors import Overloaded
from fedring.server.guard.sockets import Address, Connection, address_of, peer_of

WINDOW_SECONDS = 10.0
MOST_RESETS = 100
"""Calls that a connection may cancel within a window, even if it lets none end."""
MOST_IDLE_BYTES = 1 << 16
"""Bytes that a connection may send between two looks while it makes no call. A handshake takes a tenth of it."""
BLOCK_SECONDS = 30.0
_MOST_KNOWN = 1 << 16


@dataclass(slots=True)
class _Account:
    """A connection, by what it has asked."""

    address: Address | None  # None for a Unix socket
    open_calls: int = 0
    window: float = 0.0  # when it began
    begun: int = 0  # calls of this window
    reset: int = 0  # of these, how many were cancelled
    calls: int = 0  # since the connection was made
    seen: tuple[int, int] = (0, 0)  # bytes and calls, when it was last looked at


@dataclass(frozen=True, slots=True)
class Call:
    """A call in progress, for `Callers.end`."""

    name: str  # of its connection
    account: _Account
    window: float


class Tally(Protocol):
    """Counts connections that are ended because of what their callers did."""

    ended: int


@dataclass
class Callers:
    """The callers of one port, by connection and by address.

    Args:
        most_calls: Calls of one address that may be in progress at once.
        most_connections: Connections of one address that may be open at once.
        exempt: Addresses and networks to which no limit applies.
        tally: Where connections that are ended are counted.
    """

    most_calls: int
    most_connections: int
    exempt: Sequence[str] = ()
    tally: Tally | None = None
    _accounts: OrderedDict[str, _Account] = field(default_factory=OrderedDict)
    _open_calls: dict[Address, int] = field(default_factory=dict)
    _blocked: dict[Address, float] = field(default_factory=dict)  # until when
    _full: set[Address] = field(default_factory=set)
    _guilty: set[str] = field(default_factory=set)  # connections that are to be ended
    _first_seen: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._networks = [ip_network(text) for text in self.exempt]

    def begin(self, peer: str, now: float) -> Call:
        """Admit a call.

        Args:
            peer: The other end of the connection, as gRPC writes it.
            now: In seconds, of a clock that only goes forward.

        Raises:
            Overloaded: If the connection has cancelled too many calls ("too_many_resets"), or too many calls of the
                address are in progress ("too_many_calls").
        """
        name, address = named(peer)
        account = self._account(name, address)
        address = account.address
        if now - account.window > WINDOW_SECONDS:
            account.window, account.begun, account.reset = now, 0, 0
        account.begun += 1
        account.calls += 1
        if address is not None:
            if name in self._guilty:
                text = f"this connection cancels more calls than it lets end: come back in {BLOCK_SECONDS:g} s"
                raise Overloaded(text, reason="too_many_resets")
            if self._open_calls.get(address, 0) >= self.most_calls:
                self._note_reset(name, account, now)  # who goes on regardless is treated alike
                text = f"{self.most_calls} calls of {address} are in progress: see exempt_addresses"
                raise Overloaded(text, reason="too_many_calls")
            self._open_calls[address] = self._open_calls.get(address, 0) + 1
        account.open_calls += 1
        return Call(name, account, account.window)

    def end(self, call: Call, now: float, *, reset: bool) -> bool:
        """Note that a call has ended.

        Args:
            call: The call.
            now: As in `begin`.
            reset: Whether its caller has cancelled it.

        Returns:
            Whether this was one too many, so that the connection is to be ended now.
        """
        account = call.account
        account.open_calls -= 1
        address = account.address
        if address is None:
            return False
        self._open_calls[address] -= 1
        if not self._open_calls[address]:
            del self._open_calls[address]
        # A connection that breaks cancels all its calls. Those that have lasted for some time are no resets.
        if not reset or call.window != account.window:
            return False
        return self._note_reset(call.name, account, now)

    def look(self, connections: Iterable[Connection], now: float) -> list[Connection]:
        """Look at all connections of the port, and return those that are to be ended.

        Beyond most_connections of one address, the newest end, those without a call first.
        """
        there = sorted(connections, key=lambda each: self._first_seen.setdefault(each.number, now))
        numbers = {each.number for each in there}
        self._first_seen = {number: at for number, at in self._first_seen.items() if number in numbers}
        doomed: list[Connection] = []
        by_address: dict[Address, list[Connection]] = {}
        for each in there:
            if self._is_exempt(each.address):
                continue
            if self._talks_idly(each):
                self._accuse(each.peer, each.address, now)
            if each.peer in self._guilty or self._is_late(each, now):
                doomed.append(each)
            else:
                by_address.setdefault(each.address, []).append(each)
        for same in by_address.values():
            same.sort(key=lambda each: not self._calls(each))
            doomed += same[self.most_connections :]
        self._full = {address for address, same in by_address.items() if len(same) >= self.most_connections}
        self._guilty &= {each.peer for each in there}
        if self.tally:
            self.tally.ended += len(doomed)
        return doomed

    def blocked(self, now: float) -> list[Address]:
        """Return the addresses that may not make new connections now, those that did wrong first."""
        self._blocked = {address: until for address, until in self._blocked.items() if until > now}
        return [*self._blocked, *(self._full - self._blocked.keys())]

    def _note_reset(self, name: str, account: _Account, now: float) -> bool:
        """Count a reset, and return whether it was one too many."""
        account.reset += 1
        if account.reset <= MOST_RESETS or 2 * account.reset <= account.begun or name in self._guilty:
            return False
        if account.address is not None:
            self._accuse(name, account.address, now)
        return True

    def _accuse(self, name: str, address: Address, now: float) -> None:
        self._guilty.add(name)
        self._blocked[address] = now + BLOCK_SECONDS

    def _is_late(self, each: Connection, now: float) -> bool:
        """Return whether a connection was made while its address was blocked. What was open before stays."""
        until = self._blocked.get(each.address)
        if until is None or now >= until or self._calls(each):
            return False
        return self._first_seen[each.number] >= until - BLOCK_SECONDS

    def _talks_idly(self, seen: Connection) -> bool:
        """Return whether a connection has sent much since the last look, but no call: pings, or settings."""
        account = self._account(seen.peer, seen.address)
        received, calls = account.seen
        account.seen = (seen.received, account.calls)
        return not account.open_calls and account.calls == calls and seen.received - received > MOST_IDLE_BYTES

    def _calls(self, connection: Connection) -> int:
        account = self._accounts.get(connection.peer)
        return account.calls if account else 0

    def _account(self, name: str, address: Address | None) -> _Account:
        if name not in self._accounts:
            limited = address is not None and not self._is_exempt(address)
            self._accounts[name] = _Account(address if limited else None)
            if len(self._accounts) > _MOST_KNOWN:
                self._forget_one()
        return self._accounts[name]

    def _forget_one(self) -> None:
        """Forget the oldest connection that has no call in progress."""
        oldest = next((peer for peer, account in self._accounts.items() if not account.open_calls), None)
        if oldest is not None:
            del self._accounts[oldest]

    def _is_exempt(self, address: Address) -> bool:
        return any(_holds(network, address) for network in self._networks)


def _holds(network: IPv4Network | IPv6Network, address: Address) -> bool:
    if isinstance(address, IPv6Network):
        return isinstance(network, IPv6Network) and network.overlaps(address)
    return isinstance(network, IPv4Network) and address in network


def named(peer: str) -> tuple[str, Address | None]:
    """Return the name and the address of a connection that gRPC names "ipv4:HOST:PORT" or "ipv6:%5BHOST%5D:PORT".

    The name is that of `sockets.peer_of`. There is no address for the end of a Unix socket.
    """
    kind, _, rest = peer.partition(":")
    host, _, port = unquote(rest).rpartition(":")
    if kind not in ("ipv4", "ipv6"):
        return peer, None
    host = host.strip("[]")
    return peer_of(host, int(port)), address_of(host)
