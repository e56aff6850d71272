"""The line between one client and the server: it can be cut, slow, or damage a byte, and hears which updates pass."""

import re
import threading
from random import Random

from tests.proxy import FrameChange, Proxy, flip_bits

_LARGE = 2000  # bytes of frames that carry a part of a model or of an update; smaller ones have no digest of their own
_PAYLOAD = re.compile(rb"\x12G(blake3-[0-9a-f]{64})\x1aGblake3-")  # `payload_digest` of an UpdateOffer, before `name`
_LONGEST = 100.0  # milliseconds that a slow line takes for a piece


class Line(Proxy):
    """Forwards the connections of one client.

    Attributes:
        sent: digests of the payloads of which a part has left the client, if they are large; to ask whether an update
            was accepted, a client sends no more than its names.
        damaged: bytes that were changed.
        delayed: pieces that were late.
    """

    def __init__(self, target: str) -> None:
        self.sent: set[str] = set()
        self.damaged = 0
        self.delayed = 0
        self._armed: dict[str, Random] = {}  # by direction: a bit of the next large frame will be flipped
        self._slow: Random | None = None
        super().__init__(target, lambda _: self._change("up"), downward=lambda _: self._change("down"))

    def damage(self, direction: str, rng: Random) -> None:
        """Flip one bit in the next large frame that goes "up" or "down"."""
        self._armed[direction] = rng

    def leave_half_open(self, half_open: bool) -> None:
        """Let the server not notice that connections end for the client, as when its machine loses its power."""
        self._half_open = half_open

    def slow_down(self, rng: Random) -> None:
        """Delay each piece, until `speed_up`."""
        self._slow = rng

    def speed_up(self) -> None:
        """Forward everything at once again, and damage nothing more."""
        self._slow = None
        self._armed.clear()

    def _change(self, direction: str) -> FrameChange:
        offered: dict[bytes, str] = {}  # by the stream of a call, which carries one upload at a time

        def change(frame: bytes) -> bytes:
            stream = frame[5 : FrameChange.HEAD_BYTES]
            if direction == "up":
                for payload in _PAYLOAD.findall(frame):
                    offered[stream] = payload.decode()
                if stream in offered and len(frame) >= _LARGE:
                    self.sent.add(offered[stream])
            if rng := self._slow:
                self.delayed += 1
                threading.Event().wait(rng.uniform(0, _LONGEST) / 1000)
            if len(frame) >= _LARGE and (rng := self._armed.pop(direction, None)):
                self.damaged += 1
                return flip_bits(frame, rng.randrange(FrameChange.HEAD_BYTES, len(frame)), 1 << rng.randrange(8))
            return frame

        return FrameChange(change, upward=direction == "up")
