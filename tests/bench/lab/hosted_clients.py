"""Many clients in one process and one thread: python -m tests.bench.lab.hosted_clients SERVER FOLDER FIRST COUNT SIZE.

They consist of the parts of fl-client, but share one event loop. Fifty real clients in one process, each with a thread
for its user's code, would spend more processor time on waking each other than on their work.
"""

import asyncio
import os
import sys
from contextlib import suppress
from pathlib import Path

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

import torch

from fedring.client.config import ClientConfig
from fedring.client.errors import RoundOver
from fedring.client.metrics import ClientMetrics
from fedring.client.session.connection import Connection
from fedring.client.session.inbox import Assignment
from fedring.client.session.watch import ClientSession
from fedring.client.transfer.fetch import ModelFetcher
from fedring.client.transfer.spool import Spool
from fedring.client.transfer.update import TrainingReport, make_update
from fedring.client.transfer.upload import Upload
from fedring.daemon.config import load_config
from fedring.rpc.health import Health
from fedring.train.models import vector
from fedring.train.tensors.state import fill, read_vectors, schema_of


class HostedClient:
    """A client that returns every model with one value changed: an unchanged model would not be sent."""

    def __init__(self, server: str, folder: Path, name: str, size: int) -> None:
        folder.mkdir(parents=True)
        config = load_config(ClientConfig, flags={"server": server, "client_id": name, "state_dir": folder}).config
        self._name = name
        self._connection = Connection(config, ClientMetrics())
        self._session = ClientSession(
            self._connection, Health(reflection=False), evaluates=False, tell=lambda state: None
        )
        self._models = ModelFetcher(self._connection, self._session.advance)
        self._spool = Spool(folder, name)
        self._model = vector(size)
        self._schema = schema_of(self._model)

    async def run(self) -> None:
        """Take part in every round."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._session.run())
            while True:
                work = await self._session.inbox.take()
                while not self._session.round_events.empty():  # which the training of fl-client reads
                    self._session.round_events.get_nowait()
                if isinstance(work, Assignment):
                    with suppress(RoundOver):
                        await self._train(work)

    async def _train(self, work: Assignment) -> None:
        command = work.command
        base = self._models.at_hand(command, self._schema)
        if base is None:
            base = await self._models.fetch(command.model_digest, self._schema, lambda: work.stop_reason)
        fill(self._model, self._schema, base.vectors)
        trained = read_vectors(self._model)
        trained.parameters[0] += 1
        update = make_update(command, self._name, base, trained, TrainingReport(samples=1), None)
        spooled = self._spool.write(update.offer, update.parts)
        await Upload(self._connection, spooled, lambda: work.stop_reason, self._session.advance).run(work.deadline)
        self._spool.accept(spooled)


async def host(server: str, folder: Path, numbers: range, size: int) -> None:
    """Run these clients until the process ends."""
    clients = [HostedClient(server, folder / str(number), f"client-{number:03}", size) for number in numbers]
    async with asyncio.TaskGroup() as tasks:
        for client in clients:
            tasks.create_task(client.run())


def main() -> None:
    """Run the clients that the command line names, until SIGTERM."""
    server, folder, first, count, size = sys.argv[1:]
    torch.set_num_threads(1)
    asyncio.run(host(server, Path(folder), range(int(first), int(first) + int(count)), int(size)))


if __name__ == "__main__":
    main()
