"""TCP proxies between clients and a server: connections that a test cuts, damages, stalls, or leaves half open."""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

_PREFACE = 24  # bytes that begin a connection of HTTP/2

Change = Callable[[bytes], bytes]
"""Returns what to pass on of the bytes that were read; it may keep some until more come, or block. If it raises
OSError, the connection ends in both directions."""


class Proxy:
    """Forwards connections from `address` to a server until its `with` block ends.

    Args:
        target: the server's "host:port".
        upward: called with the number of each connection, from 1 on; returns how to change what its client sends.
        downward: the same for what the server sends.
        half_open: leave the server's end open and silent when a connection ends for its client, as happens when a
            machine loses its power, or a firewall forgets the connection.
    """

    def __init__(
        self,
        target: str,
        upward: Callable[[int], Change] = lambda number: bytes,
        *,
        downward: Callable[[int], Change] = lambda number: bytes,
        half_open: bool = False,
    ) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._upward, self._downward, self._half_open = upward, downward, half_open
        self._pairs: list[tuple[socket.socket, socket.socket]] = []  # the client's and the server's end
        self._open: set[int] = set()  # numbers of connections
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._start(self._accept)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        _shut_down(self._listener)
        self._threads[0].join()
        ends = [end for pair in self._pairs for end in pair]
        for end in ends:
            _shut_down(end)
        for thread in self._threads:
            thread.join()
        for end in (self._listener, *ends):
            end.close()

    @property
    def connections(self) -> int:
        """How many connections clients have made so far."""
        return len(self._pairs)

    @property
    def open(self) -> int:
        """How many of them are open for their clients."""
        return len(self._open)

    def cut(self) -> None:
        """End all connections that are open now."""
        for number in list(self._open):
            self._end(number)

    def _start(self, target: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):  # the listener has been shut down
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(self._target)
                except OSError:  # the server does not run now
                    client.close()
                    continue
                self._pairs.append((client, server))
                number = len(self._pairs)
                self._open.add(number)
                self._start(self._carry, number, client, server, self._upward(number))
                self._start(self._carry, number, server, client, self._downward(number))

    def _carry(self, number: int, start: socket.socket, end: socket.socket, change: Change) -> None:
        with suppress(OSError):  # an end was shut down, or the change ends the connection
            while data := start.recv(1 << 16):
                end.sendall(change(data))
        self._end(number)

    def _end(self, number: int) -> None:
        client, server = self._pairs[number - 1]
        _shut_down(client)
        if not self._half_open:
            _shut_down(server)
        self._open.discard(number)


def _shut_down(end: socket.socket) -> None:
    with suppress(OSError):  # it has ended already
        end.shutdown(socket.SHUT_RDWR)


class StallingProxy(Proxy):
    """A proxy that stops to forward in one direction when a test asks for it; `stalled` is set when it has."""

    def __init__(self, target: str) -> None:
        self._lock = threading.Condition()
        self._blocked = ""  # the direction in which nothing passes, "up" or "down"
        self._planned: tuple[str, int] | None = None  # a direction, and after how many more bytes it is blocked
        self.stalled = threading.Event()
        super().__init__(target, lambda number: self._pass_up, downward=lambda number: self._pass_down)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.resume()
        super().__exit__(kind, error, tb)

    def stall(self, direction: str, *, after: int) -> None:
        """Forward nothing more "up" or "down" once clients have sent `after` more bytes."""
        with self._lock:
            self._planned = direction, after
            self.stalled.clear()

    def resume(self) -> None:
        """End all connections, and forward everything on later ones."""
        with self._lock:
            self._blocked, self._planned = "", None
            self.cut()  # before the threads that wait go on: what they hold must not arrive
            self._lock.notify_all()

    def _pass_up(self, data: bytes) -> bytes:
        with self._lock:
            if self._planned:
                direction, left = self._planned
                self._planned = direction, left - len(data)
                if left <= len(data):
                    self._blocked, self._planned = direction, None
                    self.stalled.set()
            self._lock.wait_for(lambda: self._blocked != "up")
        return data

    def _pass_down(self, data: bytes) -> bytes:
        with self._lock:
            self._lock.wait_for(lambda: self._blocked != "down")
        return data


class FrameChange:
    """A change of whole HTTP/2 frames of one type.

    Args:
        change: is called with each such frame; returns what to pass on in its place.
        kind: DATA for frames that carry messages, or HEADERS for those that begin calls.
        upward: whether a client sends them, which begins a connection with a preface.
    """

    DATA, HEADERS = 0, 1
    HEAD_BYTES = 9  # length u24, type u8, flags u8, stream u32, big endian; then comes the content

    def __init__(self, change: Change, kind: int = DATA, *, upward: bool = True) -> None:
        self._change, self._kind = change, kind
        self._held = b""  # the beginning of a frame that is not complete yet
        self._started = not upward

    def __call__(self, data: bytes) -> bytes:
        """Take the next bytes of the connection; return those to pass on."""
        held, passed = self._held + data, []
        if not self._started and len(held) >= _PREFACE:
            self._started, passed, held = True, [held[:_PREFACE]], held[_PREFACE:]
        while self._started and self.HEAD_BYTES <= (end := self.HEAD_BYTES + int.from_bytes(held[:3], "big")) <= len(
            held
        ):
            frame, held = held[:end], held[end:]
            passed.append(self._change(frame) if frame[3] == self._kind else frame)
        self._held = held
        return b"".join(passed)


def flip_bits(data: bytes, at: int, bits: int = 1) -> bytes:
    """Return `data` with the bits of the mask `bits` flipped in the byte at offset `at`."""
    return data[:at] + bytes([data[at] ^ bits]) + data[at + 1 :]
