"""Frames between ranks of one host: over a Unix socket, past gRPC's threads, so that each wakes one thread.

The sender keeps a door, at an address made of a secret that its HELLO tells. The receiver knocks, and says the secret,
before it answers that it sees the sender's memory; so the sender, when it hears that, finds it there, or nobody. Both
see that the other is of their own user. Messages carry the prefix that gRPC gives them, 0 and their length.

Whether a peer is lost is the stream's to say, which stays open: here an end is no error.
"""

import hashlib
import hmac
import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress

from fedring.ring.errors import BadFrame
from fedring.ring.frames import MAX_MESSAGE
from fedring.ring.memory import Outbox
from fedring.ring.program import Bytes
from fedring.v1 import peer_pb2 as pb

_PREFIX = struct.Struct(">BI")
_SECRET = 16
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_BUFFER = 64 << 10  # what is read at once


class Offer:
    """The sender's memory, and its door if there can be one, as the hello tells."""

    def __init__(self, hello: pb.Head) -> None:
        self.memory = Outbox()
        hello.memory = self.memory.name
        self._door: Door | None = None
        with suppress(OSError):
            self._door = Door()
            hello.socket = self._door.secret

    def outlet(self) -> "Outlet | None":
        """The way to the receiver, if it has come to the door; to be asked for once."""
        door, self._door = self._door, None
        return door.open() if door else None

    def close(self) -> None:
        """Nothing is offered any more."""
        self.memory.close()
        if self._door is not None:
            self._door.close()


class Door:
    """Where the receiver comes to; OSError if there can be none."""

    def __init__(self) -> None:
        self.secret = os.urandom(_SECRET)
        self._socket = _new()
        try:
            self._socket.bind(_address(self.secret))
            self._socket.listen()
        except OSError:
            self._socket.close()
            raise

    def open(self) -> "Outlet | None":
        """The way to the receiver, if it is there; the door is closed, and whoever else stood there is sent away."""
        with self._socket, suppress(OSError):  # there is nobody any more
            while True:
                guest, _ = self._socket.accept()
                guest.setblocking(False)
                if _is_ours(guest) and hmac.compare_digest(_said(guest), self.secret):
                    guest.setblocking(True)
                    return Outlet(guest)
                guest.close()
        return None

    def close(self) -> None:
        """Nobody comes any more."""
        self._socket.close()


class Outlet:
    """The sender's end. What is sent to a receiver that is gone is lost."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._using, self._ending = threading.Lock(), threading.Lock()

    def offer(self, message: Bytes) -> memoryview:
        """What there was no room for; the rest is on its way. Never waits."""
        data = memoryview(message)
        with self._using:
            try:
                return data[self._socket.send(data, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                return data
            except OSError:
                return data[:0]

    def push(self, message: Bytes) -> None:
        """The message is on its way, once there was room for it."""
        with self._using, suppress(OSError):
            self._socket.sendall(message)

    def cut(self) -> None:
        """The receiver hears the end, and nobody waits for room any more."""
        with self._ending, suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Nothing of it is left."""
        self.cut()
        with self._using, self._ending:
            self._socket.close()


class Inlet:
    """The receiver's end; OSError unless a door of our own user is there."""

    def __init__(self, secret: bytes) -> None:
        self._ending = threading.Lock()
        self._socket = _new()
        try:
            self._socket.connect(_address(secret))
            if not _is_ours(self._socket):
                raise PermissionError("the socket is another user's")
            self._socket.send(secret)
            self._socket.setblocking(True)
        except OSError:
            self._socket.close()
            raise

    def messages(self) -> Iterator[bytes]:
        """What comes, until the sender or `end` ends it."""
        with self._socket.makefile("rb", _BUFFER) as stream, suppress(OSError):
            while len(prefix := stream.read(_PREFIX.size)) == _PREFIX.size:
                compressed, length = _PREFIX.unpack(prefix)
                if compressed or length > MAX_MESSAGE:
                    raise BadFrame(f"a message of {length} bytes came over the socket")
                message = stream.read(length)
                if len(message) < length:
                    return
                yield message

    def end(self) -> None:
        """What has come can still be read, and nothing comes after it."""
        with self._ending, suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        """Nothing of it is left."""
        with self._ending:
            self._socket.close()


def prefixed(message: bytes) -> bytes:
    """The message as it goes over a socket."""
    return _PREFIX.pack(0, len(message)) + message


def _new() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.setblocking(False)
    return made


def _address(secret: bytes) -> str:
    """A name in the kernel alone, which all can see; that of no other program's socket."""
    return f"\0fedring-{hashlib.sha256(secret).hexdigest()}"


def _is_ours(connected: socket.socket) -> bool:
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.getuid())


def _said(guest: socket.socket) -> bytes:
    """What the guest has said so far."""
    try:
        return guest.recv(_SECRET)
    except OSError:
        return b""
