"""What lies between two servers and their database: a pooler, a cable that is pulled, clocks that differ."""

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest

from fedring.ctl.process import Process
from fedring.daemon.exits import Exit
from tests import postgres
from tests.campaign.layer import PRELOAD, SOURCE, Page
from tests.conftest import SEED, missing
from tests.fault.counted_job import NAMES, ROUNDS_EACH, SETTINGS, CountedJob
from tests.fault.counted_updates import SharedState
from tests.fault.faulty_fleet import wait_for
from tests.fault.killable_clients import KillableClients
from tests.fault.leader_ends import ENDS, TwoAddresses, freeze
from tests.fault.two_servers import TwoServers
from tests.pgbouncer import pgbouncer
from tests.ports import free_port
from tests.power.records import build_layer

HOUR = 3600


@pytest.fixture
def database() -> str:
    return postgres.shared().new_database()


class RealServers(TwoAddresses):
    """Two servers, each in an interpreter of its own, which may have another clock."""

    daemon = Process


class ServerElsewhere(TwoAddresses):
    """Two servers, of which the first one is in an interpreter of its own, which may be in another network."""

    def _process(self, name: str, module: str, settings: Mapping[str, Any]) -> Process:
        made = super()._process(name, module, settings)
        return Process(made.name, module, made.settings, made.log) if name == "server" else made


def state_of(fleet: TwoAddresses) -> SharedState:
    return SharedState(fleet.database, str(fleet.server.settings["blob_url"]))


def test_a_pooler_that_changes_sessions_is_refused(tmp_path: Path, database: str) -> None:
    with pgbouncer(postgres.folder_for_anybody(), database, "transaction") as through:
        fleet = TwoServers(tmp_path, through)
        fleet.server.log.parent.mkdir()
        for flags in ([], ["--check-config"]):
            fleet.server.flags = flags
            fleet.server.start()
            assert fleet.server.wait() == Exit.CONFIG
            assert "state_url leads to a pooler that changes sessions" in fleet.server.tail(1)
        fleet.stop()


def test_two_servers_take_over_through_a_pooler_that_keeps_sessions(tmp_path: Path, database: str) -> None:
    ways = ("killed", "session_ended")
    job = CountedJob(SEED, ROUNDS_EACH * len(ways))
    with (
        pgbouncer(postgres.folder_for_anybody(), database, "session") as through,
        TwoAddresses(tmp_path, through, settings=SETTINGS) as fleet,
        KillableClients(fleet, job.update_log, NAMES) as clients,
    ):
        job.start(fleet)
        for number, way in enumerate(ways):
            clients.allow_rounds(ROUNDS_EACH * (number + 1))
            ENDS[way](fleet, clients, Random(SEED))
        job.end(fleet, clients)
        assert fleet.leaders == 1 + len(ways)
        job.check(state_of(fleet))


def test_only_the_clock_of_the_database_counts(tmp_path: Path, database: str) -> None:
    if (layer := build_layer(tmp_path, SOURCE)) is None:
        missing("a C compiler for Linux, with which a layer under programs is built,")
    ways = ("killed", "frozen")
    job, fleet = CountedJob(SEED, ROUNDS_EACH * (len(ways) + 1)), RealServers(tmp_path, database, settings=SETTINGS)
    for server, hours in ((fleet.server, 1), (fleet.standby, -1)):
        page = Page(tmp_path / f"page-{server.name}", tmp_path / "state")
        page.jump = hours * HOUR
        server.env |= {PRELOAD: str(layer), **page.variables}
    with fleet, KillableClients(fleet, job.update_log, NAMES) as clients:
        job.start(fleet)
        for number, way in enumerate(ways):
            fleet.until_the_standby_waits()
            clients.allow_rounds(ROUNDS_EACH * (number + 1))
            ENDS[way](fleet, clients, Random(SEED))
        job.end(fleet, clients)
        assert fleet.leaders == 1 + len(ways), "nobody was replaced whose clock was wrong"
        job.check(state_of(fleet))


_NUMBERS = count(os.getpid() % 50)


@dataclass(frozen=True)
class Cable:
    """A cable to a network of its own.

    Attributes:
        network: The name of that network.
        here: The address of this end.
        there: The address of the other end.
    """

    network: str
    here: str
    there: str

    def pull(self) -> None:
        """Let no packet through, and tell nobody."""
        _ip("link", "set", self.network, "down")

    def plug(self) -> None:
        """Let packets through again."""
        _ip("link", "set", self.network, "up")


@contextmanager
def cable() -> Iterator[Cable]:
    """Make another network, and a cable to it; skip the test where this user may not."""
    number = next(_NUMBERS)
    line = Cable(f"fr{os.getpid()}", f"10.78.{number}.1", f"10.78.{number}.2")
    try:
        _ip("netns", "add", line.network)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this user cannot make networks")
    try:
        _ip("link", "add", line.network, "type", "veth", "peer", "name", "eth0", "netns", line.network)
        _ip("addr", "add", f"{line.here}/30", "dev", line.network)
        _ip("-n", line.network, "addr", "add", f"{line.there}/30", "dev", "eth0")
        _ip("-n", line.network, "link", "set", "lo", "up")
        _ip("-n", line.network, "link", "set", "eth0", "up")
        line.plug()
        yield line
    finally:
        _ip("netns", "delete", line.network)  # its end of the cable goes with it, and so does the other one


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def test_a_leader_whose_cable_is_pulled_is_replaced_and_ends(tmp_path: Path) -> None:
    job = CountedJob(SEED, 2 * ROUNDS_EACH)
    with cable() as line:
        cluster = postgres.Cluster(postgres.folder_for_anybody(), listen=line.here)
        fleet = ServerElsewhere(tmp_path, cluster.new_database(), settings=SETTINGS)
        fleet.server.prefix = ("ip", "netns", "exec", line.network)
        ports = {key: f"{line.there}:{free_port()}" for key in ("listen", "control_listen")}
        fleet.server.settings |= {**ports, "insecure": True}
        try:
            with fleet, KillableClients(fleet, job.update_log, NAMES) as clients:
                job.start(fleet)
                fleet.until_the_standby_waits()
                clients.allow_rounds(ROUNDS_EACH)
                clients.server_is_up.clear()
                line.pull()
                fleet.until_the_standby_leads()
                for name in NAMES:
                    clients.kill(name, spool=True)
                clients.server_is_up.set()
                assert wait_for(fleet, "the end of the leader", fleet.server.wait) == Exit.TRY_AGAIN
                line.plug()
                fleet.take_turns()
                fleet.until_the_standby_waits()
                ENDS["killed"](fleet, clients, Random(SEED))
                job.end(fleet, clients)
                job.check(state_of(fleet))
        finally:
            cluster.stop()


@pytest.mark.soak
def test_a_leader_that_has_stood_still_for_half_a_minute_accepts_nothing(tmp_path: Path, database: str) -> None:
    job = CountedJob(SEED, 2 * ROUNDS_EACH)
    with (
        TwoAddresses(tmp_path, database, settings=SETTINGS) as fleet,
        KillableClients(fleet, job.update_log, NAMES) as clients,
    ):
        job.start(fleet)
        clients.allow_rounds(ROUNDS_EACH)
        freeze(fleet, clients, Random(SEED), 30.0)
        job.end(fleet, clients)
        job.check(state_of(fleet))
