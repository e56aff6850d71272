"""A record of all that clients say in rounds with secure aggregation, which must never be two things."""

import threading
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from fedring.codec.digest import name_of
from fedring.v1 import federation_pb2 as pb
from fedring.v1 import secure_pb2 as wire
from tests.call_proxy import Take

_MESSAGES: dict[str, Any] = {
    "SendKeys": wire.SecureKeys,
    "SendShares": wire.SecureShares,
    "SignSurvivors": wire.SurvivorsSignature,
    "SendUnmaskShares": wire.UnmaskShares,
}


@dataclass
class Record:
    """What has left one client, and what it was asked for."""

    said: defaultdict[tuple[str, int], set[bytes]] = field(default_factory=lambda: defaultdict(set))
    """The different messages of each call and round."""
    offered: defaultdict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    """The names of the masked payloads of each round."""
    pieces: defaultdict[str, dict[int, bytes]] = field(default_factory=lambda: defaultdict(dict))
    """The bytes of each payload that were sent, by where they begin."""
    commands: dict[int, pb.TrainCmd] = field(default_factory=dict)
    repeated: int = 0
    """Messages that were said before."""
    faults: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def upward(self, method: str) -> Take:
        """Return what takes the messages that the client sends with a call."""
        if kind := _MESSAGES.get(method):
            return lambda data: self._say(method, kind.FromString(data).round, data)
        if method == "PushSmallUpdates":
            return self._small
        if method == "PushUpdate":
            return _Upload(self)
        return lambda data: None

    def downward(self, method: str) -> Take:
        """Return what takes the messages that the client is sent with a call."""
        return self._event if method == "Watch" else lambda data: None

    def offer(self, offer: pb.UpdateOffer) -> str:
        """Note that a payload is offered; return its name."""
        header = pb.UpdateHeader.FromString(offer.header)
        with self.lock:
            self.offered[header.round].add(offer.payload_digest)
        return offer.payload_digest

    def piece(self, name: str, start: int, data: bytes) -> None:
        """Note that a part of a payload is sent."""
        with self.lock:
            known = self.pieces[name].setdefault(start, data)
            if known[: len(data)] != data[: len(known)]:
                self.faults.append(f"two texts of {name}")
            if len(data) > len(known):
                self.pieces[name][start] = data

    def check(self) -> int:
        """Assert that nothing was said in two ways; return how many rounds the client has sent an update in."""
        assert self.faults == []
        assert [key for key, texts in self.said.items() if len(texts) > 1] == []
        assert [number for number, names in self.offered.items() if len(names) > 1] == []
        keys = [text for (method, _), texts in self.said.items() if method == "SendKeys" for text in texts]
        drawn = [key for text in keys for key in _keys_of(wire.SecureKeys.FromString(text))]
        assert len(drawn) == len(set(drawn)), "a secret was used in two rounds"
        return len(self.offered)

    def _say(self, method: str, number: int, data: bytes) -> None:
        with self.lock:
            self.repeated += data in self.said[method, number]
            self.said[method, number].add(data)

    def _small(self, data: bytes) -> None:
        update = pb.SmallUpdate.FromString(data)
        if name_of(update.payload) != self.offer(update.offer):
            self.faults.append("the name of a payload is not its own")
        self.piece(update.offer.payload_digest, 0, update.payload)

    def _event(self, data: bytes) -> None:
        event = pb.ServerEvent.FromString(data)
        if event.HasField("train"):
            self.commands[event.train.round] = event.train


class _Upload:
    """Takes the messages of one call that sends an update in parts."""

    def __init__(self, record: Record) -> None:
        self._record, self._name = record, ""

    def __call__(self, data: bytes) -> None:
        message = pb.ClientUpdate.FromString(data)
        if message.HasField("offer"):
            self._name = self._record.offer(message.offer)
        elif message.HasField("chunk"):
            self._record.piece(self._name, message.chunk.offset, message.chunk.data)


def _keys_of(message: wire.SecureKeys) -> list[bytes]:
    statement = wire.KeyStatement.FromString(message.keys.statement)
    return [statement.sealing_key, statement.masking_key, statement.own_mask]
