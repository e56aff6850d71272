"""A way to a server that a test owns: it can be cut, and what goes up on it can be damaged."""

import select
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Self

_PREFACE = 24  # bytes that begin a connection of HTTP/2

Change = Callable[[bytes], bytes]
"""What a client has sent, as it goes on to the server; it may be held back until more comes. OSError ends both ways."""


class Line:
    """Connections to a server, through this process; `connections` have been made so far, of which `open` last.

    Args:
        target: the server's address.
        upward: makes what changes the bytes on their way up, of the connection of that number, from 1 on.
    """

    def __init__(self, target: str, upward: Callable[[int], Change] = lambda number: bytes) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._upward = upward
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: set[socket.socket] = set()
        self.connections = 0
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self.cut()
        for thread in self._threads:
            thread.join()
        self._listener.close()

    @property
    def open(self) -> int:
        """How many connections there are now."""
        return len(self._open) // 2

    def cut(self) -> None:
        """Every connection that there was ends."""
        for end in list(self._open):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with suppress(OSError):  # the listener has been shut down
            while True:
                client, server = self._listener.accept()[0], socket.create_connection(self._target)
                self.connections += 1
                change = self._upward(self.connections)
                self._threads.append(threading.Thread(target=self._carry, args=(client, server, change)))
                self._threads[-1].start()

    def _carry(self, client: socket.socket, server: socket.socket, change: Change) -> None:
        ways: dict[socket.socket, tuple[socket.socket, Change]] = {client: (server, change), server: (client, bytes)}
        self._open.update(ways)
        with ExitStack() as stack, suppress(OSError):
            for end in ways:
                stack.callback(self._open.discard, stack.enter_context(end))
            while True:
                for end in select.select(list(ways), [], [])[0]:
                    if not (data := end.recv(1 << 16)):
                        return
                    other, changed = ways[end]
                    other.sendall(changed(data))


class Frames:
    """A change of whole frames of one type.

    Args:
        change: is given such a frame, and returns it as it goes on.
        kind: DATA, or HEADS.
    """

    DATA, HEADS = 0, 1  # what carries messages, and what begins calls
    HEAD_BYTES = 9  # length u24, type u8, flags u8, stream u32, big endian; then comes the content

    def __init__(self, change: Change, kind: int = DATA) -> None:
        self._change, self._kind = change, kind
        self._held = b""  # a frame that has not come whole yet
        self._started = False

    def __call__(self, data: bytes) -> bytes:
        """Take the next bytes of the connection; return those that go on."""
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


def flipped(data: bytes, at: int, bits: int = 1) -> bytes:
    """Return the bytes with some bits of the one at that place turned over."""
    return data[:at] + bytes([data[at] ^ bits]) + data[at + 1 :]
