"""Kills while a job waits for people at sites: it goes on waiting, and nobody trains in vain."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fedring.client.consent.audit import FOLDER
from fedring.client.consent.cards import Cards, Decision, KeptCard
from fedring.control.signing import sign_job
from fedring.ctl.fleet import Fleet as ShippedFleet
from fedring.daemon.chain import read_chain
from fedring.server.state.backup.create import back_up
from fedring.server.state.backup.restore import restore
from fedring.v1 import control_pb2
from tests import postgres
from tests.fault.faulty_fleet import FaultyFleet
from tests.fault.two_servers import TwoServers
from tests.fleets import Control, until_watching
from tests.pki import Pki, flctl
from tests.waiting import until

JOB: dict[str, Any] = {
    "model": "fedring.train.models:digits_mlp",
    "data": "fedring.data:digits",
    "rounds": 2,
    "min_clients": 2,
    "min_clients_to_aggregate": 2,
    "subset_size": 64,
    "max_abandoned": 1,
    "deadline_seconds": 240,
}
SITE: dict[str, Any] = {"approval": {"mode": "cards"}, "audit": {"chain": True}}
QUICK = {"idle_heartbeat_seconds": 0.3}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "asynchronous": {"asynchronous": {"concurrency": 2, "buffer": 2}, "weights": "uniform", "evaluate": False},
}


def state_of(fleet: ShippedFleet, name: str) -> Path:
    return Path(fleet.directory) / "state" / name


def waiting(fleet: ShippedFleet, name: str) -> list[KeptCard]:
    return [kept for kept in Cards(state_of(fleet, name)).all()[0] if not kept.decisions]


def approve(fleet: ShippedFleet, name: str) -> None:
    until(lambda: waiting(fleet, name))
    approve_all(fleet, name)


def approve_all(fleet: ShippedFleet, *names: str) -> None:
    for name in names:
        for kept in waiting(fleet, name):
            Cards(state_of(fleet, name)).decide(kept, Decision(time.time(), 0, approved=True))


def noted(fleet: ShippedFleet, name: str, what: str) -> int:
    return [line.facts["what"] for line in read_chain(state_of(fleet, name) / FOLDER)].count(what)


def until_only_one_waits(control: Control) -> None:
    """Wait until the server knows that only the second site has not decided."""

    def known() -> bool:
        busy = {each.client_id: each.busy for each in control.clients() if each.state == "watching"}
        return len(busy) == 2 and "has not approved" in busy["client-1"] and not busy["client-0"]

    until(known)


def until_refusal_is_durable(control: Control) -> None:
    """Wait until a restarted server knows that the first round has ended, and asks nobody for it again."""
    until(lambda: any(row.reason == "not_approved" for row in control.rounds()))


def ended(fleet: FaultyFleet, control: Control, job_id: int, *approve: str) -> control_pb2.Job:
    """Return a job when it has ended; meanwhile, these sites approve all that they are asked about."""

    def over() -> bool:
        approve_all(fleet, *approve)
        return control.job(job_id).state not in ("queued", "running")

    until(over)
    return control.job(job_id)


@contextmanager
def asked(fleet: FaultyFleet, **keys: Any) -> Iterator[int]:
    """Start a job, and yield its number when the first of two sites has approved it."""
    with fleet:
        with Control(fleet.control) as control:
            until_watching(control, 2)
            job_id = control.start_job({**JOB, **keys}).job_id
            approve(fleet, "client-0")
            until(lambda: waiting(fleet, "client-1"))
            until_refusal_is_durable(control)
            until_only_one_waits(control)
        yield job_id


def check(fleet: FaultyFleet, job_id: int) -> None:
    """Let the second site approve, and check that all has run once."""
    with Control(fleet.control) as control:
        until_watching(control, 2)
        until_only_one_waits(control)
        approve(fleet, "client-1")
        job = ended(fleet, control, job_id)
        reasons = {row.reason for row in control.rounds()} - {"", "not_approved"}
    assert (job.state, job.reason, job.rounds_done, reasons) == ("completed", "", 2, set())
    assert noted(fleet, "client-0", "trains") == noted(fleet, "client-1", "trains") == 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("killed", ["server", "client", "both", "all"])
def test_a_job_goes_on_waiting_whoever_is_killed(tmp_path: Path, kind: str, killed: str) -> None:
    fleet = FaultyFleet(tmp_path, QUICK, [SITE, SITE])
    with asked(fleet, **KINDS[kind]) as job_id:
        if killed != "client":
            fleet.server.kill()
        for number in {"server": (), "client": (1,), "both": (1,), "all": (0, 1)}[killed]:
            fleet.kill(number)
            fleet.restart(number)
        if killed != "client":
            fleet.start_server()
        check(fleet, job_id)


@pytest.mark.parametrize("kind", KINDS)
def test_a_standby_goes_on_waiting(tmp_path: Path, kind: str) -> None:
    fleet = TwoServers(tmp_path, postgres.shared().new_database(), [SITE, SITE], settings=QUICK)
    with asked(fleet, **KINDS[kind]) as job_id:
        fleet.exchange()
        fleet.kill(1)
        fleet.restart(1)
        fleet.exchange()
        check(fleet, job_id)


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    made = Pki(tmp_path_factory.mktemp("pki"))
    flctl("certs", "issue", made.folder, "ann", "--role", "operator")
    return made


@pytest.mark.parametrize("drawn", [2, 1])
def test_signed_jobs_that_waited_or_were_queued_in_a_backup_run_again(tmp_path: Path, pki: Pki, drawn: int) -> None:
    """Also if a site is not drawn for the first round then, or has only evaluated before."""
    # Calls to a Unix socket are in plaintext also with tls.ca.
    site = {"tls": {"ca": str(pki.folder / "ca.crt")}, "approval": {"mode": "cards", "allowed_operators": ["ann"]}}
    fleet = FaultyFleet(tmp_path, {**QUICK, "listen": f"unix:{tmp_path}/wire"}, [SITE | site] * 2)
    keys = {"start": "fresh", "rounds": 4, "sample_clients": drawn, "min_clients_to_aggregate": drawn}
    job = {**JOB, **keys, "bounds": {"repeats": 8}}
    state, copy, sites = state_of(fleet, "server"), tmp_path / "copy", ("client-0", "client-1")

    def run(control: Control, job_id: int) -> None:
        found = ended(fleet, control, job_id, *sites)
        assert (found.state, found.reason, found.rounds_done) == ("completed", "", 4)

    with fleet:
        with Control(fleet.control) as control:
            control.tls = pki.tls("ann")
            until_watching(control, 2)
            jobs = [control.start_signed(sign_job(control, job | {"seed": seed})).job_id for seed in (1, 2)]
            until(lambda: any(waiting(fleet, site) for site in sites))
            back_up(state, copy)
            for job_id in jobs:
                run(control, job_id)
        for _ in range(2):
            fleet.server.kill()
            restore(copy, state, replace=True)
            fleet.start_server()
            with Control(fleet.control) as control:
                for job_id in jobs:
                    run(control, job_id)
