"""Replacements for lost workers: whoever would refuse the place, or does, leaves it to others."""

import asyncio
from pathlib import Path

import pytest
from tests.journal_events import each_event
from tests.unit.host import Host, running, spec

from fedring.server.group import machine as gr
from fedring.server.round.dispatch import Dispatch
from fedring.server.round.open_round import OpenRound
from fedring.server.running.replacements import enlist, replacements
from fedring.v1 import federation_pb2 as pb
from fedring.v1 import rendezvous_pb2


async def started(host: Host) -> OpenRound:
    """Start a round of two workers, and return it when it trains."""
    await host.jobs.start(spec(mode="data_parallel", min_clients=2, sample_clients=2), "")
    async with asyncio.timeout(60):
        async for event in each_event(host.journal, 1):
            if event.kind == "round_started":
                break
    return host.round


async def test_no_worker_is_replaced_by_a_client_whose_site_has_not_approved_the_job(tmp_path: Path) -> None:
    async with running(tmp_path) as host:
        sessions = {name: host.join(name) for name in ("a", "b", "c", "d")}
        open_ = await started(host)
        selected = sorted(open_.row.selected)
        waits, other = sorted(sessions.keys() - set(selected))
        sessions[waits].report(pb.WatchRequest(unapproved_jobs=[open_.row.job_id]))
        host.rounds.works(sessions[waits])
        assert open_.group is not None
        open_.group.state = gr.GroupState(gr.GroupRules(2, 1, 10.0), frozenset(selected), has_run=True)
        for name in selected:
            host.sessions.drop(sessions[name])
        assert replacements(open_, host.rounds, host.sessions) == [other]
        sessions[waits].report(pb.WatchRequest())
        host.rounds.works(sessions[waits])
        assert replacements(open_, host.rounds, host.sessions) == [waits, other]


async def test_a_newcomer_that_refuses_the_place_of_a_lost_worker_does_not_end_the_round(tmp_path: Path) -> None:
    """Nobody knew that its site had not approved the job."""
    async with running(tmp_path) as host:
        for name in ("a", "b"):
            host.join(name)
        open_ = await started(host)
        assert open_.group is not None
        rules = gr.GroupRules(2, 2, 10.0, whole=True)
        open_.group.state = gr.GroupState(rules, frozenset({"a"}), has_run=True)
        newcomer = host.join("c")
        await enlist(host.rounds, Dispatch(host.sessions), host.facts, open_, "c")
        await host.command(newcomer)
        newcomer.report(pb.WatchRequest(unapproved_jobs=[open_.row.job_id]))
        for name, ends in (("c", False), ("a", True)):
            open_.group.state = gr.GroupState(rules, frozenset({"a"}), has_run=not ends)
            host.parts.reports.failed(name, pb.Failure(round=open_.row.round, reason="not_approved", detail="x"))
            assert open_.group.active != ends


@pytest.mark.parametrize("when", ["before", "after"])
async def test_workers_that_are_cut_off_while_their_result_is_accepted_have_taken_part(
    tmp_path: Path, when: str
) -> None:
    async with running(tmp_path) as host:
        sessions = {name: host.join(name) for name in ("a", "b")}
        open_ = await started(host)
        group, groups = open_.group, host.rounds.groups
        assert group is not None
        number = group.generation
        for name in sessions:
            groups.handle(open_, gr.Entered(name))
        for name in sessions:
            groups.handle(open_, gr.Ready(name, number, f"{name}:1"))
        for name in sessions:
            groups.handle(open_, gr.WorkerJoined(name, number))
        for name in sessions:
            group.note(name, rendezvous_pb2.Done(generation=number, digest=bytes(32), num_samples=7))
            groups.handle(open_, gr.WorkerDone(name, number, bytes(32)))
        update = host.update(await host.command(sessions["a"]), "a")
        host.gate.close("updates.accept")
        offered = host.offer(update)
        await host.gate.reached()
        if when == "after":
            host.gate.open()
            await offered
        for name in sessions:
            groups.handle(open_, gr.WorkerLeft(name))
        host.gate.open()
        await offered
        assert {name: row["num_samples"] for name, row in open_.stats(0.0)["clients"].items()} == {"a": 1, "b": 7}


async def test_a_round_whose_workers_all_fail_at_once_ends_for_their_reason(tmp_path: Path) -> None:
    async with running(tmp_path) as host:
        for name in ("a", "b"):
            host.join(name)
        open_ = await started(host)
        assert open_.group is not None
        open_.group.state = gr.GroupState(gr.GroupRules(2, 2, 10.0, whole=True), frozenset({"a", "b"}))
        failure = pb.Failure(round=open_.row.round, reason="other_samples", detail="1436 and 1437")
        for name in ("a", "b"):  # before anything that waits can run
            host.parts.reports.failed(name, failure)
        async with asyncio.timeout(60):
            async for event in each_event(host.journal, 1):
                if event.kind == "round_abandoned":
                    break
        (row,) = await host.facts.db(host.store.rounds.newest, 1)
        assert row.reason == "other_samples"
