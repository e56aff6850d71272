"""Replacements for lost workers: whoever would refuse the place leaves it to others."""

from pathlib import Path

from tests.journal_events import each_event
from tests.unit.host import running, spec

from fedring.server.group import machine as gr
from fedring.server.round.replacements import replacements
from fedring.v1 import federation_pb2 as pb


async def test_no_worker_is_replaced_by_a_client_whose_site_has_not_approved_the_job(tmp_path: Path) -> None:
    """Its refusal would end the round of a group that must be whole."""
    async with running(tmp_path) as host:
        sessions = {name: host.join(name) for name in ("a", "b", "c", "d")}
        job, _ = await host.jobs.start(spec(mode="data_parallel", min_clients=2, sample_clients=2), "")
        async for event in each_event(host.journal, 1):
            if event.kind == "round_started":
                break
        open_ = host.round
        selected = sorted(open_.row.selected)
        waits, other = sorted(sessions.keys() - set(selected))
        sessions[waits].report(pb.WatchRequest(unapproved_jobs=[job.job_id]))
        host.rounds.works(sessions[waits])
        assert open_.group is not None
        open_.group.state = gr.GroupState(gr.GroupRules(2, 1, 10.0), frozenset(selected), has_run=True)
        for name in selected:
            host.sessions.drop(sessions[name])
        assert replacements(open_, host.rounds, host.sessions) == [other]
        sessions[waits].report(pb.WatchRequest())
        host.rounds.works(sessions[waits])
        assert replacements(open_, host.rounds, host.sessions) == [waits, other]
        await host.jobs.stop(job.job_id)
        assert await host.ended(job.job_id) == "stopped"
