"""The sockets of a port, found among this process's descriptors.

gRPC gives Python no handle on a connection.

A connection is ended by shutting down its socket, which gRPC sees as if the caller had gone. A listener drops packets
of blocked addresses by a filter in the kernel (SO_ATTACH_FILTER), so that they cannot even connect. It needs no
privilege. Where the system has no such filter, their connections are ended soon after they were made.
"""

import array
import os
import socket
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Network, ip_address

Address = IPv4Address | IPv6Network
"""A caller's address. Of IPv6 it is the first half, since a host can choose the other half freely."""

Traffic = tuple[int, int]
"""Bytes that a connection has brought, and those of the answers that have arrived."""

_FOLDER = "/dev/fd"
_TRAFFIC = struct.Struct("=120xQQ")  # the places of tcpi_bytes_acked and tcpi_bytes_received in TCP_INFO
_ATTACH_FILTER, _DETACH_FILTER = 26, 27  # of Linux; Python has no names for them
_LOAD_BYTE, _LOAD_WORD, _SHIFT_RIGHT, _JUMP, _JUMP_IF_EQUAL, _RETURN = 0x30, 0x20, 0x74, 0x05, 0x15, 0x06
_NETWORK_HEADER = 0xFFF00000  # SKF_NET_OFF
_VERSION, _SOURCE_4, _SOURCE_6 = 0, 12, 8  # offsets in the header of IP
_KEEP, _DROP = 0xFFFFFFFF, 0
MOST_FILTERED = 500
"""Addresses that one filter can hold: the kernel takes 4,096 instructions."""

Instruction = tuple[int, int, int, int]  # code, how far to jump if true, and if false, and the operand


@dataclass(frozen=True, slots=True)
class Connection:
    """One connection to a port."""

    fd: int
    number: int  # of its socket, which no other open socket has
    address: Address
    peer: str  # the other end, as `peer_of` writes it

    def traffic(self) -> Traffic:
        """Return its traffic so far; none once it has gone."""
        with suppress(OSError), _borrowed(self.fd) as own:
            data = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TRAFFIC.size)
            if len(data) == _TRAFFIC.size and self._is(own):
                answered, received = _TRAFFIC.unpack(data)
                return received, answered
        return 0, 0

    def end(self) -> None:
        """End it, unless it has gone."""
        with suppress(OSError), _borrowed(self.fd) as own:
            if self._is(own):
                own.shutdown(socket.SHUT_RDWR)

    def _is(self, own: socket.socket) -> bool:
        """Whether the descriptor is still this connection's."""
        return os.fstat(own.fileno()).st_ino == self.number


def peer_of(host: str, port: int) -> str:
    """Return a name for the other end of a connection.

    Addresses of IPv4 look the same on a socket of IPv6.
    """
    found = ip_address(host.partition("%")[0])
    return f"{getattr(found, 'ipv4_mapped', None) or found}|{port}"


def address_of(host: str) -> Address:
    """Return the address by which limits count."""
    found = ip_address(host.partition("%")[0])
    if isinstance(found, IPv4Address):
        return found
    return found.ipv4_mapped or IPv6Network((int(found) >> 64 << 64, 64))


class Port:
    """The sockets of a port of this process.

    A socket is asked once whose it is: to ask 2,000 of them took a third of a second.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._known: dict[int, tuple[tuple[int, int], Connection | None]] = {}  # by descriptor, with its inode

    def connections(self) -> list[Connection]:
        """Look at all descriptors, and return the connections.

        Raises:
            OSError: If the descriptors cannot be listed, for example because there is none left.
        """
        found = {}
        with os.scandir(_FOLDER) as entries:
            for entry in entries:
                fd = int(entry.name)
                try:
                    status = os.fstat(fd)
                except OSError:  # it was closed meanwhile
                    continue
                inode = status.st_dev, status.st_ino
                known = self._known.get(fd)
                found[fd] = known if known and known[0] == inode else (inode, self._identify(fd, status.st_ino))
        self._known = found
        return [connection for _, connection in found.values() if connection]

    def block(self, addresses: Sequence[Address]) -> None:
        """Let the listeners drop packets from these addresses only.

        The listeners are those that the last look has seen.

        Connections that exist already are not affected.

        Args:
            addresses: At most the first MOST_FILTERED count.

        Raises:
            OSError: If the system has no such filters.
        """
        program = dropping(addresses[:MOST_FILTERED])
        packed = array.array("B", b"".join(struct.pack("=HBBI", *instruction) for instruction in program))
        for fd in [fd for fd, (_, connection) in self._known.items() if connection is None and self._listens(fd)]:
            with _borrowed(fd) as own:
                if addresses:
                    place = struct.pack("@HP", len(program), packed.buffer_info()[0])
                    own.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, place)
                else:
                    with suppress(FileNotFoundError):  # there was no filter
                        own.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)

    def _identify(self, fd: int, number: int) -> Connection | None:
        with suppress(OSError), _borrowed(fd) as own:  # it is no socket, or a listener, which has no other end
            if self._owns(own):
                host, caller, *_ = own.getpeername()
                return Connection(fd, number, address_of(host), peer_of(host, caller))
        return None

    def _listens(self, fd: int) -> bool:
        with suppress(OSError), _borrowed(fd) as own:
            return self._owns(own) and bool(own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
        return False

    def _owns(self, own: socket.socket) -> bool:
        return own.family in (socket.AF_INET, socket.AF_INET6) and bool(own.getsockname()[1] == self.number)


def dropping(addresses: Iterable[Address]) -> list[Instruction]:
    """Return a classic BPF program that drops packets from these addresses.

    It keeps those of all others.
    """
    old, new = [], []
    for address in addresses:
        if isinstance(address, IPv4Address):
            old += [(_JUMP_IF_EQUAL, 0, 1, int(address)), (_RETURN, 0, 0, _DROP)]
        else:
            half = int(address.network_address) >> 64
            new += [
                (_LOAD_WORD, 0, 0, _NETWORK_HEADER + _SOURCE_6),
                (_JUMP_IF_EQUAL, 0, 3, half >> 32),
                (_LOAD_WORD, 0, 0, _NETWORK_HEADER + _SOURCE_6 + 4),
                (_JUMP_IF_EQUAL, 0, 1, half & 0xFFFFFFFF),
                (_RETURN, 0, 0, _DROP),
            ]
    # A conditional jump reaches 255 instructions, so the way to the addresses of IPv6 is an unconditional one.
    return [
        (_LOAD_BYTE, 0, 0, _NETWORK_HEADER + _VERSION),
        (_SHIFT_RIGHT, 0, 0, 4),
        (_JUMP_IF_EQUAL, 1, 0, 4),
        (_JUMP, 0, 0, len(old) + 2),
        (_LOAD_WORD, 0, 0, _NETWORK_HEADER + _SOURCE_4),
        *old,
        (_RETURN, 0, 0, _KEEP),
        *new,
        (_RETURN, 0, 0, _KEEP),
    ]


@contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket]:
    """Lend a socket of gRPC, which must not be closed.

    Raises OSError if it is no socket.

    There must be no duplicate of a descriptor here. To close a duplicate of a file drops all locks that this process
    has on the file, and another process could then take away the log of SQLite's database.
    """
    own = socket.socket(fileno=fd)
    try:
        yield own
    finally:
        own.detach()
