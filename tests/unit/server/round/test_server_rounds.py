"""Rounds with a real store and real blobs: events that happen at the same time do no harm."""

import asyncio
import errno
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.damage import set_epoch
from tests.unit.host import ONES, SIZE, Host, running, spec

from fedring.codec.digest import name_of
from fedring.rpc.errors import BadUpdate, DamagedOnTheWay, OtherUpdate, Overloaded, UnknownRound
from fedring.server.round import machine as rd
from fedring.server.round.events import Abandon, Joined, Phase
from fedring.server.round.open_round import OpenRound
from fedring.server.service import upload_calls
from fedring.server.sessions.sessions import Session
from fedring.server.state.blobs import FilePartial
from fedring.server.state.failures import StorageFailed
from fedring.server.state.rows import LastAccepted, ModelRow
from fedring.server.state.sql.store import Store
from fedring.server.update.admission import check_payload
from fedring.train.jobs.job import Job
from fedring.v1 import federation_pb2 as pb


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    async with running(tmp_path) as host:
        yield host


async def test_a_round_goes_from_the_command_to_the_model(host: Host) -> None:
    session = host.join("a")
    job, _ = await host.jobs.start(spec(), "")
    command = await host.command(session)
    assert not await host.offer(host.update(command, "a"))
    assert await host.ended(job.job_id) == "completed"
    assert host.rounds.latest is not None
    assert host.rounds.latest.round == command.round


async def test_a_model_waits_for_a_disk_that_refuses_even_to_remove_what_was_begun(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does that the system has made read-only after an error."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    def refuse_to_write(*_: object) -> None:
        raise StorageFailed("disk_error", "Read-only file system")

    session = host.join("a")
    job, _ = await host.jobs.start(spec(), "")
    update = host.update(await host.command(session), "a")
    with monkeypatch.context() as patch:
        patch.setattr(FilePartial, "write", refuse_to_write)
        patch.setattr(Path, "unlink", refuse)
        assert not await host.offer(update)
        await host.facts.storage.fails.wait()
    async with host.mending():
        assert await host.ended(job.job_id) == "completed"


@pytest.mark.parametrize(
    ("store", "read", "state"),
    [("jobs", "queued", "completed"), ("evaluations", "total", "completed"), ("updates", "counts", "failed")],
)
async def test_a_store_that_fails_for_a_moment_ends_neither_the_server_nor_a_job(
    host: Host, monkeypatch: pytest.MonkeyPatch, store: str, read: str, state: str
) -> None:
    """As one does that another program holds for a while: when a job's turn comes, and after each kind of end."""
    whole, failing = getattr(getattr(host.store, store), read), [True]

    def fail_once(*arguments: Any) -> Any:
        if failing:
            failing.clear()
            raise StorageFailed("disk_error", "database is locked")
        return whole(*arguments)

    monkeypatch.setattr(getattr(host.store, store), read, fail_once)
    keys = {"evaluate": True, "evaluate_seconds": 0.1} if state == "completed" else {"barrier_timeout_seconds": 0.1}
    async with host.mending():
        job, _ = await host.jobs.start(spec(**keys, max_abandoned=1), "")
        if state == "completed":
            session = host.join("a")
            assert not await host.offer(host.update(await host.command(session), "a"))
        assert await host.ended(job.job_id) == state
    assert not failing


async def test_a_store_that_fails_while_a_round_is_opened_leaves_no_second_one(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart would go on with the first of the two, and forget what the other one had accepted."""
    maker, refused = host.parts.models.maker, list[int]()
    whole = maker.command

    def fail_once(job: Job, command: pb.TrainCmd, base: ModelRow) -> None:
        if not refused:
            refused.append(command.round)  # there is a row
            raise StorageFailed("disk_error", "a file of the base cannot be read")
        whole(job, command, base)

    monkeypatch.setattr(maker, "command", fail_once)
    session = host.join("a")
    async with host.mending():
        job, _ = await host.jobs.start(spec(rounds=1), "")
        command = await host.command(session)
        assert [row.round for row in await host.facts.db(host.store.rounds.unended)] == [command.round]
        assert not await host.offer(host.update(command, "a"))
        assert await host.ended(job.job_id) == "completed"
    assert refused == [command.round]


async def test_small_updates_wait_for_each_other_and_share_a_commit(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedring.server.update.acceptance._LONGEST_GATHERING", 5.0)
    batches, commit = list[int](), host.facts.commit_updates

    def counted(batch: Any) -> Any:
        batches.append(len(batch))
        return commit(batch)

    monkeypatch.setattr(host.facts, "commit_updates", counted)
    sessions = [host.join(client) for client in ("a", "b", "c")]
    job, _ = await host.jobs.start(spec(min_clients=3), "")
    commands = [await host.command(session) for session in sessions]
    replies = await asyncio.gather(
        *(host.push(session, command, ONES) for session, command in zip(sessions, commands, strict=True))
    )
    assert [reply.accepted.already for reply in replies] == [False] * 3
    assert batches == [3]
    assert await host.ended(job.job_id) == "completed"


@pytest.mark.parametrize("keys", [{"close_at_minimum": True}, {"straggler_factor": 3.0}])
async def test_an_update_does_not_wait_if_its_round_may_not_either(
    host: Host, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any]
) -> None:
    monkeypatch.setattr("fedring.server.update.acceptance._LONGEST_GATHERING", 50.0)
    sessions = [host.join(client) for client in ("a", "b")]
    await host.jobs.start(spec(min_clients=2, min_clients_to_aggregate=1, **keys), "")
    command, _ = [await host.command(session) for session in sessions]
    async with asyncio.timeout(40):
        assert not (await host.push(sessions[0], command, ONES)).accepted.already


async def test_an_update_waits_only_for_moments_for_others(host: Host) -> None:
    sessions = [host.join(client) for client in ("a", "b")]
    await host.jobs.start(spec(min_clients=2), "")
    command, _ = [await host.command(session) for session in sessions]
    async with asyncio.timeout(60):
        assert not (await host.push(sessions[0], command, ONES)).accepted.already


def asked(host: Host, client: str) -> Session:
    """Return a session of a client whose site has not approved job 1."""
    session = host.join(client)
    decides(host, session, 1)
    return session


def decides(host: Host, session: Session, *unapproved: int) -> None:
    """Take in which jobs the client's site has not approved, as its next heartbeat says."""
    session.unapproved = frozenset(unapproved)
    host.rounds.works(session)


async def test_a_round_that_a_site_has_not_approved_is_not_counted_if_it_approves_meanwhile(host: Host) -> None:
    sessions = {client: host.join(client) for client in ("a", "b")}
    job, _ = await host.jobs.start(spec(min_clients=2, min_clients_to_aggregate=2, max_abandoned=1, rounds=1), "")
    commands = {client: await host.command(session) for client, session in sessions.items()}
    decides(host, sessions["a"], 1)
    host.parts.reports.failed("a", pb.Failure(round=commands["a"].round, reason="not_approved"))
    decides(host, sessions["a"])  # before the other one has trained
    await host.offer(host.update(commands["b"], "b"))
    for client, session in sessions.items():
        await host.offer(host.update(await host.command(session), client))
    assert await host.ended(job.job_id) == "completed"


async def test_failures_count_while_another_site_has_not_approved_the_job(host: Host) -> None:
    sessions = {client: host.join(client) for client in ("a", "b")}
    asked(host, "undecided")
    job, _ = await host.jobs.start(spec(min_clients=2, min_clients_to_aggregate=2, max_abandoned=1, rounds=1), "")
    for client, session in sessions.items():
        host.parts.reports.failed(client, pb.Failure(round=(await host.command(session)).round, reason="train_error"))
    assert await host.ended(job.job_id) == "failed"


def let_an_hour_pass(open_: OpenRound) -> None:
    """Make a round that waits begin, and be held, an hour earlier."""
    assert open_.state.round is not None
    open_.state = replace(open_.state, round=replace(open_.state.round, since=open_.state.round.since - 3600))
    open_.held_since -= 3600


async def seen(what: Callable[[], object]) -> None:
    """Wait until what is looked for is seen."""
    async with asyncio.timeout(60):
        while not what():  # noqa: ASYNC110  # the runner tells nobody
            await asyncio.sleep(0.01)


async def test_a_round_that_waits_for_people_outlasts_a_restart_and_the_absence_of_a_client(tmp_path: Path) -> None:
    async with running(tmp_path) as host:
        for client in ("a", "b"):
            asked(host, client)
        await host.jobs.start(spec(min_clients=2, barrier_timeout_seconds=60), "")
        await seen(lambda: any(open_.held_since for open_ in host.rounds))
        open_ = host.round
        let_an_hour_pass(open_)
        session = host.sessions.get("b")
        assert session is not None
        host.parts.reports.left(session)
        await seen(lambda: not open_.held_since)
        assert open_.phase is Phase.WAITING
        asked(host, "b")
        await seen(lambda: open_.held_since)
        let_an_hour_pass(open_)
        await host.parts.keeper.save_time(less=1.0)
    async with running(tmp_path) as host:
        await seen(lambda: list(host.rounds))
        assert host.round.row.seconds_left == pytest.approx(60, abs=5)
        assert host.round.phase is Phase.WAITING
        sessions = [asked(host, client) for client in ("a", "b")]
        await seen(lambda: host.round.held_since)
        for session in sessions:
            decides(host, session)
        assert {(await host.command(session)).job.job_id for session in sessions} == {1}


async def test_a_restart_within_moments_of_the_command_leaves_nobody_behind_as_a_straggler(tmp_path: Path) -> None:
    clients = ("a", "b", "c", "d")
    async with running(tmp_path) as host:
        sessions = {client: host.join(client) for client in clients}
        await host.jobs.start(spec(min_clients=4, min_clients_to_aggregate=2, straggler_factor=60), "")
        commands = {client: await host.command(session) for client, session in sessions.items()}
        for client in ("a", "b"):
            await host.offer(host.update(commands[client], client))
    async with running(tmp_path) as host:
        sessions = {client: host.join(client) for client in clients}
        for client in ("c", "d"):
            await host.offer(host.update(await host.command(sessions[client]), client))
        assert await host.ended(1) == "completed"
        (row,) = await host.facts.db(host.store.rounds.newest)
        assert sorted(row.stats["clients"]) == list(clients)


async def test_a_stop_while_the_round_starts_ends_it(host: Host) -> None:
    host.gate.close("rounds.replace")
    job, _ = await host.jobs.start(spec(max_abandoned=5, rounds=5), "")
    host.join("a")
    await host.gate.reached()  # the row says "training", but the state machine does not know it yet
    stop = asyncio.create_task(host.jobs.stop(job.job_id))
    await asyncio.sleep(0)  # the stop has begun
    host.gate.open()
    assert (await stop)[1] == 1
    assert await host.ended(job.job_id) == "stopped"


async def test_a_stop_while_an_update_is_being_accepted_takes_effect_after_the_acceptance(host: Host) -> None:
    sessions = [host.join(client) for client in ("a", "b")]
    job, _ = await host.jobs.start(spec(min_clients=2), "")
    command, _ = [await host.command(session) for session in sessions]
    host.gate.close("updates.accept")
    offer = host.offer(host.update(command, "a"))
    await host.gate.reached()
    stop = asyncio.create_task(host.jobs.stop(job.job_id))
    await asyncio.sleep(0)
    host.gate.open()
    assert not await offer
    assert (await stop)[1] == command.round
    assert await host.ended(job.job_id) == "stopped"
    late = host.offer(host.update(command, "b"))
    with pytest.raises(UnknownRound):
        await late


async def test_an_update_that_is_being_accepted_at_the_deadline_counts(host: Host) -> None:
    sessions = [host.join(client) for client in ("a", "b")]
    job, _ = await host.jobs.start(spec(min_clients=2, deadline_seconds=600), "")
    command, _ = [await host.command(session) for session in sessions]
    host.gate.close("updates.accept")
    offer = host.offer(host.update(command, "a"))
    await host.gate.reached()
    open_ = host.round
    assert open_.state.round is not None
    open_.state = replace(open_.state, round=replace(open_.state.round, since=open_.state.round.since - 600))
    assert rd.due(open_.state, time.monotonic()) == Abandon("too_few_clients")
    host.rounds.presence(Joined("c"))
    await asyncio.sleep(0)  # the effect that is due has begun
    host.gate.open()
    assert not await offer
    assert await host.ended(job.job_id) == "completed"


async def test_a_stop_while_the_round_is_being_opened_ends_it(host: Host) -> None:
    host.gate.close("first model")
    job, _ = await host.jobs.start(spec(rounds=3), "")
    await host.gate.reached()
    assert await host.jobs.stop(job.job_id) == (job.job_id, 0)
    host.gate.open()
    assert await host.ended(job.job_id) == "stopped"


async def test_a_job_that_is_stopped_in_its_last_round_ends_as_stopped(host: Host) -> None:
    session = host.join("a")
    job, _ = await host.jobs.start(spec(rounds=2), "")
    await host.offer(host.update(await host.command(session), "a"))
    await host.command(session)
    await host.jobs.stop(job.job_id)
    assert await host.ended(job.job_id) == "stopped"


async def test_a_second_update_of_a_client_in_one_round_is_refused(host: Host) -> None:
    session = host.join("a")
    host.join("b")
    await host.jobs.start(spec(min_clients=2), "")
    command = await host.command(session)
    first, second = (host.offer(host.update(command, "a", values)) for values in (ONES, 2 * ONES))
    assert not await first
    with pytest.raises(OtherUpdate):
        await second


async def test_a_full_disk_refuses_the_update_but_the_round_continues(host: Host) -> None:
    session = host.join("a")
    job, _ = await host.jobs.start(spec(), "")
    command = await host.command(session)
    host.blobs.full = True
    with pytest.raises(Overloaded) as refused:
        await host.offer(host.update(command, "a"))
    assert refused.value.reason == "disk_full"
    host.blobs.full = False
    assert not await host.offer(host.update(command, "a"))
    assert await host.ended(job.job_id) == "completed"


async def test_a_report_that_replaces_another_takes_its_failure_back(host: Host) -> None:
    session = host.join("a")
    await host.jobs.start(spec(evaluate=True, min_clients=1), "")
    command = await host.command(session)
    host.join("b")
    await host.offer(host.update(command, "a"))
    while not pb.ServerEvent.FromString(await session.outbox.get()).HasField("evaluate"):
        pass
    assert host.rounds.newest is not None
    assert host.rounds.newest.made is not None
    open_, made = host.rounds.newest, host.rounds.newest.made
    failed = pb.EvaluationReport(
        round=command.round, model_digest=made.digest, failure="no\x1b[31m\ncolumn" + "x" * 2000
    )
    await host.parts.reports.evaluated("a", failed)
    (text,) = open_.unevaluated.values()
    assert text.startswith("a could not evaluate model 2: no [31m columnxxx")
    assert len(text) < 1100
    report = pb.EvaluationReport(round=command.round, model_digest=made.digest, total=1)
    await host.parts.reports.evaluated("a", report)
    assert open_.unevaluated == {}


async def test_an_evaluation_names_the_epoch_of_its_round(host: Host) -> None:
    session = host.join("a")
    host.store.epoch = 3  # as after three restores
    await host.jobs.start(spec(evaluate=True, min_clients=1), "")
    await host.offer(host.update(await host.command(session), "a"))
    while not (event := pb.ServerEvent.FromString(await session.outbox.get())).HasField("evaluate"):
        pass
    assert event.evaluate.epoch == 3


async def test_an_evaluation_that_arrives_while_its_round_ends_does_no_harm(host: Host) -> None:
    session = host.join("a")
    job, _ = await host.jobs.start(spec(evaluate=True, evaluate_seconds=0.1), "")
    command = await host.command(session)
    host.gate.close("drop_partials")
    await host.offer(host.update(command, "a"))
    await host.gate.reached()
    assert host.rounds.latest is not None
    report = pb.EvaluationReport(round=command.round, model_digest=host.rounds.latest.digest, total=1)
    evaluated = asyncio.create_task(host.parts.reports.evaluated("a", report))
    await asyncio.sleep(0)  # the report is being recorded
    host.gate.open()
    await evaluated
    assert await host.ended(job.job_id) == "completed"
    with pytest.raises(UnknownRound) as refused:
        await host.parts.reports.evaluated("a", report)
    assert refused.value.reason == "round_closed"
    assert len(await host.facts.db(host.store.evaluations.of_model, 2)) == 1


async def test_old_updates_are_deleted_while_the_clients_of_a_later_round_train(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedring.server.running.keeping._PRUNE_SECONDS", 0.0)  # rounds are short here
    session = host.join("a")
    await host.jobs.start(spec(rounds=5), "")
    first = await host.command(session)
    await host.offer(host.update(first, "a"))
    for _ in range(host.config.keep_update_rounds):
        await host.offer(host.update(await host.command(session), "a"))
    await host.command(session)
    async with asyncio.timeout(60):
        while await host.facts.db(host.store.updates.of_round, first.round):
            pass
    assert host.round.row.job_round == host.config.keep_update_rounds + 2


async def test_short_rounds_leave_old_updates_to_a_later_one_and_the_job_to_its_end(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedring.server.running.keeping._PRUNE_SECONDS", 3600.0)
    session = host.join("a")
    rounds = host.config.keep_update_rounds + 3
    job, _ = await host.jobs.start(spec(rounds=rounds), "")
    commands = []
    for _ in range(rounds):
        commands.append(await host.command(session))
        await host.offer(host.update(commands[-1], "a"))
        assert len(await host.facts.db(host.store.updates.of_round, commands[0].round)) == 1
    await host.ended(job.job_id)
    held = [len(await host.facts.db(host.store.updates.of_round, command.round)) for command in commands]
    assert held == [0] * 3 + [1] * host.config.keep_update_rounds


async def test_a_model_whose_loss_is_not_a_number_is_published_without_an_accuracy(host: Host) -> None:
    session = host.join("a")
    keys = {"model": "fedring.train.models:digits_mlp", "model_args": {}, "evaluate_on_server": True, "rounds": 2}
    job, _ = await host.jobs.start(spec(**keys), "")
    huge = np.full(64 * 64 + 64 + 64 * 10 + 10, 1e28, np.float32)  # below the norm from which updates are refused
    for _ in range(2):
        await host.offer(host.update(await host.command(session), "a", huge))
    assert await host.ended(job.job_id) == "failed"
    assert host.rounds.last is not None
    stats = host.rounds.last.stats
    assert "server_accuracy" not in stats
    assert "The loss of the evaluation is nan" in stats["warnings"][0]


async def test_a_cancelled_caller_waits_for_the_thread_that_works_for_it(host: Host) -> None:
    host.gate.close("work")
    caller = asyncio.create_task(host.facts.work(host.gate.pass_, "work"))
    await host.gate.reached()
    for _ in range(3):
        caller.cancel()
        done, _ = await asyncio.wait([caller], timeout=0.05)
        assert not done
    host.gate.open()
    with pytest.raises(asyncio.CancelledError):
        await caller


async def test_a_small_payload_with_many_values_is_not_checked_in_the_event_loop(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_main_thread = []

    def check(*given: Any) -> float:
        in_main_thread.append(threading.current_thread() is threading.main_thread())
        return check_payload(*given)

    monkeypatch.setattr(upload_calls, "check_payload", check)
    session = host.join("a")
    for size in (SIZE, 500_000):
        await host.jobs.start(spec(model_args={"size": size}), "")
        await host.push(session, await host.command(session), np.zeros(size, np.float32), "uniform")
    assert in_main_thread == [True, False]


async def test_commands_and_their_updates_have_the_epoch_of_the_state(tmp_path: Path) -> None:
    Store(f"sqlite:///{tmp_path / 'facts.sqlite'}").close()
    set_epoch(tmp_path, 1_700_000_000)
    async with running(tmp_path) as host:
        session = host.join("a")
        await host.jobs.start(spec(), "")
        command = await host.command(session)
        assert command.epoch == 1_700_000_000
        await host.push(session, command, ONES)
        (row,) = await host.facts.db(host.store.updates.of_round, command.round)
        assert row.epoch == 1_700_000_000
        assert host.facts.last_accepted == {"a": LastAccepted(row.epoch, row.round, row.name)}


async def test_an_update_must_start_from_the_model_of_its_round_but_may_have_another_epoch(host: Host) -> None:
    session = host.join("a")
    host.join("b")
    await host.jobs.start(spec(min_clients=2), "")
    command = await host.command(session)
    for base in (name_of(b"another model"), "", command.model_digest.upper()):
        with pytest.raises(BadUpdate, match="starts from another model than") as refused:
            await host.push(session, command, ONES, base_digest=base)
        assert refused.value.reason == "wrong_model"
    assert host.facts.last_accepted == {}
    reply = await host.push(session, command, ONES, epoch=77)  # as if it was spooled before the server was restored
    assert not reply.accepted.already
    # The server counts the update in its own epoch, so that later updates are newer.
    assert host.facts.last_accepted["a"].epoch == host.store.epoch == 0


async def test_an_update_is_identified_by_its_header_and_its_payload_together(host: Host) -> None:
    session = host.join("a")
    host.join("b")
    await host.jobs.start(spec(min_clients=2), "")
    command = await host.command(session)
    assert not (await host.push(session, command, ONES)).accepted.already
    assert (await host.push(session, command, ONES)).accepted.already
    others: list[dict[str, Any]] = [{"train_seconds": 1.0}, {"metrics": {"loss": 1.0}}, {"epoch": 5}]
    for changes in others:
        with pytest.raises(OtherUpdate):
            await host.push(session, command, ONES, **changes)
    with pytest.raises(OtherUpdate):
        await host.push(session, command, 2 * ONES)


@pytest.mark.parametrize("size", [SIZE, 50_000], ids=["small", "large"])
async def test_a_payload_that_was_damaged_in_transit_is_refused_and_not_kept(host: Host, size: int) -> None:
    session, values = host.join("a"), np.ones(size, np.float32)
    job, _ = await host.jobs.start(spec(model_args={"size": size}), "")
    command = await host.command(session)
    for place in (0, 20, -1):  # the payload's own header, a value, the last byte

        def flip(payload: bytes, place: int = place) -> bytes:
            damaged = bytearray(payload)
            damaged[place] ^= 1
            return bytes(damaged)

        with pytest.raises(DamagedOnTheWay, match="send it again"):
            await host.push(session, command, values, damage=flip)
        assert host.blobs.partials() == []
    assert host.facts.last_accepted == {}
    await host.push(session, command, values)
    assert await host.ended(job.job_id) == "completed"


async def test_the_last_accepted_updates_in_memory_are_those_of_the_store(host: Host) -> None:
    sessions = [host.join(client) for client in ("a", "b")]
    job, _ = await host.jobs.start(spec(min_clients=2, rounds=2), "")
    for values in (ONES, 2 * ONES):
        commands = [await host.command(session) for session in sessions]
        for session, command in zip(sessions, commands, strict=True):
            await host.push(session, command, values)
            assert host.facts.last_accepted == await host.facts.db(host.store.updates.last_accepted)
    assert [last.round for last in host.facts.last_accepted.values()] == [commands[0].round] * 2
    assert await host.ended(job.job_id) == "completed"
    await host.facts.db(host.facts.drop_updates, commands[0].round, ["a"])
    assert host.facts.last_accepted == await host.facts.db(host.store.updates.last_accepted)
    assert host.facts.last_accepted["a"].round == commands[0].round - 1
    await host.facts.db(host.facts.forget_client, "a")
    assert host.facts.last_accepted == await host.facts.db(host.store.updates.last_accepted)
    assert host.facts.last_accepted.keys() == {"b"}
