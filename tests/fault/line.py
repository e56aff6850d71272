"""A line between clients and a server, whose server never learns that a client has gone."""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self


class Line:
    """Forwards connections to `server`, "host:port", from `address`, while a `with` lasts.

    When a client's end closes, or at `cut`, the server's end stays open and silent, as it does when a machine loses its
    power, or a firewall forgets the connection.

    Args:
        server: where to.
        hear: is called with what the server says, before the client hears it.
    """

    def __init__(self, server: str, hear: Callable[[bytes], object] = lambda data: None) -> None:
        host, _, port = server.rpartition(":")
        self._server = host, int(port)
        self._hear = hear
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._near: list[socket.socket] = []  # the clients' ends
        self._far: list[socket.socket] = []  # the server's

    @property
    def address(self) -> str:
        """Where clients find the server."""
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for end in (self._listener, *self._near, *self._far):
            with suppress(OSError):  # it is closed already
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def cut(self) -> None:
        """End all connections of now for the clients, and for them alone."""
        for near in self._near:
            with suppress(OSError):
                near.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with suppress(OSError):  # until the listener closes
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._server)
                self._near.append(near)
                self._far.append(far)
                threading.Thread(target=_carry, args=(near, far), daemon=True).start()
                threading.Thread(target=_carry_back, args=(far, near, self._hear), daemon=True).start()


def _carry(near: socket.socket, far: socket.socket) -> None:
    """Take to the server what the client says, but not that it ends."""
    with suppress(OSError):
        while data := near.recv(1 << 16):
            far.sendall(data)


def _carry_back(far: socket.socket, near: socket.socket, hear: Callable[[bytes], object]) -> None:
    """Take to the client what the server says, and that it ends."""
    with suppress(OSError):
        while data := far.recv(1 << 16):
            hear(data)
            near.sendall(data)
        near.shutdown(socket.SHUT_RDWR)
