"""Clients of the wire contract that deliver known updates round after round while they and their server are killed."""

import queue
import random
import threading
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

import grpc

from fedring.v1 import federation_pb2 as pb
from tests.fault import faulty_fleet
from tests.fault.update_log import Update, UpdateLog, random_update
from tests.fleets import Fleet
from tests.system.wire import Refused, WireClient

_SILENT = 40.0  # seconds; servers beat at least every 30
SIZE = 17_000  # of the model: its values in full are too large for a row of the database
_RETRYABLE = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,  # the client itself was killed
    grpc.StatusCode.UNAUTHENTICATED,  # the session has ended: join again
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)


class _Connection(WireClient):
    """A client whose queue of events ends with an empty event."""

    def _read(self) -> None:
        super()._read()
        self.events.put(pb.ServerEvent())


class KillableClient:
    """One client, in a thread: it offers an update for each round.

    It keeps the update in a spool until the server has confirmed or refused it.
    """

    def __init__(self, name: str, clients: "KillableClients") -> None:
        self.name = name
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._clients, self._update_log = clients, clients.update_log
        self._rng = random.Random(f"{self._update_log.seed} {name}")
        self._spools_lost = 0  # a client that has lost its spool trains another update
        self._spool: tuple[pb.TrainCmd, Update] | None = None
        self._connection: _Connection | None = None

    def kill(self, *, spool: bool) -> None:
        """End the client's connection at once; unless `spool`, the client also loses its spool."""
        if not spool:
            self._spools_lost, self._spool = self._spools_lost + 1, None
        if self._connection is not None:
            self._connection.close()

    def _run(self) -> None:
        try:
            while self._clients.wait_for_server():
                self._connect()
        except BaseException as error:
            self._update_log.surprises.append(f"{self.name} ended with {error!r}")
            raise

    def _connect(self) -> None:
        """Serve one connection until it ends."""
        with suppress(grpc.RpcError, ValueError), _Connection(self._clients.fleet.listen, self.name) as connection:
            self._connection = connection
            self._serve(connection)  # raises ValueError if it was closed just before a call

    def _serve(self, connection: _Connection) -> None:
        """Deliver the update in the spool, then one for each command, until the connection ends."""
        while self._spool is None or self._deliver(connection, *self._spool):
            try:
                event = connection.events.get(timeout=_SILENT)
            except queue.Empty:  # not even a heartbeat: join again, as fl-client does
                return
            if event.WhichOneof("event") is None:
                return
            if event.HasField("train") and self._clients.may_train(event.train.job_round):
                number, job_round = event.train.round, event.train.job_round  # a restart may skip a number
                update = random_update(f"{self._update_log.seed} {self.name} {job_round} {self._spools_lost}", SIZE)
                self._update_log.offered[number, self.name, update.digest] = update
                self._spool = event.train, update

    def _deliver(self, connection: _Connection, command: pb.TrainCmd, update: Update) -> bool:
        """Send the update; return False if the client must join again and then repeat it."""
        key = command.round, self.name, update.digest
        try:
            accepted = self._push(connection, command, update)
        except Refused as error:
            if error.reason == "truncated":
                return self._deliver(connection, command, update)
            if error.code in _RETRYABLE:
                return False
            if error.code is grpc.StatusCode.FAILED_PRECONDITION:  # its round is over
                self._update_log.refused.add(key)
            elif error.reason != "already_accepted_other" or not self._spools_lost:
                self._update_log.surprises.append(f"{self.name}, round {command.round}: {error}")
        else:
            self._update_log.confirm(command.round, self.name, update.digest, already=accepted.already)
        self._spool = None
        return True

    def _push(self, connection: _Connection, command: pb.TrainCmd, update: Update) -> pb.Accepted:
        """Push the update with a random call among those for its size; now and then, push only a part of it."""
        header = connection.header(command, update.payload, packets=[update.packet])
        if not update.large and self._rng.random() < 0.5:
            return connection.push_small(header, update.payload)
        part = self._rng.randrange(len(update.payload)) if self._rng.random() < 0.2 else None
        reply = connection.push(header, update.payload, stop_at=part)
        assert reply is not None
        assert reply.HasField("accepted")
        return reply.accepted


class KillableClients:
    """Several such clients, which deliver until the `with` block ends."""

    def __init__(self, fleet: Fleet, update_log: UpdateLog, names: Sequence[str]) -> None:
        self.fleet, self.update_log = fleet, update_log
        self.server_is_up = threading.Event()
        self._stopped = False
        self._limit = 0
        self._raised = threading.Condition()
        self.names = names
        self._members = {name: KillableClient(name, self) for name in names}

    def __enter__(self) -> Self:
        self.server_is_up.set()
        for member in self._members.values():
            member.thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()
        if error is not None and self.update_log.surprises:
            error.add_note(f"The clients' surprises: {self.update_log.surprises}")

    def stop(self) -> None:
        """End all clients and their threads."""
        self._stopped = True
        self.server_is_up.set()
        self.allow_rounds(self._limit)
        for member in self._members.values():
            while member.thread.is_alive():  # it may connect just after it was killed
                member.kill(spool=True)
                member.thread.join(0.1)

    def kill(self, name: str, *, spool: bool) -> None:
        """Kill one client, which connects anew at once; see KillableClient.kill."""
        self._members[name].kill(spool=spool)

    def allow_rounds(self, job_round: int) -> None:
        """Let clients train all rounds up to this one."""
        with self._raised:
            self._limit = job_round
            self._raised.notify_all()

    def may_train(self, job_round: int) -> bool:
        """Wait until the round may be trained; return False if the clients have been stopped."""
        with self._raised:
            self._raised.wait_for(lambda: self._stopped or job_round <= self._limit, timeout=faulty_fleet.SECONDS)
        return not self._stopped

    def wait_for_server(self) -> bool:
        """Wait until the server runs; return False if the clients have been stopped."""
        self.server_is_up.wait(faulty_fleet.SECONDS)
        return not self._stopped
