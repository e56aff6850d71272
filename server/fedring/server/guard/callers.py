"""Accounts of connections and addresses, and the limits on them.

An account holds the requests made to a port; a caller beyond a limit gets nothing for a while.

A call that its caller cancels soon costs the caller two small frames, and the server all that a call costs. So a
connection that cancels more than it lets end is ended, and its address is blocked. Nothing here performs I/O.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Network, ip_network
from operator import itemgetter
from urllib.parse import unquote

from fedring.rpc.errors import Overloaded
from fedring.server.guard.auth import AuthCounts
from fedring.server.guard.sockets import Address, Connection, address_of, peer_of

WINDOW_SECONDS = 10.0
MOST_RESETS = 100
"""Calls that a connection may cancel within a window, even if it lets none end."""
MOST_IDLE_BYTES = 1 << 16
"""Bytes that a connection without a call may send, and have answered, between two looks.

A handshake takes a tenth of it. An upload that has just begun, or was refused, brings megabytes but few answers.
"""
MOST_UNASKED_BYTES = 1 << 24
"""Bytes that it may send if they are not answered: four times what gRPC takes in before a handler reads."""
BLOCK_SECONDS = 30.0


@dataclass(slots=True)
class _Account:
    """The account of a connection's requests."""

    address: Address | None  # None for a Unix socket, and for an exempt address
    open_calls: int = 0
    window: float = 0.0  # when it began
    begun: int = 0  # calls of this window
    reset: int = 0  # of these, how many were cancelled
    calls: int = 0  # since the connection was made
    guilty: bool = False  # so it is to be ended
    first_seen: float | None = None  # by a look
    seen: tuple[int, int, int] = (0, 0, 0)  # traffic and calls, at the last look at which no call was open


@dataclass(frozen=True, slots=True)
class Call:
    """A call in progress, for `Callers.end`."""

    account: _Account
    began: float


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
    tally: AuthCounts | None = None
    _accounts: dict[str, _Account] = field(default_factory=dict)  # of open connections, by name
    _open_calls: dict[Address, int] = field(default_factory=dict)
    _blocked: dict[Address, float] = field(default_factory=dict)  # until when
    _full: set[Address] = field(default_factory=set)

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
            if account.guilty:
                text = f"this connection cancels more calls than it lets end: come back in {BLOCK_SECONDS:g} s"
                raise Overloaded(text, reason="too_many_resets")
            if self._open_calls.get(address, 0) >= self.most_calls:
                self._note_reset(account, address, now)  # who goes on regardless is treated alike
                text = f"{self.most_calls} calls of {address} are in progress: see exempt_addresses"
                raise Overloaded(text, reason="too_many_calls")
            self._open_calls[address] = self._open_calls.get(address, 0) + 1
        account.open_calls += 1
        return Call(account, now)

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
        if not reset or call.began < account.window or now - call.began > WINDOW_SECONDS:
            return False
        return self._note_reset(account, address, now)

    def look(self, connections: Sequence[Connection], now: float) -> list[Connection]:
        """Look at all connections, and return those to be ended.

        Beyond most_connections of one address, the newest end, those without a call first.
        """
        there = {each.peer for each in connections}
        self._accounts = {
            name: account for name, account in self._accounts.items() if account.open_calls or name in there
        }
        doomed: list[Connection] = []
        by_address: dict[Address, list[tuple[bool, float, Connection]]] = {}
        for each in connections:
            account = self._account(each.peer, each.address)
            if account.address is None:
                continue
            if account.first_seen is None:
                account.first_seen = now
            if _talks_idly(account, each):
                self._accuse(account, each.address, now)
            if account.guilty or self._is_late(account, account.first_seen, each.address, now):
                doomed.append(each)
            else:
                by_address.setdefault(each.address, []).append((not account.calls, account.first_seen, each))
        # Connections with calls sort first, so a flood of idle ones cannot push out a client at work.
        for same in by_address.values():
            same.sort(key=itemgetter(0, 1))
            doomed += [each for _, _, each in same[self.most_connections :]]
        self._full = {address for address, same in by_address.items() if len(same) >= self.most_connections}
        if self.tally:
            self.tally.ended += len(doomed)
        return doomed

    def blocked(self, now: float) -> list[Address]:
        """Return the addresses that may not make new connections now.

        Those that did wrong first come first.
        """
        self._blocked = {address: until for address, until in self._blocked.items() if until > now}
        return [*self._blocked, *(self._full - self._blocked.keys())]

    def _note_reset(self, account: _Account, address: Address, now: float) -> bool:
        """Count a reset, and return whether it was one too many."""
        account.reset += 1
        if account.reset <= MOST_RESETS or 2 * account.reset <= account.begun or account.guilty:
            return False
        self._accuse(account, address, now)
        return True

    def _accuse(self, account: _Account, address: Address, now: float) -> None:
        account.guilty = True
        self._blocked[address] = now + BLOCK_SECONDS

    def _is_late(self, account: _Account, first_seen: float, address: Address, now: float) -> bool:
        """Return whether a connection was made while its address was blocked.

        Connections that were open before stay.
        """
        until = self._blocked.get(address)
        if until is None or now >= until or account.calls:
            return False
        return first_seen >= until - BLOCK_SECONDS

    def _account(self, name: str, address: Address | None) -> _Account:
        if name not in self._accounts:
            limited = address is not None and not self._is_exempt(address)
            self._accounts[name] = _Account(address if limited else None)
        return self._accounts[name]

    def _is_exempt(self, address: Address) -> bool:
        return any(_holds(network, address) for network in self._networks)


def _talks_idly(account: _Account, seen: Connection) -> bool:
    """Return whether a connection sends much without making a call.

    Such are pings, or settings. It counts since the last look.
    """
    if account.open_calls:
        return False
    before, account.seen = account.seen, (*seen.traffic(), account.calls)
    received, answered, calls = (after - so_far for after, so_far in zip(account.seen, before, strict=True))
    return not calls and (min(received, answered) > MOST_IDLE_BYTES or received > MOST_UNASKED_BYTES)


def _holds(network: IPv4Network | IPv6Network, address: Address) -> bool:
    if isinstance(address, IPv6Network):
        return isinstance(network, IPv6Network) and network.overlaps(address)
    return isinstance(network, IPv4Network) and address in network


def named(peer: str) -> tuple[str, Address | None]:
    """Return a connection's name and address from gRPC's name for it.

    gRPC's name is "ipv4:HOST:PORT" or "ipv6:%5BHOST%5D:PORT".

    The name is that of `sockets.peer_of`. There is no address for the end of a Unix socket.
    """
    kind, _, rest = peer.partition(":")
    host, _, port = unquote(rest).rpartition(":")
    if kind not in ("ipv4", "ipv6"):
        return peer, None
    host = host.strip("[]")
    return peer_of(host, int(port)), address_of(host)
