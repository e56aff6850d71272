"""Consent with real daemons: what a site has not approved does not run there, and what ran is in both logs."""

import time
from pathlib import Path
from typing import Any

import pytest

from fedring.client.consent.audit import FOLDER
from fedring.client.consent.cards import Cards, Decision, KeptCard
from fedring.control.calls import Events
from fedring.control.failure import Failure
from fedring.ctl.admin.audit import contradictions, verify
from fedring.daemon.chain import read_chain
from fedring.server.state.backup.create import back_up
from fedring.server.state.backup.restore import restore
from tests.fleets import Control, Fleet, run_job, until_watching
from tests.waiting import until

JOB = {
    "model": "fedring.train.models:digits_mlp",
    "data": "fedring.data:digits",
    "rounds": 3,
    "min_clients": 2,
    "subset_size": 64,
}
CHAINED = {"audit": {"chain": True}}
CARDS = {"approval": {"mode": "cards", "free": ["rounds"]}}
QUICK = {"idle_heartbeat_seconds": 0.3}


def state_of(fleet: Fleet, name: str) -> Path:
    return Path(fleet.directory) / "state" / name


def test_both_sides_have_the_same_history_after_kills(tmp_path: Path) -> None:
    job = {**JOB, "rounds": 2}
    with Fleet(tmp_path, {"audit_chain": True}, [CHAINED, CHAINED]) as fleet:
        with Control(fleet.control) as control:
            until_watching(control, 2)
            run_job(control, job)
        fleet.kill(0)
        fleet.server.kill()
        fleet.start_server()
        fleet.restart(0)
        with Control(fleet.control) as control:
            until_watching(control, 2)
            run_job(control, job)
    client, server = state_of(fleet, "client-0") / FOLDER, state_of(fleet, "server") / "receipts"
    verify(client, server)
    verify(server, state_of(fleet, "client-1") / FOLDER)
    lines = read_chain(client)
    told = [line.facts["what"] for line in lines]
    assert told.count("start") == 2
    assert min(told.count("sends"), told.count("accepted"), told.count("trains"), told.count("evaluates")) == 4
    updates = {line.facts["update"] for line in lines if line.facts["what"] == "accepted"}
    assert updates < {line.facts.get("update") for line in read_chain(server)}
    assert not any(str(tmp_path) in str(line.facts) for line in lines)  # no path of the site

    (month,) = client.iterdir()
    month.write_bytes(b"".join(month.read_bytes().splitlines(keepends=True)[:-8]))
    with pytest.raises(Failure, match="contradict"):
        verify(client, server)
    assert list(contradictions(read_chain(client), read_chain(server)))


def until_told(events: Events, text: str) -> None:
    """Read events until one has this text."""
    for event in events:
        if text in event.text:
            return


def waiting_card(fleet: Fleet, name: str) -> KeptCard:
    """Wait for a card of which nobody has decided, and return it."""

    def waiting() -> list[KeptCard]:
        return [kept for kept in Cards(state_of(fleet, name)).all()[0] if not kept.decisions]

    until(waiting)
    return waiting()[0]


def approve(fleet: Fleet, name: str) -> KeptCard:
    kept = waiting_card(fleet, name)
    return Cards(state_of(fleet, name)).decide(kept, Decision(time.time(), 0, approved=True, note="vote 7"))


def test_a_job_waits_until_enough_sites_have_approved_it(tmp_path: Path) -> None:
    sites = [CARDS | CHAINED] * 3
    job = {**JOB, "rounds": 1, "min_clients": 3, "min_clients_to_aggregate": 3, "barrier_timeout_seconds": 0.5}
    with Fleet(tmp_path, QUICK, sites) as fleet, Control(fleet.control) as control:
        until_watching(control, 3)
        events, told = control.events(), control.events()
        job_id = control.start_job(job).job_id
        until_told(told, "0 of 3 sites have approved the job")
        approve(fleet, "client-0")
        approve(fleet, "client-2")
        until_told(told, "2 of 3 sites have approved the job, not yet: client-1")
        assert "has not approved job 1" in {each.client_id: each.busy for each in control.clients()}["client-1"]
        kept = approve(fleet, "client-1")
        list(control.follow_job(job_id, events))
        assert control.job(job_id).state == "completed"

        run_job(control, {**job, "rounds": 2})  # a key that is free
        changed = control.start_job({**job, "lr": 0.7}).job_id
        again = waiting_card(fleet, "client-1")
        assert again.card.facts["round"]["lr"] == 0.7
        Cards(state_of(fleet, "client-1")).decide(kept, Decision(time.time(), 0, approved=False))
        control.stop_job(changed)
    lines = [line.facts for line in read_chain(state_of(fleet, "client-1") / FOLDER)]
    assert "not_approved" in {facts.get("reason") for facts in lines}
    assert {facts["card"] for facts in lines if facts["what"] == "trains"} == {kept.card.name}


def test_nobody_trains_in_vain_when_a_site_that_has_not_decided_starts_again(tmp_path: Path) -> None:
    job = {**JOB, "rounds": 1, "min_clients": 2, "min_clients_to_aggregate": 2}
    with Fleet(tmp_path, QUICK, [CARDS | CHAINED] * 2) as fleet, Control(fleet.control) as control:
        until_watching(control, 2)
        events, told = control.events(), control.events()
        job_id = control.start_job(job).job_id
        until_told(told, "0 of 2 sites have approved the job")
        approve(fleet, "client-0")
        until_told(told, "1 of 2 sites have approved the job")
        fleet.restart(1)
        until_watching(control, 2)
        until(lambda: "has not approved job 1" in {each.client_id: each.busy for each in control.clients()}["client-1"])
        approve(fleet, "client-1")
        list(control.follow_job(job_id, events))
        assert control.job(job_id).state == "completed"
    told_by_site = [line.facts["what"] for line in read_chain(state_of(fleet, "client-0") / FOLDER)]
    assert told_by_site.count("trains") == 1


MODES: dict[str, dict[str, Any]] = {
    "secure": {"secure_aggregation": {}, "evaluate": False},
    "data_parallel": {"mode": "data_parallel", "subset_size": 512},
    "pipeline": {"mode": "pipeline", "subset_size": 512, "pipeline": {"stages": 2}},
    "asynchronous": {
        "asynchronous": {"concurrency": 3, "buffer": 3},
        "weights": "uniform",
        "evaluate": False,
    },
}


@pytest.mark.parametrize("mode", MODES)
def test_a_job_of_any_mode_waits_and_loses_no_round(tmp_path: Path, mode: str) -> None:
    sites = 2 if mode == "pipeline" else 3
    few = {"rounds": 1, "max_abandoned": 1, "min_clients": sites, "min_clients_to_aggregate": sites}
    with Fleet(tmp_path, QUICK, [CARDS] * sites) as fleet, Control(fleet.control) as control:
        until_watching(control, sites)
        events, told = control.events(), control.events()
        job_id = control.start_job({**JOB, **few, **MODES[mode]}).job_id
        until_told(told, f"0 of {sites} sites have approved the job")
        for client in fleet.clients:
            approve(fleet, client.name)
        list(control.follow_job(job_id, events))
        ended = control.job(job_id)
        assert (ended.state, ended.reason, ended.rounds_done) == ("completed", "", 1)


def test_after_a_restore_no_job_waits_for_one_that_is_gone(tmp_path: Path) -> None:
    job = {**JOB, "rounds": 1, "min_clients": 1, "min_clients_to_aggregate": 1}
    with Fleet(tmp_path, QUICK, [CARDS]) as fleet:
        state, copy = state_of(fleet, "server"), tmp_path / "copy"
        with Control(fleet.control) as control:
            until_watching(control, 1)
            events = control.events()
            approved = control.start_job(job).job_id
            approve(fleet, "client-0")
            list(control.follow_job(approved, events))
            back_up(state, copy)
            told = control.events()
            lost = control.start_job({**job, "lr": 0.7}).job_id
            until_told(told, "0 of 1 site have approved the job")
        fleet.server.kill()
        restore(copy, state, replace=True)
        fleet.start_server()
        with Control(fleet.control) as control:
            until_watching(control, 1)
            again = run_job(control, {**job, "barrier_timeout_seconds": 60, "approval_timeout_seconds": 60})
            assert (again.job_id, again.state) == (lost, "completed")


@pytest.mark.parametrize("needed", [5, 3])
def test_of_five_sites_three_have_approved(tmp_path: Path, needed: int) -> None:
    """The job waits for the fifth, or begins with those that have, as its min_clients says."""
    job = {**JOB, "rounds": 1, "min_clients": needed, "min_clients_to_aggregate": 3, "barrier_timeout_seconds": 0.5}
    with Fleet(tmp_path, QUICK, [CARDS | CHAINED] * 5) as fleet, Control(fleet.control) as control:
        until_watching(control, 5)
        events, told = control.events(), control.events()
        job_id = control.start_job(job).job_id
        until_told(told, "0 of 5 sites have approved the job")
        for name in ("client-0", "client-2", "client-4"):
            approve(fleet, name)
        if needed == 5:
            until_told(told, "3 of 5 sites have approved the job, not yet: client-1, client-3")
            assert control.job(job_id).state == "running"
            approve(fleet, "client-1")
            until_told(told, "4 of 5 sites have approved the job, not yet: client-3")
            approve(fleet, "client-3")
        list(control.follow_job(job_id, events))
        assert control.job(job_id).state == "completed"
        (published,) = [row for row in control.rounds() if row.phase == "published"]
        assert published.delivered == needed


def test_the_log_of_a_private_job_says_what_was_spent(tmp_path: Path) -> None:
    noise = {"dp": {"noise_multiplier": 2.0, "clip": 1.0, "adaptive": False}, "weights": "uniform", "evaluate": False}
    with Fleet(tmp_path, None, [CHAINED, {}]) as fleet, Control(fleet.control) as control:
        until_watching(control, 2)
        assert run_job(control, {**JOB, **noise, "rounds": 2}).state == "completed"
    lines = [line.facts for line in read_chain(state_of(fleet, "client-0") / FOLDER)]
    spent = [facts["epsilon"] for facts in lines if facts["what"] == "trains"]
    assert 0 < spent[0] < spent[1]
    assert {facts["delta"] for facts in lines if facts["what"] == "trains"} == {1e-5}
