"""A fleet goes over to another authority while it trains: no daemon is started again, and no round is lost."""

import select
import shutil
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from fedring.ctl.access import Access
from fedring.ctl.health import check_health
from fedring.ctl.process import stop_all
from fedring.rpc.channel import open_sync_channel
from fedring.rpc.tls import Tls
from tests.fleets import PATIENCE, Control, Fleet
from tests.forks import Daemon
from tests.pki import Pki

CLIENTS = ("client-0", "client-1")
STEPS = [("old", ("old", "new")), ("new", ("old", "new")), ("new", ("new",))]
"""Whose certificates everybody has, and whose authorities everybody trusts."""

TOGETHER = {"mode": "data_parallel", "batch_size": 32, "data_parallel": {"replacement_seconds": PATIENCE}}
JOBS: dict[str, dict[str, Any]] = {"federated": {}, "data_parallel": TOGETHER}


class Wire:
    """A way to a server on which all connections can be cut, as they are when they have grown old."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: set[socket.socket] = set()
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

    def cut(self) -> None:
        """Every connection that there was ends."""
        for end in list(self._open):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with suppress(OSError):  # the listener has been shut down
            while True:
                one, other = self._listener.accept()[0], socket.create_connection(self._target)
                self._threads.append(threading.Thread(target=self._carry, args=({one: other, other: one},)))
                self._threads[-1].start()

    def _carry(self, ends: dict[socket.socket, socket.socket]) -> None:
        self._open.update(ends)
        with ExitStack() as stack, suppress(OSError):
            for end in ends:
                stack.callback(self._open.discard, stack.enter_context(end))
            while True:
                for end in select.select(list(ends), [], [])[0]:
                    if not (data := end.recv(1 << 16)):
                        return
                    ends[end].sendall(data)


class Party:
    """A daemon's own files, as its host has them."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir()
        self._folder, self._name = folder, name
        self.tls = Tls(cert=folder / f"{name}.crt", key=folder / f"{name}.key", ca=folder / "ca.crt")

    def install(self, pki: Pki, *trusted: Pki) -> None:
        """It has that authority's certificate, and trusts these, one file after the other."""
        new = self._folder / "new"
        new.write_bytes(b"".join((authority.folder / "ca.crt").read_bytes() for authority in trusted))
        new.replace(self._folder / "ca.crt")
        for ending in ("key", "crt"):
            shutil.copy(pki.folder / f"{self._name}.{ending}", new)  # with its mode
            new.replace(self._folder / f"{self._name}.{ending}")


@contextmanager
def running(folder: Path, address: str, parties: dict[str, Party]) -> Iterator[list[Daemon]]:
    """The clients, which reach their server at the address."""
    clients = []
    for index, name in enumerate(CLIENTS):
        settings = {"server": address, "client_id": name, "state_dir": str(folder / "state" / name)}
        part = {"partition_index": index, "partition_count": 2, "clients_on_host": 2}
        table = {"tls": parties[name].tls.model_dump(mode="json")}
        clients.append(Daemon(name, "fedring.client.main", settings | part | table, folder / "logs" / f"{name}.log"))
    try:
        for client in clients:
            client.start()
        yield clients
    finally:
        stop_all(clients, 15)


class Story:
    """What the server tells, event by event; `abandoned` are the rounds that came to nothing."""

    def __init__(self, control: Control) -> None:
        self._events = iter(control.events())
        self.abandoned: list[str] = []

    def until(self, kind: str, clients: Sequence[str] = ("",)) -> None:
        """That has happened, to all of them."""
        missing = set(clients)
        while missing:
            event = next(self._events)
            if event.kind == "round_abandoned":
                self.abandoned.append(event.text)
            if event.kind == kind:
                missing.discard(event.client_id)


@pytest.mark.parametrize("mode", JOBS)
def test_a_job_goes_on_while_everybody_changes_to_another_authority(tmp_path: Path, mode: str) -> None:
    authorities = {name: Pki(tmp_path / name) for name in ("old", "new")}
    old, new = authorities.values()
    for authority in (old, new):
        authority.issue(*CLIENTS)
    parties = {name: Party(tmp_path / f"tls-{name}", name) for name in ("server", *CLIENTS)}
    for party in parties.values():
        party.install(old, old)
    table = parties["server"].tls.model_dump(mode="json")
    with (
        Fleet(tmp_path, {"tls": table}) as fleet,
        Wire(fleet.listen) as wire,
        running(tmp_path, wire.address, parties) as clients,
        open_sync_channel(fleet.control, old.tls("operator")) as channel,
        Control(fleet.control, channel=channel) as control,
    ):
        story = Story(control)
        job_id = control.start_job({"min_clients": 2, "rounds": 10_000, **JOBS[mode]}).job_id
        story.until("round_published")
        for pki, trusted in STEPS:
            for names in (["server"], CLIENTS):
                for name in names:
                    parties[name].install(authorities[pki], *(authorities[which] for which in trusted))
                wire.cut()
                story.until("client_joined", CLIENTS)
                for _ in range(2):  # the first may have begun before
                    story.until("round_published")
        assert control.job(job_id).state == "running"
        assert story.abandoned == []
        published = [round_ for round_ in control.rounds(job_id=job_id) if round_.model_version]
        assert {round_.delivered for round_ in published} == {2}
        control.stop_job(job_id)
        assert all(client.running for client in clients)
        assert check_health(fleet.listen, PATIENCE, Access(old.tls("client-0", ca=new))) == "unreachable"
        assert check_health(fleet.listen, PATIENCE, Access(new.tls("client-0"))) == "serving"
