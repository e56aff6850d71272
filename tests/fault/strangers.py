"""Clients of the wire contract that deliver known updates round after round, whatever is killed around them."""

import random
import threading
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

import grpc

from fedring.v1 import federation_pb2 as pb
from tests.fault import patience
from tests.fault.ledger import Ledger, Update, drawn
from tests.fleets import Fleet
from tests.system.wire import Refused, WireClient

SIZE = 17_000  # of the model: its values in full are too large for a row of the database
_FOR_NOW = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,  # the client itself was killed
    grpc.StatusCode.UNAUTHENTICATED,  # the session has ended: join again
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)


class _Connection(WireClient):
    """A client whose events end with an empty one."""

    def _read(self) -> None:
        super()._read()
        self.events.put(pb.ServerEvent())


class Stranger:
    """One client, in a thread: it has an update for each round, and a spool for the one that nobody has confirmed."""

    def __init__(self, name: str, strangers: "Strangers") -> None:
        self.name = name
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._all, self._ledger = strangers, strangers.ledger
        self._rng = random.Random(f"{self._ledger.seed} {name}")
        self._life = 0  # who has lost the spool trains another update
        self._spool: tuple[pb.TrainCmd, Update] | None = None
        self._connection: _Connection | None = None

    def kill(self, *, spool: bool) -> None:
        """End its connection at once; without `spool` it has also forgotten what it sent."""
        if not spool:
            self._life, self._spool = self._life + 1, None
        if self._connection is not None:
            self._connection.close()

    def _run(self) -> None:
        while self._all.go_on():
            with suppress(grpc.RpcError, ValueError), _Connection(self._all.fleet.listen, self.name) as connection:
                self._connection = connection
                self._serve(connection)  # ValueError: it was closed just before a call

    def _serve(self, connection: _Connection) -> None:
        """Deliver what is in the spool, then what is asked for, until the connection ends."""
        while self._spool is None or self._deliver(connection, *self._spool):
            event = connection.events.get(timeout=patience.SECONDS)
            if event.WhichOneof("event") is None:
                return
            if event.HasField("train") and self._all.may_train(event.train.job_round):
                number = event.train.round
                update = drawn(f"{self._ledger.seed} {self.name} {number} {self._life}", SIZE)
                self._ledger.offered[number, self.name, update.digest] = update
                self._spool = event.train, update

    def _deliver(self, connection: _Connection, command: pb.TrainCmd, update: Update) -> bool:
        """Send the update; False if it must be sent again after joining again."""
        key = command.round, self.name, update.digest
        try:
            accepted = self._push(connection, command, update)
        except Refused as error:
            if error.reason == "truncated":
                return self._deliver(connection, command, update)
            if error.code in _FOR_NOW:
                return False
            if error.code is grpc.StatusCode.FAILED_PRECONDITION:  # its round is over
                self._ledger.refused.add(key)
            elif error.reason != "already_accepted_other" or not self._life:
                self._ledger.surprises.append(f"{self.name}, round {command.round}: {error}")
        else:
            self._ledger.accepted(command.round, self.name, update.digest, already=accepted.already)
        self._spool = None
        return True

    def _push(self, connection: _Connection, command: pb.TrainCmd, update: Update) -> pb.Accepted:
        """Push in one of the ways that there are for its size, now and then only a part."""
        header = connection.header(command, update.payload, packets=[update.packet])
        if not update.large and self._rng.random() < 0.5:
            return connection.push_small(header, update.payload)
        part = self._rng.randrange(len(update.payload)) if self._rng.random() < 0.2 else None
        reply = connection.push(header, update.payload, stop_at=part)
        assert reply is not None
        assert reply.HasField("accepted")
        return reply.accepted


class Strangers:
    """Several of them, who deliver while a `with` lasts."""

    def __init__(self, fleet: Fleet, ledger: Ledger, names: Sequence[str]) -> None:
        self.fleet, self.ledger = fleet, ledger
        self.server_is_up = threading.Event()
        self._stopped = False
        self._limit = 0
        self._raised = threading.Condition()
        self._members = {name: Stranger(name, self) for name in names}

    def __enter__(self) -> Self:
        self.server_is_up.set()
        for member in self._members.values():
            member.thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        """No thread is left."""
        self._stopped = True
        self.server_is_up.set()
        self.may_reach(self._limit)
        for member in self._members.values():
            while member.thread.is_alive():  # it may have connected just after
                member.kill(spool=True)
                member.thread.join(0.1)

    def kill(self, name: str, *, spool: bool) -> None:
        """End one of them, which begins anew at once."""
        self._members[name].kill(spool=spool)

    def may_reach(self, job_round: int) -> None:
        """Let all rounds up to this one be trained."""
        with self._raised:
            self._limit = job_round
            self._raised.notify_all()

    def may_train(self, job_round: int) -> bool:
        """Wait until the round may be trained; False if there is nothing more to train."""
        with self._raised:
            self._raised.wait_for(lambda: self._stopped or job_round <= self._limit, timeout=patience.SECONDS)
        return not self._stopped

    def go_on(self) -> bool:
        """Wait until there is a server; False if nothing more is to be done."""
        self.server_is_up.wait(patience.SECONDS)
        return not self._stopped
