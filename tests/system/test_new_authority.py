"""A fleet changes to certificates of another authority while it trains: no daemon restarts, and no round is lost."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fedring.control.access import Access
from fedring.ctl.operate.port_health import check_health
from fedring.ctl.process import stop_all
from fedring.rpc.channel import open_sync_channel
from fedring.rpc.tls import Tls
from tests.fleets import PATIENCE, Control, Fleet
from tests.forks import Daemon
from tests.pki import Pki
from tests.proxy import Proxy

CLIENTS = ("client-0", "client-1")
STEPS = [("old", ("old", "new")), ("new", ("old", "new")), ("new", ("new",))]
"""For each step, the authority of all certificates, and the authorities that everybody trusts."""

TOGETHER = {"mode": "data_parallel", "batch_size": 32, "data_parallel": {"replacement_seconds": PATIENCE}}
JOBS: dict[str, dict[str, Any]] = {"federated": {}, "data_parallel": TOGETHER}


class Party:
    """A daemon's TLS files on its host."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir()
        self._folder, self._name = folder, name
        self.tls = Tls(cert=folder / f"{name}.crt", key=folder / f"{name}.key", ca=folder / "ca.crt")

    def install(self, pki: Pki, *trusted: Pki) -> None:
        """Replace the files one by one: use the certificate of `pki`, and trust these authorities."""
        new = self._folder / "new"
        new.write_bytes(b"".join((authority.folder / "ca.crt").read_bytes() for authority in trusted))
        new.replace(self._folder / "ca.crt")
        for ending in ("key", "crt"):
            shutil.copy(pki.folder / f"{self._name}.{ending}", new)  # keeps the file's mode
            new.replace(self._folder / f"{self._name}.{ending}")


@contextmanager
def running(folder: Path, address: str, parties: dict[str, Party]) -> Iterator[list[Daemon]]:
    """Run the clients, which connect to the server at this address."""
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


class FleetEvents:
    """The stream of the server's events; `abandoned` has a line for each abandoned round."""

    def __init__(self, control: Control) -> None:
        self._events = iter(control.events())
        self.abandoned: list[str] = []

    def until(self, kind: str, clients: Sequence[str] = ("",)) -> None:
        """Wait for an event of this kind, or for one for each of these clients."""
        missing = set(clients)
        while missing:
            event = next(self._events)
            if event.kind == "round_abandoned":
                self.abandoned.append(event.text)
            if event.kind == kind:
                missing.discard(event.client_id)


@pytest.mark.parametrize("mode", JOBS)
def test_a_job_goes_on_while_all_daemons_change_to_another_authority(tmp_path: Path, mode: str) -> None:
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
        Proxy(fleet.listen) as proxy,
        running(tmp_path, proxy.address, parties) as clients,
        open_sync_channel(fleet.control, old.tls("operator")) as channel,
        Control(fleet.control, channel=channel) as control,
    ):
        events = FleetEvents(control)
        job_id = control.start_job({"min_clients": 2, "rounds": 10_000, **JOBS[mode]}).job_id
        events.until("round_published")
        for pki, trusted in STEPS:
            for names in (["server"], CLIENTS):
                for name in names:
                    parties[name].install(authorities[pki], *(authorities[which] for which in trusted))
                proxy.cut()
                events.until("client_joined", CLIENTS)
                for _ in range(2):  # the first of them may have started before
                    events.until("round_published")
        assert control.job(job_id).state == "running"
        assert events.abandoned == []
        published = [round_ for round_ in control.rounds(job_id=job_id) if round_.model_version]
        assert {round_.delivered for round_ in published} == {2}
        control.stop_job(job_id)
        assert all(client.running for client in clients)
        assert check_health(fleet.listen, PATIENCE, Access(old.tls("client-0", ca=new))) == "unreachable"
        assert check_health(fleet.listen, PATIENCE, Access(new.tls("client-0"))) == "serving"
