"""A server without sockets: its parts, with a real store and real blobs, and clients in session."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from threading import RLock
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection
from tests.journal_events import each_event
from tests.unit.gate import Gate

from fedring.codec import Encoding, encode
from fedring.codec.digest import name_of, update_name
from fedring.rpc.chunks import CHUNK_BYTES, ReceivedChunk
from fedring.rpc.contract import SESSION_KEY
from fedring.rpc.identity import IDENTITY, LOCAL
from fedring.rpc.streams import METER, CallMeter
from fedring.server.config import ServerConfig
from fedring.server.model.making import ModelMaker
from fedring.server.model.models import Models
from fedring.server.parts import assemble
from fedring.server.recovery import reload
from fedring.server.round.events import Joined
from fedring.server.round.open_round import KindMaker, OpenRound
from fedring.server.services import update_service
from fedring.server.sessions.sessions import Session, Sessions
from fedring.server.state.blob_interfaces import Partial
from fedring.server.state.blobs import FileBlobs, FilePartial
from fedring.server.state.facts import Facts
from fedring.server.state.failures import StorageError
from fedring.server.state.rows import Acceptance, ModelRow, RoundRow, UpdateRow, lay_out
from fedring.server.state.sql.rounds import RoundStore
from fedring.server.state.sql.store import Store
from fedring.server.state.sql.transactions import Database
from fedring.server.state.sql.updates import UpdateStore
from fedring.train.jobs.job import Job
from fedring.v1 import federation_pb2 as pb

SIZE = 8
ONES = np.ones(SIZE, np.float32)


def spec(**keys: Any) -> Job:
    """Return a job that trains a vector of `SIZE` values, with these keys."""
    fixed = {"model": "fedring.train.models:vector", "model_args": {"size": SIZE}, "evaluate": False, "min_clients": 1}
    return Job.model_validate({**fixed, **keys})


class GatedStore(Store):
    """A store whose transactions a test can hold up."""

    def __init__(self, path: Path, gate: Gate) -> None:
        super().__init__(f"sqlite:///{path}")
        self._database.__class__ = SharedDatabase
        self.rounds: RoundStore = GatedRounds(self._database, gate)
        self.updates: UpdateStore = GatedUpdates(self._database, gate)


class SharedDatabase(Database):
    """A database that a test may read while the store's thread has a transaction open."""

    lock = RLock()

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        with self.lock, super().transaction() as connection:
            yield connection


class GatedRounds(RoundStore):
    def __init__(self, database: Database, gate: Gate) -> None:
        super().__init__(database)
        self._gate = gate

    def create(self, row: RoundRow) -> RoundRow:
        self._gate.pass_("rounds.create")
        return super().create(row)

    def replace(self, row: RoundRow) -> None:
        self._gate.pass_("rounds.replace")
        super().replace(row)


class GatedUpdates(UpdateStore):
    def __init__(self, database: Database, gate: Gate) -> None:
        super().__init__(database)
        self._gate = gate

    def accept(self, rows: Sequence[UpdateRow]) -> list[Acceptance]:
        self._gate.pass_("updates.accept")
        return super().accept(rows)


class GatedMaker(ModelMaker):
    """A maker whose first models can be held up."""

    gate: Gate

    def first(self, job: Job, version: int, path: str = "") -> ModelRow:
        self.gate.pass_("first model")
        return super().first(job, version, path)


class FullBlobs(FileBlobs):
    """Blobs on a disk that is full or slow when a test says so."""

    full = False
    gate: Gate

    def open_partial(self, name: str, *, fresh: bool = False) -> FilePartial:
        partial = super().open_partial(name, fresh=fresh)
        self.gate.pass_("open_partial")
        return partial

    def seal_many(self, partials: Sequence[Partial]) -> list[str]:
        if self.full:
            for partial in partials:
                partial.close()
            raise StorageError("disk_full", "no space left on device")
        return super().seal_many(partials)

    def drop_partials(self, prefix: str) -> None:
        self.gate.pass_("drop_partials")
        super().drop_partials(prefix)


class Call:
    """The part of a call's context that the services read."""

    def __init__(self, session: Session) -> None:
        self._session_id = session.session_id

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ((SESSION_KEY, self._session_id),)

    def add_done_callback(self, callback: object) -> None:
        """Do nothing: the call lasts until the test ends."""


class GatedModels(Models):
    """Models that a GatedMaker makes."""

    def __init__(self, gate: Gate, blobs: FullBlobs, pool: Executor, config: ServerConfig, run_id: str) -> None:
        super().__init__(blobs, pool, config, run_id)
        self._gated = GatedMaker(blobs, pool, config, run_id, self.versions)
        self._gated.gate = gate

    def load(self) -> ModelMaker:
        return self._gated


class Host:
    """The parts of a server, and what its clients do. A test can hold up the server's threads at its `gate`."""

    def __init__(self, root: Path, kinds: Sequence[KindMaker] = (), **config: Any) -> None:
        self.gate = Gate()
        self.store, self.blobs = GatedStore(root / "facts.sqlite", self.gate), FullBlobs(root)
        self.blobs.gate = self.gate
        self.config = ServerConfig.model_validate({"state_dir": root, **config})
        self.facts = Facts(self.store, self.blobs, threads=1)
        models = GatedModels(self.gate, self.blobs, self.facts.pool, self.config, self.store.run_id)
        self.parts = parts = assemble(self.config, self.facts, models, Sessions(100), kinds)
        self.rounds, self.sessions, self.journal, self.jobs = parts.rounds, parts.sessions, parts.journal, parts.jobs
        self.uploads = update_service(parts, self.config)
        self._names = iter(range(1000))

    def join(
        self, client: str, labels: Mapping[str, str] = MappingProxyType({}), *, max_jobs: int | None = None
    ) -> Session:
        """Return a session of the client, which is ready to train. An older session of the client ends."""
        IDENTITY.set(LOCAL)
        older = self.sessions.get(client)
        secret = older.secret if older else ""
        request = pb.JoinRequest(client_id=client, resume_secret=secret, labels=labels, max_jobs=max_jobs)
        session = self.sessions.join(request, "test")
        self.rounds.presence(Joined(client, session.labels, session.max_jobs))
        session.matched = True
        self.parts.reports.matched(client)
        return session

    @property
    def round(self) -> OpenRound:
        """The open round."""
        (open_,) = self.rounds
        return open_

    async def command(self, session: Session) -> pb.TrainCmd:
        """Return the next command to train that the client receives."""
        async with asyncio.timeout(60):
            while True:
                event = pb.ServerEvent.FromString(await session.outbox.get())
                if event.WhichOneof("event") == "train":
                    return event.train

    def update(
        self, command: pb.TrainCmd, client: str, values: NDArray[np.float32] = ONES
    ) -> tuple[FilePartial, UpdateRow]:
        """Return an update that was received and checked: its file, and its row for the store."""
        payload = encode(values, Encoding("fp32"))
        partial = self.blobs.open_partial(f"update-{next(self._names)}")
        partial.write(payload)
        packets = lay_out([("parameters", "delta", "fp32", len(payload))])
        return partial, UpdateRow(
            round=command.round,
            client_id=client,
            digest=partial.digest,
            name=update_name(client.encode(), partial.digest),
            packets=packets,
            num_samples=1,
            total_bytes=len(payload),
            train_seconds=0.1,
            norm=1.0,
            accepted_at=time.time(),
            blob=partial.digest,
            epoch=command.epoch,
        )

    async def push(
        self,
        session: Session,
        command: pb.TrainCmd,
        values: NDArray[np.float32],
        name: str = "fp32",
        *,
        after: asyncio.Event | None = None,
        damage: Callable[[bytes], bytes] = lambda payload: payload,
        chunk: int = CHUNK_BYTES,
        **changes: Any,
    ) -> pb.UpdateReply:
        """Upload an update through the upload service.

        Args:
            session: The session of the client.
            command: The command that the update answers.
            values: The parameters of the update, float32, as many as the model has.
            name: The encoding.
            after: The payload is sent when this event is set; None = immediately after the offer.
            damage: Changes the payload in transit.
            chunk: Bytes of a chunk.
            changes: Fields of the header that differ from what they should be.

        Returns:
            The last reply of the service.
        """
        METER.set(CallMeter())
        payload = encode(values, Encoding(name))
        packet = pb.Packet(vector=pb.VECTOR_PARAMETERS, kind=pb.KIND_DELTA, encoding=name, bytes=len(payload))
        packet.num_samples = 1
        facts: dict[str, Any] = {"client_id": session.client_id, "packets": [packet], "total_bytes": len(payload)}
        for name in ("run_id", "epoch", "round", "schema_hash"):
            facts[name] = getattr(command, name)
        facts |= {"base_digest": command.model_digest} | changes
        header = pb.UpdateHeader(**facts).SerializeToString()
        digest = name_of(payload)
        offer = pb.UpdateOffer(header=header, payload_digest=digest, name=update_name(header, digest))

        async def messages() -> AsyncIterator[pb.ClientUpdate | ReceivedChunk]:
            yield pb.ClientUpdate(offer=offer)
            if after is not None:
                await after.wait()
            sent = memoryview(damage(payload))
            for offset in range(0, len(sent), chunk):
                yield ReceivedChunk(offset, sent[offset : offset + chunk])

        return [reply async for reply in self.uploads.PushUpdate(messages(), Call(session))][-1]

    def offer(self, update: tuple[FilePartial, UpdateRow]) -> "asyncio.Task[bool]":
        """Start to accept an update. The task returns whether it had been accepted before."""
        partial, row = update

        async def accept() -> bool:
            already, _ = await self.parts.acceptor.accept(partial, row)
            return already

        return asyncio.get_running_loop().create_task(accept())

    @asynccontextmanager
    async def mending(self) -> AsyncIterator[None]:
        """Mend the storage whenever it fails, meanwhile.

        The same failure may be noted twice: by the thread that meets it, and by whoever tries again.
        """
        storage = self.facts.storage

        async def mend() -> NoReturn:
            while True:
                await storage.fails.wait()
                storage.mend()

        task = asyncio.get_running_loop().create_task(mend())
        try:
            yield
        finally:
            task.cancel()

    async def ended(self, job_id: int) -> str:
        """Wait for the end of a job, and return the state in which it ended."""
        async with asyncio.timeout(60):
            async for event in each_event(self.journal, 1):
                if event.kind == "job_ended" and event.job_id == job_id:
                    break
        row = await self.facts.db(self.store.jobs.get, job_id)
        assert row is not None
        return row.state


@asynccontextmanager
async def running(root: Path, kinds: Sequence[KindMaker] = (), **config: Any) -> AsyncIterator[Host]:
    """Yield a host that accepts updates and runs jobs. At the end, both must still be running."""
    host = Host(root, kinds, **config)
    await reload(host.parts)
    async with asyncio.TaskGroup() as tasks:
        background = [tasks.create_task(part) for part in (host.parts.acceptor.run(), host.jobs.run())]
        yield host
        assert not any(task.done() for task in background)
        host.gate.open()
        for task in background:
            task.cancel()
    host.facts.close()
