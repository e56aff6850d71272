"""What callers may ask of a port: resets, calls at once, connections, and addresses to which no limit applies."""

from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Network, ip_address

import pytest

from fedring.rpc.errors import Overloaded
from fedring.server.guard.callers import (
    BLOCK_SECONDS,
    MOST_IDLE_BYTES,
    MOST_RESETS,
    MOST_UNASKED_BYTES,
    WINDOW_SECONDS,
    Callers,
    named,
)
from fedring.server.guard.sockets import Connection, Traffic, address_of, peer_of

HOST = "10.0.0.7"
PEER = f"ipv4:{HOST}:1000"


@dataclass(frozen=True, slots=True)
class Line(Connection):
    """A connection whose traffic is given."""

    received: int = 0
    answered: int = 0

    def traffic(self) -> Traffic:
        return self.received, self.answered


def connection(port: int, *, host: str = HOST, received: int = 0, answered: int = 0) -> Connection:
    """Return a connection whose socket has the number of its port."""
    return Line(0, port, address_of(host), peer_of(host, port), received, answered)


def reset(callers: Callers, times: int, *, peer: str = PEER, now: float = 0.0) -> int:
    """Cancel this many calls, and return how often a connection was to be ended."""
    return sum(callers.end(callers.begin(peer, now), now, reset=True) for _ in range(times))


def ask(callers: Callers, times: int, *, peer: str = PEER, now: float = 0.0) -> None:
    """Make this many calls that end as they should."""
    for _ in range(times):
        callers.end(callers.begin(peer, now), now, reset=False)


def test_a_connection_that_cancels_more_than_it_lets_end_is_ended_and_its_address_blocked_for_a_while() -> None:
    callers = Callers(10, 10)
    assert reset(callers, MOST_RESETS) == 0
    assert reset(callers, 1) == 1
    with pytest.raises(Overloaded) as refused:
        callers.begin(PEER, 0.0)
    assert refused.value.reason == "too_many_resets"
    assert callers.look([connection(1000), connection(1001, host="10.0.0.8")], 0.0) == [connection(1000)]
    assert callers.blocked(0.0) == [IPv4Address(HOST)]
    assert callers.blocked(BLOCK_SECONDS) == []


def test_a_connection_that_lets_as_many_calls_end_may_cancel_any_number() -> None:
    callers = Callers(10, 10)
    for _ in range(10):
        ask(callers, MOST_RESETS)
        assert reset(callers, MOST_RESETS) == 0
    assert callers.blocked(0.0) == []


@pytest.mark.parametrize(
    ("began", "asked", "broke"),
    [
        (0.0, WINDOW_SECONDS + 1, WINDOW_SECONDS + 1),
        (0.0, None, WINDOW_SECONDS + 1),
        (WINDOW_SECONDS - 1, WINDOW_SECONDS + 1, WINDOW_SECONDS + 2),
    ],
)
def test_a_connection_that_breaks_with_many_old_calls_is_no_flood(
    began: float, asked: float | None, broke: float
) -> None:
    callers = Callers(10 * MOST_RESETS, 10)
    calls = [callers.begin(PEER, began) for _ in range(5 * MOST_RESETS)]
    if asked is not None:
        ask(callers, 1, now=asked)
    assert not any(callers.end(call, broke, reset=True) for call in calls)
    assert callers.blocked(broke) == []


def test_one_address_has_so_many_calls_at_once_over_all_its_connections() -> None:
    callers = Callers(3, 10)
    calls = [callers.begin(f"ipv4:{HOST}:{port}", 0.0) for port in (1, 2, 3)]
    with pytest.raises(Overloaded, match="exempt_addresses") as refused:
        callers.begin(PEER, 0.0)
    assert refused.value.reason == "too_many_calls"
    ask(callers, 1, peer="ipv4:10.0.0.8:1")
    callers.end(calls[0], 0.0, reset=False)
    callers.begin(PEER, 0.0)


def test_beyond_its_number_the_connections_of_an_address_end_those_without_a_call_first() -> None:
    callers = Callers(10, 2)
    callers.look([connection(1), connection(2)], 0.0)
    assert callers.blocked(0.0) == [IPv4Address(HOST)]  # it has as many as it may
    ask(callers, 1, peer=f"ipv4:{HOST}:3")
    other = connection(9, host="10.0.0.8")
    assert callers.look([connection(1), connection(2), connection(3), other], 1.0) == [connection(2)]
    assert callers.look([connection(1), other], 2.0) == []
    assert callers.blocked(2.0) == []


def test_what_was_open_before_an_address_was_blocked_stays_and_what_comes_later_goes() -> None:
    callers = Callers(10, 10)
    assert callers.look([connection(1), connection(1000)], 0.0) == []
    reset(callers, MOST_RESETS + 1, now=1.0)
    assert callers.look([connection(1), connection(2), connection(1000)], 2.0) == [connection(2), connection(1000)]
    assert callers.look([connection(3)], 2.0 + BLOCK_SECONDS) == []


def test_a_connection_that_sends_much_and_asks_nothing_is_ended() -> None:
    def line(times: int) -> Connection:
        return connection(1000, received=times * MOST_IDLE_BYTES, answered=times * MOST_IDLE_BYTES)

    callers = Callers(10, 10)
    assert callers.look([line(1)], 0.0) == []
    call = callers.begin(PEER, 0.0)
    assert callers.look([line(5)], 1.0) == []  # its call brings bytes
    callers.end(call, 1.0, reset=False)
    assert callers.look([line(9)], 2.0) == []
    assert callers.look([line(11)], 3.0) == [line(11)]
    assert callers.blocked(3.0) == [IPv4Address(HOST)]


def test_the_rest_of_an_upload_that_was_refused_and_of_a_download_that_was_served_are_no_flood() -> None:
    callers = Callers(10, 10)
    ask(callers, 1)
    assert callers.look([connection(1000)], 0.0) == []
    assert callers.look([connection(1000, received=MOST_UNASKED_BYTES)], 1.0) == []
    assert callers.look([connection(1000, received=MOST_UNASKED_BYTES, answered=1 << 30)], 2.0) == []
    much = connection(1000, received=2 * MOST_UNASKED_BYTES + 1, answered=1 << 30)
    assert callers.look([much], 3.0) == [much]


def test_what_is_known_of_a_connection_is_forgotten_with_it() -> None:
    callers = Callers(10, 10)
    held = callers.begin(PEER, 0.0)
    for port in range(5000):
        ask(callers, 1, peer=f"ipv4:{HOST}:{port}")
    callers.look([connection(7)], 0.0)
    assert len(callers._accounts) == 2
    callers.end(held, 1.0, reset=True)
    callers.look([], 1.0)
    assert not callers._accounts
    assert not callers._open_calls


@pytest.mark.parametrize(
    ("exempt", "host", "peer"),
    [
        ("10.0.0.7", HOST, PEER),
        ("10.0.0.0/8", HOST, PEER),
        ("fd00::/8", "fd00::5", "ipv6:%5Bfd00::5%5D:1000"),
        ("fd00::5", "fd00::5", "ipv6:%5Bfd00::5%5D:1000"),
    ],
)
def test_no_limit_applies_to_an_exempt_address(exempt: str, host: str, peer: str) -> None:
    callers = Callers(1, 1, [exempt])
    assert reset(callers, 2 * MOST_RESETS, peer=peer) == 0
    for _ in range(5):
        callers.begin(peer, 0.0)
    lines = [connection(port, host=host, received=1 << 30, answered=1 << 30) for port in range(9)]
    assert callers.look(lines, 0.0) == []
    assert callers.blocked(0.0) == []


def test_the_other_end_of_a_unix_socket_has_no_address_and_no_limit() -> None:
    callers = Callers(1, 1)
    assert named("unix:") == ("unix:", None)
    for _ in range(5):
        callers.begin("unix:", 0.0)
    assert reset(callers, 2 * MOST_RESETS, peer="unix:") == 0


def test_an_address_of_ipv4_is_the_same_on_a_socket_of_ipv6_and_one_of_ipv6_counts_with_its_first_half() -> None:
    assert address_of("::ffff:10.0.0.7") == address_of("10.0.0.7") == ip_address("10.0.0.7")
    assert peer_of("::ffff:10.0.0.7", 5) == peer_of("10.0.0.7", 5)
    assert address_of("fd00::1:2") == address_of("fd00::ffff:0:0:1%eth0") == IPv6Network("fd00::/64")
    assert named("ipv6:%5Bfd00::1%5D:77") == (peer_of("fd00::1", 77), address_of("fd00::1"))
