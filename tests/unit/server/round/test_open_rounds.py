"""Several open rounds at once: each is an object, and what comes for one of them does not touch the others."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
from tests.unit.host import ONES, Host, running, spec

from fedring.rpc.errors import UnknownRound
from fedring.server.group import machine as gr
from fedring.server.group.rendezvous import Rendezvous
from fedring.server.round.events import Left, Phase
from fedring.server.round.open_round import OpenRound
from fedring.server.running.rounds import abandon
from fedring.server.sessions.sessions import Session
from fedring.train.jobs.job import Job
from fedring.v1 import federation_pb2 as pb

EU, US = {"site": "eu"}, {"site": "us"}


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    async with running(tmp_path) as host:
        yield host


async def opened(host: Host, job: Job) -> OpenRound:
    """Open the first round of a job beside all others, as a queue that runs several jobs at once would."""
    row, _ = await host.jobs.start(job, "")
    running_job, _ = await host.parts.starter.begin(row, job)
    return await host.parts.opener.open(running_job, 1, await host.parts.starter.base_of(running_job))


def job(labels: Mapping[str, str], **keys: object) -> Job:
    return spec(clients=dict(labels), min_clients=2, seed=1, **keys)


async def two_rounds(tmp_path: Path) -> AsyncIterator[tuple[Host, list[OpenRound]]]:
    """Yield a host whose queue stands still, and the open rounds of two jobs for different clients."""
    host = Host(tmp_path)
    accepting = asyncio.create_task(host.parts.acceptor.run())
    yield host, [await opened(host, job(EU)), await opened(host, job(US))]
    accepting.cancel()
    host.facts.close()


@pytest.fixture
async def both(tmp_path: Path) -> AsyncIterator[tuple[Host, list[OpenRound]]]:
    async for each in two_rounds(tmp_path):
        yield each


async def trained(host: Host, open_: OpenRound, sessions: list[Session], value: float) -> None:
    """Deliver an update of each client of a round."""
    for session in sessions:
        command = await host.command(session)
        assert command.round == open_.row.round
        assert not await host.offer(host.update(command, session.client_id, value * ONES))


async def test_two_rounds_of_two_jobs_are_open_at_once_and_each_publishes_its_own_model(
    both: tuple[Host, list[OpenRound]],
) -> None:
    host, (first, second) = both
    europe = [host.join(name, EU) for name in ("a", "b")]
    america = [host.join(name, US) for name in ("x", "y")]
    assert list(host.rounds) == [first, second]
    assert host.rounds.newest is second
    assert host.rounds.get(first.row.round) is first
    runs = [asyncio.create_task(host.parts.runner.run(open_)) for open_ in (first, second)]
    async with asyncio.timeout(60):
        # The updates of both rounds come in turn, and the round that was opened last closes first.
        await trained(host, first, europe[:1], 1.0)
        await trained(host, second, america, 3.0)
        assert (await runs[1]).published
        assert (first.phase, list(host.rounds)) == (Phase.TRAINING, [first])
        assert set(first.accepted) == {"a"}
        assert set(second.accepted) == {"x", "y"}
        await trained(host, first, europe[1:], 1.0)
        assert (await runs[0]).published
    assert list(host.rounds) == []
    assert first.made is not None
    assert second.made is not None
    assert (first.made.round, second.made.round) == (first.row.round, second.row.round)
    assert (first.made.job_id, second.made.job_id) == (first.row.job_id, second.row.job_id)
    assert {first.row.phase, second.row.phase} == {"published"}
    made = [await host.facts.db(host.store.models.get, open_.made.version) for open_ in (first, second) if open_.made]
    assert made == [first.made, second.made]


async def test_rounds_that_close_at_once_publish_one_after_the_other(both: tuple[Host, list[OpenRound]]) -> None:
    host, open_rounds = both
    clients = ((EU, "a"), (EU, "b"), (US, "x"), (US, "y"))
    sessions = {name: host.join(name, labels) for labels, name in clients}
    runs = [asyncio.create_task(host.parts.runner.run(open_)) for open_ in open_rounds]
    commands = {name: await host.command(session) for name, session in sessions.items()}
    await asyncio.gather(*(host.offer(host.update(command, name)) for name, command in commands.items()))
    async with asyncio.timeout(60):
        assert all([(await run).published for run in runs])
    versions = [open_.made.version for open_ in open_rounds if open_.made]
    assert len(set(versions)) == 2
    assert host.rounds.latest is not None
    assert host.rounds.latest.version == max(versions)


async def test_an_update_for_one_open_round_is_refused_by_the_other(both: tuple[Host, list[OpenRound]]) -> None:
    host, (first, second) = both
    session, *_ = [host.join(name, EU) for name in ("a", "b")]
    runs = [asyncio.create_task(host.parts.runner.run(open_)) for open_ in (first, second)]
    command = await host.command(session)
    command.round = second.row.round
    with pytest.raises(UnknownRound) as refused:
        await host.offer(host.update(command, "a"))
    assert refused.value.reason == "round_closed"  # that one still waits for its clients
    assert second.phase is Phase.WAITING
    for run in runs:
        run.cancel()


async def test_a_stop_a_loss_and_a_failure_concern_their_own_round(both: tuple[Host, list[OpenRound]]) -> None:
    host, (first, second) = both
    sessions = {name: host.join(name, labels) for name, labels in (("a", EU), ("b", EU), ("x", US), ("y", US))}
    runs = [asyncio.create_task(host.parts.runner.run(open_)) for open_ in (first, second)]
    for session in sessions.values():
        await host.command(session)
    host.parts.reports.failed("a", pb.Failure(round=first.row.round, reason="no_data"))
    host.parts.reports.failed("x", pb.Failure(round=first.row.round, reason="no_data"))  # which it is not part of
    assert (len(first.failures), second.failures) == (1, [])
    host.sessions.drop(sessions["y"])
    host.rounds.presence(Left("y"))
    assert ("y" in first.state.members, "y" in second.state.members) == (False, True)  # that one waits for it
    assert await abandon(host.rounds, host.rounds.of_job(first.row.job_id), "stopped") == first.row.round
    assert not (await runs[0]).published
    assert (second.phase, list(host.rounds)) == (Phase.TRAINING, [second])
    runs[1].cancel()


async def test_each_open_round_has_a_group_of_its_own_with_another_generation(tmp_path: Path) -> None:
    host = Host(tmp_path)
    open_rounds = [await opened(host, job(labels, mode="data_parallel")) for labels in (EU, US)]
    sessions = [host.join(name, labels) for labels, name in ((EU, "a"), (EU, "b"), (US, "x"), (US, "y"))]
    runs = [asyncio.create_task(host.parts.runner.run(open_)) for open_ in open_rounds]
    for session in sessions:
        await host.command(session)
    groups = [open_.group for open_ in open_rounds if open_.group is not None]
    assert sorted(group.generation for group in groups) == [1, 2]
    assert [sorted(group.state.expected) for group in groups] == [["a", "b"], ["x", "y"]]
    host.rounds.groups.handle(open_rounds[0], gr.Entered("a"))
    assert [set(group.state.workers) for group in groups] == [{"a"}, set()]
    for run in runs:
        run.cancel()
    host.facts.close()


async def test_the_groups_of_two_rounds_form_for_themselves(host: Host) -> None:
    groups = [
        Rendezvous(number, gr.GroupRules(1), ["a"], {}, slowest=lambda: 0.0, generation=number) for number in (1, 2)
    ]
    for event in (gr.Entered("a"), gr.Ready("a", 1, "a:1"), gr.WorkerJoined("a", 1)):
        groups[0].handle(event)
    assert [group.state.phase for group in groups] == [gr.GroupPhase.RUNNING, gr.GroupPhase.GATHERING]
    assert groups[0].view("a").WhichOneof("message") == "start"
    assert groups[1].view("a").ended.reason == "too_late"  # whoever has entered one group is not in the other


async def test_the_traffic_of_a_client_is_shown_in_no_round_of_another_job(both: tuple[Host, list[OpenRound]]) -> None:
    host, (first, second) = both
    europe = [host.join(name, EU) for name in ("a", "b")]
    run = asyncio.create_task(host.parts.runner.run(first))
    async with asyncio.timeout(60):
        await trained(host, first, europe, 1.0)
        assert (await run).published
    host.parts.reports.traffic("a").download_bytes += 1  # as of a download that ends late
    assert host.rounds.newest is second
    assert dict(second.traffic) == {}
