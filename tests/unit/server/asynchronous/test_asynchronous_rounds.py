"""Asynchronous rounds with a real store and real blobs: who trains, what counts, and what survives."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.damage import set_epoch, write
from tests.journal_events import each_event
from tests.unit.host import ONES, Host, running, spec

from fedring.daemon.config import ConfigError
from fedring.rpc.errors import BadUpdate, OtherUpdate, Unavailable, UnknownRound
from fedring.rpc.health import Health
from fedring.server.aggregation.modelfile import ModelReader
from fedring.server.operator.job_checks import JobChecks
from fedring.server.operator.readiness import look_after_storage
from fedring.server.round.events import Delayed, Left, Phase
from fedring.server.running.rounds import give_time_back
from fedring.server.sessions.sessions import Session
from fedring.server.state.checked import CheckedReader
from fedring.server.state.failures import StorageFailed
from fedring.server.state.rows import ModelRow, RoundRow, UpdateRow
from fedring.train.jobs.asynchronous_table import staleness_weight
from fedring.v1 import federation_pb2 as pb


def buffered(concurrency: int = 3, buffer: int = 2, *, rounds: int = 3, **table: Any) -> Any:
    """Return an asynchronous job; its mean has the factor 1 unless the table says otherwise."""
    keys = {"concurrency": concurrency, "buffer": buffer, **table}
    given = {"weights": "uniform", "min_clients": concurrency, "rounds": rounds, "deadline_seconds": 600.0}
    return spec(asynchronous=keys, **given)


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    async with running(tmp_path) as host:
        yield host


async def values(host: Host, row: ModelRow | None) -> NDArray[np.float32]:
    assert row is not None
    with host.blobs.reader(row.blob) as blob:
        return ModelReader(CheckedReader(blob.read, blob.size, row.blob)).vectors().parameters


async def model_of(host: Host, number: int) -> ModelRow:
    """Wait for the model of a round."""
    row = None
    async with asyncio.timeout(60):
        async for event in each_event(host.journal, 1):
            row = await host.facts.db(host.store.rounds.get, number)
            if event.kind == "round_published" and row is not None and row.model_version:
                break
    assert row is not None
    model = await host.facts.db(host.store.models.get, row.model_version)
    assert model is not None
    return model


async def until_training(host: Host, number: int) -> None:
    """Wait until a round after this one takes updates."""

    def trains() -> bool:
        return any(each.row.round > number and each.phase is Phase.TRAINING for each in host.rounds)

    async with asyncio.timeout(60):
        async for event in each_event(host.journal, 1):
            if event.kind == "round_started" and trains():
                break


async def until_waiting(host: Host, *, abandoned: int = 0) -> None:
    """Wait until a round says for whom it waits, after so many were abandoned."""
    async with asyncio.timeout(60):
        async for event in each_event(host.journal, 1):
            abandoned -= event.kind == "round_abandoned"
            if abandoned <= 0 and event.kind == "round_waits":
                break


async def begin(host: Host, *names: str, **keys: Any) -> tuple[int, dict[str, Session], dict[str, pb.TrainCmd]]:
    job, _ = await host.jobs.start(buffered(**keys), "")
    sessions = {name: host.join(name) for name in names}
    return job.job_id, sessions, {name: await host.command(session) for name, session in sessions.items()}


async def test_a_slow_clients_update_counts_in_a_later_version_and_less(host: Host) -> None:
    job_id, sessions, told = await begin(host, "a", "b", "slow")
    first = told["a"].round
    assert {each.round for each in told.values()} == {first}
    for name in ("a", "b"):
        assert not (await host.push(sessions[name], told[name], ONES)).accepted.already
    one = await model_of(host, first)
    second = {name: await host.command(sessions[name]) for name in ("a", "b")}
    assert {each.model_version for each in second.values()} == {one.version}
    # The slow one answers the first command, and a fast one the second: together they make the next version.
    await host.push(sessions["slow"], told["slow"], 4 * ONES)
    await host.push(sessions["a"], second["a"], 2 * ONES)
    two = await model_of(host, second["a"].round)
    rows = {row.client_id: row for row in await host.facts.db(host.store.updates.of_round, two.round)}
    assert {name: (row.round, row.buffer, row.staleness) for name, row in rows.items()} == {
        "slow": (first, two.round, 1),
        "a": (two.round, two.round, 0),
    }
    base = await values(host, one)
    mean = (2.0 * np.ones(8) + staleness_weight(1) * 4.0 * np.ones(8)) / 2.0
    assert np.array_equal(await values(host, two), (base.astype(np.float64) + mean).astype(np.float32))
    third = await host.command(sessions["slow"])
    assert third.model_version == two.version
    assert job_id


async def test_a_repeated_update_is_known_before_and_after_its_buffer_was_made_a_model(host: Host) -> None:
    _, sessions, told = await begin(host, "a", "b", "c")
    await host.push(sessions["a"], told["a"], ONES)
    assert (await host.push(sessions["a"], told["a"], ONES)).accepted.already
    await host.push(sessions["b"], told["b"], ONES)
    await model_of(host, told["a"].round)
    await until_training(host, told["a"].round)
    assert (await host.push(sessions["a"], told["a"], ONES)).accepted.already
    with pytest.raises(OtherUpdate):
        await host.push(sessions["a"], told["a"], 2 * ONES)
    # The slow one's counts in the second buffer; said again, it is known there.
    assert not (await host.push(sessions["c"], told["c"], ONES)).accepted.already
    assert (await host.push(sessions["c"], told["c"], ONES)).accepted.already


async def test_what_answers_no_command_of_the_client_is_refused(host: Host) -> None:
    _, sessions, told = await begin(host, "a", "b", "c")
    await host.push(sessions["a"], told["a"], ONES)
    await host.push(sessions["b"], told["b"], ONES)
    await model_of(host, told["a"].round)
    second = await host.command(sessions["a"])
    with pytest.raises(UnknownRound) as refused:  # "c" still has its first command
        await host.push(sessions["c"], second, ONES)
    assert refused.value.reason == "round_closed"
    with pytest.raises(BadUpdate) as wrong:
        await host.push(sessions["c"], told["c"], ONES, base_digest=second.model_digest)
    assert wrong.value.reason == "wrong_model"
    with pytest.raises(UnknownRound) as unknown:
        await host.push(sessions["c"], told["c"], ONES, round=second.round + 100)
    assert unknown.value.reason == "unknown_round"
    late = host.join("late")
    with pytest.raises(UnknownRound) as stranger:
        await host.push(late, told["c"], ONES)
    assert stranger.value.reason == "round_closed"


async def test_a_buffer_takes_no_more_than_its_updates_even_if_they_come_at_once(host: Host) -> None:
    _, sessions, told = await begin(host, "a", "b", "c", "d", concurrency=4)
    host.gate.close("updates.accept")
    offers = {name: host.offer(host.update(told[name], name)) for name in sessions}
    host.gate.open()
    done = await asyncio.gather(*offers.values(), return_exceptions=True)
    refused = [name for name, each in zip(offers, done, strict=True) if isinstance(each, Unavailable)]
    assert len(refused) == 2
    one = await model_of(host, told["a"].round)
    assert len(await host.facts.db(host.store.updates.of_round, one.round)) == 2
    await until_training(host, one.round)
    for name in refused:
        assert not await host.offer(host.update(told[name], name))
    two = await model_of(host, one.round + 1)
    assert {row.client_id for row in await host.facts.db(host.store.updates.of_round, two.round)} == set(refused)


async def test_a_client_that_comes_gets_a_place_and_one_that_goes_frees_its_own(tmp_path: Path) -> None:
    async with running(tmp_path, heartbeat_seconds=0.1, lost_after_seconds=0.5) as host:
        _, sessions, told = await begin(host, "a", "b", concurrency=2, buffer=2)
        late = host.join("late")
        await host.push(sessions["a"], told["a"], ONES)
        command = await host.command(late)  # the place of "a", which has delivered
        assert command.round == told["a"].round
        third = host.join("third")
        open_ = host.round
        host.sessions.drop(sessions["b"])
        host.rounds.presence(Left("b"))
        assert (await host.command(third)).round == told["a"].round  # after its grace, nobody waits for "b"
        assert open_.row.selected == ("a", "b", "late", "third")
        back = host.join("b")  # it is told its command again, and may still answer it
        again = await host.command(back)
        assert (again.round, again.model_digest) == (told["b"].round, told["b"].model_digest)
        assert not (await host.push(back, again, ONES)).accepted.already


async def test_a_job_whose_clients_are_all_away_goes_on_when_they_come_back(tmp_path: Path) -> None:
    async with running(tmp_path, heartbeat_seconds=0.1, lost_after_seconds=0.2) as host:
        job_id, sessions, told = await begin(host, "a", "b", concurrency=2)
        await go_away(host, sessions)
        again = {name: host.join(name) for name in "ab"}
        await until_training(host, told["a"].round)
        for name, session in again.items():
            command = await host.command(session)
            assert command.round == told[name].round
            assert not (await host.push(session, command, ONES)).accepted.already
        await model_of(host, told["a"].round + 1)
        assert host.jobs.running.keys() == {job_id}


async def test_clients_that_come_back_after_the_time_of_their_commands_begin_anew(tmp_path: Path) -> None:
    async with running(tmp_path, heartbeat_seconds=0.1, lost_after_seconds=0.2) as host:
        _, sessions, told = await begin(host, "a", "b", concurrency=2)
        await go_away(host, sessions)
        give_time_back(host.rounds, time.monotonic() + 1000.0)  # as if they had been away for longer than their time
        await until_waiting(host, abandoned=2)  # the one that waited in vain, too
        again = {name: host.join(name) for name in "ab"}
        for name, session in again.items():
            command = await host.command(session)
            assert command.round == told[name].round + 2
            assert not (await host.push(session, command, ONES)).accepted.already


async def go_away(host: Host, sessions: dict[str, Session]) -> None:
    """Let all clients of a job go away, until its round is abandoned and the next one waits for them."""
    for name, session in sessions.items():
        host.sessions.drop(session)
        host.rounds.presence(Left(name))
    await until_waiting(host, abandoned=1)


async def test_a_client_begins_anew_when_its_model_is_too_old(host: Host) -> None:
    _, sessions, told = await begin(host, "a", "b", "slow", max_staleness=1, rounds=9)
    for _ in range(2):
        for name in ("a", "b"):
            await host.push(sessions[name], told[name], ONES)
        for name in ("a", "b"):
            told[name] = await host.command(sessions[name])
    newest = await host.command(sessions["slow"])
    assert newest.model_version == told["a"].model_version
    with pytest.raises(UnknownRound):
        await host.push(sessions["slow"], told["slow"], ONES)
    assert not (await host.push(sessions["slow"], newest, ONES)).accepted.already


async def test_an_upload_that_was_cut_off_is_deleted_when_its_command_is_over(host: Host) -> None:
    job_id, sessions, told = await begin(host, "a", "b", "slow", max_staleness=1, rounds=4)
    host.blobs.open_partial(f"{told['slow'].round}-slow").close()
    for number in range(4):
        for name in ("a", "b"):
            await host.push(sessions[name], told[name], ONES)
        if number == 0:  # the client may go on with it
            await until_training(host, told["a"].round)
            assert host.blobs.partials() == [f"{told['slow'].round}-slow"]
        for name in ("a", "b") if number < 3 else ():
            told[name] = await host.command(sessions[name])
    assert await host.ended(job_id) == "completed"
    assert host.blobs.partials() == []


async def test_the_deadline_of_a_command_ends_only_that_command(host: Host) -> None:
    begun = time.monotonic()  # no later than the newest command of the fast one
    job, _ = await host.jobs.start(
        spec(
            asynchronous={"concurrency": 2, "buffer": 1},
            weights="uniform",
            min_clients=2,
            rounds=50,
            deadline_seconds=1.0,
        ),
        "",
    )
    fast, slow = host.join("fast"), host.join("slow")
    command = old = await host.command(slow)
    given = await host.command(fast)
    async with asyncio.timeout(60):
        while command.round == old.round:  # the job goes on, and the slow one gets a new command after its second
            now = time.monotonic()
            try:
                await host.push(fast, given, ONES)
                begun = now
            except UnknownRound:  # this machine has stood still for the second of the fast one, too
                assert time.monotonic() - begun >= 1.0
            given = await host.command(fast)
            while not slow.outbox.empty():
                event = pb.ServerEvent.FromString(slow.outbox.get_nowait())
                command = event.train if event.WhichOneof("event") == "train" else command
            await asyncio.sleep(0.05)
    with pytest.raises(UnknownRound):
        await host.push(slow, old, ONES)
    await host.jobs.stop(job.job_id)
    assert await host.ended(job.job_id) == "stopped"


async def test_the_clocks_of_commands_stand_still_while_nothing_can_be_kept(tmp_path: Path) -> None:
    async with running(tmp_path) as host:
        _, sessions, told = await begin(host, "fast", "slow", concurrency=2, buffer=1, rounds=9)
        await host.push(sessions["fast"], told["fast"], ONES)
        told["fast"] = await host.command(sessions["fast"])
        storage, open_, rounds = host.facts.storage, host.round, (host.round, *host.rounds.carried.of())

        async def ends() -> list[float]:
            """Return when the commands end: by the rounds' clocks, and by the rows that a restart finds."""
            rows = await host.facts.db(host.store.commands.of_running_jobs)
            kept = {row.client_id: row.until for row in rows}
            return [each.outstanding[name] for each in rounds for name in sorted(each.outstanding)] + [
                kept[name] for name in ("fast", "slow")
            ]

        before = await ends()
        storage.fail("the object store is away")
        storage.since -= 100.0  # it has failed for so long already
        host.rounds.handle(open_, Delayed(-1000.0))  # longer than their time
        async with asyncio.timeout(60):
            while open_.changed.is_set():  # until the runner has looked at what is due
                assert open_.phase is Phase.TRAINING
                await asyncio.sleep(0)
        assert await ends() == before
        host.rounds.handle(open_, Delayed(1000.0))
        looks = asyncio.create_task(look_after_storage(host.facts, host.rounds, host.journal, Health()))
        async with asyncio.timeout(60):
            await storage.works.wait()
        looks.cancel()
        lost = time.monotonic() - storage.since
        given = [after - at for after, at in zip(await ends(), before, strict=True)]
        assert len(given) == 4
        assert all(100.0 <= each <= lost for each in given)
        for name in ("slow", "fast"):
            assert not (await host.push(sessions[name], told[name], ONES)).accepted.already
            await until_training(host, host.rounds.last.round if host.rounds.last else 0)


async def test_a_restarted_server_goes_on_in_the_middle_of_a_buffer(tmp_path: Path) -> None:
    async with running(tmp_path) as host:
        _, sessions, told = await begin(host, "a", "b", "slow")
        for name in ("a", "b"):
            await host.push(sessions[name], told[name], ONES)
        second = await host.command(sessions["a"])
        await host.push(sessions["a"], second, 2 * ONES)
        one = await model_of(host, told["a"].round)
    async with running(tmp_path) as host:
        again = host.join("slow")
        with pytest.raises(Unavailable):  # the job has not gone on yet: the update may come again
            host.rounds.deliverable(host.store.run_id, told["slow"].round, "slow")
        command = await host.command(again)
        assert (command.round, command.model_digest) == (told["slow"].round, told["slow"].model_digest)
        assert (await host.push(host.join("a"), second, 2 * ONES)).accepted.already
        assert not (await host.push(again, command, 4 * ONES)).accepted.already
        two = await model_of(host, second.round)
        base = await values(host, one)
        mean = (2.0 * np.ones(8) + staleness_weight(1) * 4.0 * np.ones(8)) / 2.0
        assert np.array_equal(await values(host, two), (base.astype(np.float64) + mean).astype(np.float32))


async def test_a_server_killed_between_two_rounds_still_knows_its_commands(tmp_path: Path) -> None:
    async with running(tmp_path) as host:
        _, sessions, told = await begin(host, "a", "b", "slow")
        for name in ("a", "b"):
            await host.push(sessions[name], told[name], ONES)
        await model_of(host, told["a"].round)
        await until_training(host, told["a"].round)
    async with running(tmp_path) as host:  # as if the second round had never been opened
        numbers = {row.round for row in host.rounds.interrupted.rows.values()}
        assert told["slow"].round in numbers
        again = host.join("slow")
        command = await host.command(again)
        assert command.round == told["slow"].round
        assert not (await host.push(again, command, ONES)).accepted.already


async def test_a_command_of_before_a_restore_counts_no_more(tmp_path: Path) -> None:
    async with running(tmp_path) as host:
        _, sessions, told = await begin(host, "a", "b", "slow")
        for name in ("a", "b"):
            await host.push(sessions[name], told[name], ONES)
        await model_of(host, told["a"].round)
        await until_training(host, told["a"].round)
    set_epoch(tmp_path, 1)
    async with running(tmp_path) as host:
        again, *_ = (host.join(name) for name in ("slow", "a", "b"))
        await until_training(host, told["a"].round + 1)
        with pytest.raises(UnknownRound):
            await host.push(again, told["slow"], ONES)


@pytest.mark.parametrize("place", ["rounds.create", "rounds.replace"])
async def test_a_failure_while_no_round_takes_updates_frees_the_place(host: Host, place: str) -> None:
    _, sessions, told = await begin(host, "a", "slow", concurrency=2, buffer=1, rounds=9)
    host.gate.close(place)
    await host.push(sessions["a"], told["a"], ONES)
    await host.gate.reached()
    assert [open_.phase for open_ in host.rounds] == ([] if place == "rounds.create" else [Phase.WAITING])
    failure = pb.Failure(round=told["slow"].round, reason="out_of_memory", detail="x")
    for _ in range(2):  # said again, it changes nothing
        host.parts.reports.failed("slow", failure)
    host.gate.open()
    if place == "rounds.replace":  # that one counts on it, so it gets its command in the one after that
        await host.push(sessions["a"], await host.command(sessions["a"]), ONES)
    again = await host.command(sessions["slow"])
    assert again.round > told["slow"].round
    told_of = [event.text for event in host.journal.recent() if event.kind == "client_failed"]
    assert told_of == ["slow could not train: out_of_memory: x"]
    commands = await host.facts.db(host.store.commands.of_running_jobs)
    assert told["slow"].round not in {row.round for row in commands}
    assert not (await host.push(sessions["slow"], again, ONES)).accepted.already


async def test_a_client_that_failed_is_not_told_its_command_again_after_a_restart(tmp_path: Path) -> None:
    async with running(tmp_path) as host:
        _, sessions, told = await begin(host, "a", "b", "c", buffer=1)
        host.parts.reports.failed("a", pb.Failure(round=told["a"].round, reason="out_of_memory", detail="x"))
        kept = {row.client_id: row for row in await host.facts.db(host.store.commands.of_running_jobs)}
        for name in "ab":  # nobody is left to get a command in the next round, so only "c" works on
            host.sessions.drop(sessions[name])
            host.rounds.presence(Left(name))
        assert not await host.offer(host.update(told["b"], "b"))
        await until_training(host, told["b"].round)
        assert host.round.row.selected == ("c",)
        commands = await host.facts.db(host.store.commands.of_running_jobs)
        assert [row.client_id for row in commands] == ["c"]
        # As if the server had been killed before it forgot it.
        await host.facts.db(host.store.commands.give, kept["a"].job_id, [kept["a"]], ["c"])
    async with running(tmp_path) as host:
        command = await host.command(host.join("a"))
        assert command.round == told["a"].round + 1
        with pytest.raises(UnknownRound):
            await host.offer(host.update(told["a"], "a"))
        assert not await host.offer(host.update(command, "a"))


@pytest.mark.parametrize("waits", [True, False], ids=["while the next round waits", "before there is one"])
async def test_a_command_that_a_site_has_refused_is_over_after_a_restart_too(tmp_path: Path, waits: bool) -> None:
    """The next round waits for people at sites then, and not for clients that go on."""
    async with running(tmp_path) as host:
        job_id, sessions, told = await begin(host, "a", "b", concurrency=2)
        host.gate.close("" if waits else "rounds.create")
        for name, session in sessions.items():
            session.report(pb.WatchRequest(unapproved_jobs=[job_id]))
            host.rounds.works(session)
            host.parts.reports.failed(name, pb.Failure(round=told[name].round, reason="not_approved", detail="x"))
        await (until_waiting(host) if waits else host.gate.reached())
    async with running(tmp_path) as host:
        first = host.join("a")
        await until_waiting(host)
        assert (host.round.phase, first.outbox.empty()) == (Phase.WAITING, True)
        commands = {name: await host.command(session) for name, session in (("b", host.join("b")), ("a", first))}
        assert {command.round for command in commands.values()} == {told["a"].round + 1}


async def test_a_command_whose_client_failed_between_two_rounds_is_over_after_a_restart_too(tmp_path: Path) -> None:
    async with running(tmp_path) as host:
        _, sessions, told = await begin(host, "a", "b", "slow")
        host.gate.close("rounds.create")
        for name in ("a", "b"):
            await host.push(sessions[name], told[name], ONES)
        await host.gate.reached()
        host.parts.reports.failed("slow", pb.Failure(round=told["slow"].round, reason="out_of_memory", detail="x"))
        for name, session in sessions.items():
            host.sessions.drop(session)
            host.rounds.presence(Left(name))
        host.gate.open()
        await until_waiting(host)
    async with running(tmp_path) as host:
        slow = host.join("slow")
        await until_waiting(host)
        assert (host.round.phase, slow.outbox.empty()) == (Phase.WAITING, True)


async def test_the_round_of_an_outstanding_command_is_kept(tmp_path: Path) -> None:
    async with running(tmp_path, keep_rounds=2) as host:
        _, sessions, told = await begin(host, "a", "b", "slow", rounds=9)
        for _ in range(4):
            for name in ("a", "b"):
                await host.push(sessions[name], told[name], ONES)
            for name in ("a", "b"):
                told[name] = await host.command(sessions[name])
            await host.facts.db(host.facts.prune, 10, 2, 2, 10)
        rounds = {row.round for row in await host.facts.db(host.store.rounds.newest)}
        assert told["slow"].round in rounds
        assert told["slow"].round + 1 not in rounds
        updates = [host.update(told[name], name) for name in ("slow", "a")]
        assert await asyncio.gather(*map(host.offer, updates)) == [False, False]


async def test_the_models_of_outstanding_commands_are_kept(tmp_path: Path) -> None:
    async with running(tmp_path, keep_models=1, keep_jobs=0) as host:
        _, sessions, told = await begin(host, "a", "b", "slow", rounds=9)
        for _ in range(4):
            for name in ("a", "b"):
                await host.push(sessions[name], told[name], ONES)
            for name in ("a", "b"):
                told[name] = await host.command(sessions[name])
        await host.facts.db(host.facts.prune, 1, 2, 99, 0)
        kept = {row.version for row in await host.facts.db(host.store.models.newest)}
        assert told["slow"].model_version in kept
        assert len(kept) <= 3
        assert not (await host.push(sessions["slow"], told["slow"], ONES)).accepted.already


async def test_the_end_of_the_job_ends_all_commands(host: Host) -> None:
    job_id, sessions, told = await begin(host, "a", "b", "slow", rounds=1)
    for name in ("a", "b"):
        await host.push(sessions[name], told[name], ONES)
    assert await host.ended(job_id) == "completed"
    async with asyncio.timeout(60):
        while (event := pb.ServerEvent.FromString(await sessions["slow"].outbox.get())).WhichOneof(
            "event"
        ) != "round_ended":
            pass
    assert event.round_ended.round == told["slow"].round
    with pytest.raises(UnknownRound):
        await host.push(sessions["slow"], told["slow"], ONES)
    assert await host.facts.db(host.store.commands.of_running_jobs) == []


async def test_a_fast_client_has_at_most_one_update_in_a_buffer(host: Host) -> None:
    _, sessions, told = await begin(host, "fast", "b", "c", rounds=4, buffer=2)
    rows: list[UpdateRow] = []
    for number in range(4):
        command = told["fast"] if not number else await host.command(sessions["fast"])
        await host.push(sessions["fast"], command, ONES)
        await host.push(sessions["b"], told["b"] if not number else await host.command(sessions["b"]), ONES)
        rows += await host.facts.db(host.store.updates.of_round, command.round)
    assert sum(row.client_id == "fast" for row in rows) == 4
    assert len(rows) == 8


async def kill_between_a_command_and_its_rounds_row(folder: Path) -> None:
    """Leave a state in which `late` has a command of a round that does not name it."""
    async with running(folder) as host:
        _, sessions, told = await begin(host, "a", "b", concurrency=2, buffer=2)
        await host.push(sessions["a"], told["a"], ONES)
        await host.command(host.join("late"))
    write(folder, """UPDATE rounds SET selected = '["a","b"]' WHERE ended_at IS NULL""")


async def test_a_kill_between_a_command_and_its_rounds_row_leaves_the_client_free(tmp_path: Path) -> None:
    await kill_between_a_command_and_its_rounds_row(tmp_path)
    async with running(tmp_path) as host:
        late = host.join("late")
        command = await host.command(late)
        assert not (await host.push(late, command, ONES)).accepted.already
        model = await model_of(host, command.round)
        assert len(await host.facts.db(host.store.updates.of_round, model.round)) == 2


async def test_after_a_kill_between_a_command_and_its_rounds_row_the_next_round_takes_it_for_none(
    tmp_path: Path,
) -> None:
    await kill_between_a_command_and_its_rounds_row(tmp_path)
    async with running(tmp_path) as host:
        session = host.join("b")
        await host.push(session, await host.command(session), ONES)
        await until_waiting(host)
    async with running(tmp_path) as host:
        late = host.join("late")
        await until_waiting(host)
        assert (host.round.phase, late.outbox.empty()) == (Phase.WAITING, True)


async def test_a_kill_between_the_first_commands_and_their_rounds_row_leaves_the_clients_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached = asyncio.Event()
    async with running(tmp_path) as host:
        loop, rounds = asyncio.get_running_loop(), host.store.rounds
        keep = rounds.replace

        def replace(row: RoundRow) -> None:
            if row.phase == "training":
                loop.call_soon_threadsafe(reached.set)
                raise StorageFailed("disk_full", "no room")
            keep(row)

        monkeypatch.setattr(rounds, "replace", replace)
        await host.jobs.start(buffered(concurrency=2, buffer=2), "")
        for name in "ab":
            host.join(name)
        await reached.wait()
    async with running(tmp_path) as host:
        sessions = {name: host.join(name) for name in "ab"}
        for session in sessions.values():
            command = await host.command(session)
            assert not (await host.push(session, command, ONES)).accepted.already
        assert (await model_of(host, 1)).round == 1


async def test_a_server_refuses_jobs_whose_models_it_would_not_keep_and_warns_of_large_buffers(tmp_path: Path) -> None:
    async with running(tmp_path, keep_models=5) as host:
        checks = JobChecks(host.config, host.parts.models.maker)
        with pytest.raises(ConfigError, match="keep_models=5: raise that, or lower max_staleness"):
            checks.check(buffered(max_staleness=5), [], runs_next=True)
        assert "buffer = 2 is close to concurrency = 3" in checks.check(buffered(max_staleness=4), [], runs_next=True)
        assert checks.check(buffered(concurrency=9, max_staleness=4), [], runs_next=True) == ""
