"""A link between two ranks of one host.

It is a stream whose frames move to a Unix socket, while large payloads lie in shared memory.

gRPC's way through Python from one rank to another wakes six threads; the socket wakes one. The sender listens at an
address that is made of a secret, and its HELLO tells the secret. The receiver connects, and says the secret there,
before it answers HELLO with MAPPED. So when the sender hears MAPPED, it finds the receiver waiting, or nobody. Each end
checks that the other belongs to its own user. Messages on the socket carry the prefix that gRPC gives them: 0 and their
length.

The stream stays open, and alone tells whether a peer is lost: the end of a socket is no error.
"""

import hashlib
import hmac
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import grpc

from fedring.ring.errors import BadFrame
from fedring.ring.transport.channels import Pulse
from fedring.ring.transport.frames import MAX_MESSAGE, Bytes, write
from fedring.ring.transport.interface import Outgoing, Traffic
from fedring.ring.transport.memory import MIN_SHARED_BYTES, Outbox
from fedring.ring.transport.stream import GrpcStream
from fedring.v1 import peer_pb2 as pb

_PREFIX = struct.Struct(">BI")
_SECRET = 16  # bytes
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_BUFFER = 64 << 10  # bytes that are read at once
_MAX_DIRECT = 1 << 20  # bytes of a payload that the caller of `send` copies itself; larger ones wait for gRPC's thread


class SameHostTransport(GrpcStream):
    """A `Transport` to a peer of this host.

    It is a `GrpcStream` until the peer has opened the memory and the socket that HELLO offers.

    After that, a frame that finds room in the socket is sent by the thread that brings it. The others wait in the queue
    for the thread with which gRPC asks for messages: it feeds the socket from then on.
    """

    def __init__(
        self,
        channel: grpc.Channel,
        pulse: Pulse,
        *,
        me: str,
        checksum: bool,
        traffic: Traffic,
        ended: Callable[[str], None],
    ) -> None:
        super().__init__(channel, pulse, me=me, checksum=checksum, traffic=traffic, ended=ended)
        self.moved = False  # whether the stream's last frame, MOVED, is written
        self._offer: Offer | None = Offer()
        self._outbox: Outbox | None = None  # once the peer has mapped it
        self._socket: SocketSender | None = None  # once the peer has connected
        self._queued = 0  # items that are in the queue, or taken from it and not yet sent
        self._order = threading.Lock()  # of frames: nobody waits while holding it

    def open(self, hello: pb.Head) -> None:
        """Send HELLO with the offer, and begin to connect."""
        if self._offer is not None:
            self._offer.describe(hello)
        super().open(hello)

    def send(self, frame: Outgoing) -> None:
        """Write a frame to the socket, or queue it for gRPC's thread."""
        with self._order:
            if not self._is_free_for(frame):
                self._enqueue(frame)
                return
            written = self._write(frame)
        if written and frame.sent is not None:
            frame.sent()

    def send_at_once(self, frame: Outgoing) -> bool:
        """Write a frame to the socket, if no other one waits."""
        with self._order:
            return self._is_free_for(frame) and self._write(frame)

    def peer_mapped(self, moved: pb.Head) -> None:
        """Use the memory from now on, and the socket after `moved`.

        The socket is used only if the peer has connected to it.
        """
        with self._order:
            if self._offer is None or self._outbox is not None:
                return
            self._outbox = self._offer.memory
            self._socket = self._offer.accept()
        if self._socket is not None:
            self.send(Outgoing(moved))

    def cut(self) -> None:
        """End the stream and the socket at once."""
        super().cut()
        if self._socket is not None:
            self._socket.cut()

    def close(self) -> None:
        """Close the stream, the socket and the memory."""
        super().close()
        with self._order:  # the peer may just have opened the offer
            if self._offer is not None:
                self._offer.close()
            self._offer = self._outbox = None  # gRPC may keep this object, and must not keep the memory
            if self._socket is not None:
                self._socket.close()

    def _is_free_for(self, frame: Outgoing) -> bool:
        """Return whether the caller, who holds the order, may write a frame."""
        return self.moved and not self._queued and self._socket is not None and len(frame.payload) <= _MAX_DIRECT

    def _write(self, frame: Outgoing) -> bool:
        """Write a frame to the socket, and queue the rest.

        Returns:
            Whether its payload has been copied, and not dropped.
        """
        message = self._encode(frame)
        if message is None or self._socket is None:
            return False
        if rest := self._socket.offer(message):
            self._enqueue(rest)
        return True

    def _enqueue(self, item: Outgoing | memoryview) -> None:
        """Queue an item for gRPC's thread. The caller holds the order."""
        self._queued += 1
        self._queue.put(item)

    def _next_message(self) -> Bytes | None:
        """Wait for the stream's next message; meanwhile feed the socket.

        Returns:
            The message, or None after the last one.
        """
        while (item := self._queue.get()) is not None:
            to_socket = self._socket if self.moved else None  # asked before MOVED is written, which is the stream's
            message = self._written(item)
            del item  # the payload is free before the message is on its way
            if to_socket is not None and message is not None:
                to_socket.push(message)
            with self._order:
                self._queued -= 1
            if to_socket is None and message is not None:
                return message
        return None

    def _encode(self, frame: Outgoing) -> bytes | None:
        message = super()._encode(frame)
        if message is None:
            return None
        if self.moved:
            self._traffic.socket_frames += 1
            return prefixed(message)
        self.moved = frame.head.kind == pb.FRAME_KIND_MOVED
        return message

    def _message(self, frame: Outgoing) -> bytes:
        head, payload = frame.head, frame.payload
        if self._outbox is not None and len(payload) >= MIN_SHARED_BYTES:
            slot = self._outbox.put(payload)
            if slot is not None:
                head.slot, head.length = slot, len(payload)
                self._traffic.shared_bytes += len(payload)
                return write(head)
        return super()._message(frame)


class Offer:
    """The sender's memory, and its listening socket if there is one."""

    def __init__(self) -> None:
        self.memory = Outbox()
        self._listener: SocketListener | None = None
        with suppress(OSError):
            self._listener = SocketListener()

    def describe(self, hello: pb.Head) -> None:
        """Write into HELLO where the memory and the socket are."""
        hello.memory = self.memory.name
        if self._listener is not None:
            hello.socket = self._listener.secret

    def accept(self) -> "SocketSender | None":
        """Return the connection to the receiver, if it has connected.

        To be called once.
        """
        listener, self._listener = self._listener, None
        return listener.accept() if listener else None

    def close(self) -> None:
        """Close the memory and the socket."""
        self.memory.close()
        if self._listener is not None:
            self._listener.close()


class SocketListener:
    """The socket to which the receiver connects.

    The receiver must send `secret` there.

    Raises:
        OSError: The system does not allow such a socket.
    """

    def __init__(self) -> None:
        self.secret = os.urandom(_SECRET)
        self._socket = _new_socket()
        try:
            self._socket.bind(socket_name(self.secret))
            self._socket.listen()
        except OSError:
            self._socket.close()
            raise

    def accept(self) -> "SocketSender | None":
        """Return the connection of the receiver that knows the secret.

        All other connections are closed, and so is the listener.

        Returns:
            The connection, or None if the receiver has not come.
        """
        with self._socket, suppress(OSError):  # raised once nobody else has connected
            while True:
                caller, _ = self._socket.accept()
                caller.setblocking(False)
                if _is_own_user(caller) and hmac.compare_digest(_said(caller), self.secret):
                    caller.setblocking(True)
                    return SocketSender(caller)
                caller.close()
        return None

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()


class SocketSender:
    """The sender's end of the socket.

    Messages to a receiver that is gone are lost.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._using, self._ending = threading.Lock(), threading.Lock()

    def offer(self, message: Bytes) -> memoryview:
        """Send as much of a message as fits, without waiting.

        Returns:
            The rest of the message.
        """
        data = memoryview(message)
        with self._using:
            try:
                return data[self._socket.send(data, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                return data
            except OSError:
                return data[:0]

    def push(self, message: Bytes) -> None:
        """Send a message, and wait for room."""
        with self._using, suppress(OSError):
            self._socket.sendall(message)

    def cut(self) -> None:
        """End the connection.

        The receiver notices, and nobody waits for room any more.
        """
        with self._ending, suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Cut and close the connection."""
        self.cut()
        with self._using, self._ending:
            self._socket.close()


class SocketReceiver:
    """The receiver's end of the socket.

    Raises:
        OSError: Nobody listens at the address that the secret makes, or only another user does.
    """

    def __init__(self, secret: bytes) -> None:
        self._ending = threading.Lock()
        self._socket = _new_socket()
        try:
            self._socket.connect(socket_name(secret))
            if not _is_own_user(self._socket):
                raise PermissionError("the socket belongs to another user")
            self._socket.send(secret)
            self._socket.setblocking(True)
        except OSError:
            self._socket.close()
            raise

    def messages(self) -> Iterator[bytes]:
        """Yield the messages until the sender or `end` ends them.

        A message that is cut off is dropped.

        Raises:
            BadFrame: The data is no message, or a message larger than MAX_MESSAGE.
        """
        with self._socket.makefile("rb", _BUFFER) as stream, suppress(OSError):
            while len(prefix := stream.read(_PREFIX.size)) == _PREFIX.size:
                compressed, length = _PREFIX.unpack(prefix)
                if compressed or length > MAX_MESSAGE:
                    raise BadFrame(f"a message of {length} bytes came over the socket; the limit is {MAX_MESSAGE}")
                message = stream.read(length)
                if len(message) < length:
                    return
                yield message

    def end(self) -> None:
        """Receive nothing more.

        Data that has arrived can still be read.
        """
        with self._ending, suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        """Close the connection."""
        with self._ending:
            self._socket.close()


def prefixed(message: bytes) -> bytes:
    """Return a message as it goes over a socket."""
    return _PREFIX.pack(0, len(message)) + message


def socket_name(secret: bytes) -> str:
    """Return the abstract name of the socket.

    All processes of the host can see it, and no other program uses it.
    """
    return f"\0fedring-{hashlib.sha256(secret).hexdigest()}"


def _new_socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.setblocking(False)
    return made


def _is_own_user(connected: socket.socket) -> bool:
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.getuid())


def _said(caller: socket.socket) -> bytes:
    """Return the bytes that the caller has sent so far."""
    try:
        return caller.recv(_SECRET)
    except OSError:
        return b""
