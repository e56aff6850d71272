"""The sockets of a port, found among the descriptors of this process: gRPC gives Python no handle on a connection.

A connection is ended by shutting down its socket, which gRPC sees as if the caller had gone. A listener drops packets
of blocked addresses by a filter in the kernel (SO_ATTACH_FILTER), so that they cannot even connect. It needs no
privilege. Where the system has no such filter, their connections are ended soon after they were made.
"""

import array
import os
import socket
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Network, ip_address
from pathlib import Path

Address = IPv4Address | IPv6Network
"""A caller's address. Of IPv6 it is the first half, since a host can choose the other half freely."""

_FOLDER = Path("/dev/fd")
_BYTES_RECEIVED = struct.Struct("=128xQ")  # the place of tcpi_bytes_received in TCP_INFO
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
    """One connection to a port, as it was when it was looked at."""

    number: int  # of its socket, which no other open socket has
    address: Address
    peer: str  # the other end, as `peer_of` writes it
    received: int  # bytes so far


def peer_of(host: str, port: int) -> str:
    """Return a name for the other end of a connection. Addresses of IPv4 look the same on a socket of IPv6."""
    found = ip_address(host.partition("%")[0])
    return f"{getattr(found, 'ipv4_mapped', None) or found}|{port}"


def address_of(host: str) -> Address:
    """Return the address by which limits count."""
    found = ip_address(host.partition("%")[0])
    if isinstance(found, IPv4Address):
        return found
    return found.ipv4_mapped or IPv6Network((int(found) >> 64 << 64, 64))


def connections_of(port: int) -> list[Connection]:
    """Return the connections to a port of this process."""
    found = []
    for own in _sockets(port):
        with suppress(OSError):
            host, caller, *_ = own.getpeername()
            data = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED.size)
            received = _BYTES_RECEIVED.unpack(data)[0] if len(data) == _BYTES_RECEIVED.size else 0
            number = os.fstat(own.fileno()).st_ino
            found.append(Connection(number, address_of(host), peer_of(host, caller), received))
    return found


def end(port: int, numbers: Iterable[int]) -> int:
    """End the connections of these numbers, and return how many there were."""
    wanted, ended = set(numbers), 0
    for own in _sockets(port) if wanted else ():
        with suppress(OSError):
            if os.fstat(own.fileno()).st_ino in wanted:
                own.shutdown(socket.SHUT_RDWR)
                ended += 1
    return ended


def block(port: int, addresses: Sequence[Address]) -> None:
    """Let the listeners of a port drop what comes from these addresses, and from no others.

    Connections that exist already are not affected.

    Args:
        port: Of this process.
        addresses: At most the first MOST_FILTERED count.

    Raises:
        OSError: If the system has no such filters.
    """
    program = dropping(addresses[:MOST_FILTERED])
    packed = array.array("B", b"".join(struct.pack("=HBBI", *instruction) for instruction in program))
    for own in _sockets(port):
        if not own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            continue
        if addresses:
            place = struct.pack("@HP", len(program), packed.buffer_info()[0])
            own.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, place)
        else:
            with suppress(FileNotFoundError):  # there was no filter
                own.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)


def dropping(addresses: Iterable[Address]) -> list[Instruction]:
    """Return the program of classic BPF that drops packets from these addresses and keeps all others."""
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


def _sockets(port: int) -> Iterator[socket.socket]:
    """Yield the sockets that belong to a port. They belong to gRPC, so none of them may be closed."""
    for entry in _FOLDER.iterdir():
        # There must be no duplicate of a descriptor here. To close a duplicate of a file drops all locks that this
        # process has on the file, and another process could then take away the log of SQLite's database.
        with suppress(OSError):  # it is no socket, or was closed meanwhile
            own = socket.socket(fileno=int(entry.name))
            try:
                if own.family in (socket.AF_INET, socket.AF_INET6) and own.getsockname()[1] == port:
                    yield own
            finally:
                own.detach()
