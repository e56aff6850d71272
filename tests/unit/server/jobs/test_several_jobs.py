"""Several jobs that run at once: each has its own rounds and models, and they share the clients."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.unit import spinning
from tests.unit.host import ONES, SIZE, Host, running, spec

from fedring.privacy.account import epsilon
from fedring.rpc.errors import NoSuchJob, SeveralJobs
from fedring.server.operator.summaries import why_busy
from fedring.server.recovery import reload
from fedring.server.round.events import Phase
from fedring.v1 import federation_pb2 as pb

Values = Callable[[pb.TrainCmd, str], NDArray[np.float32]]


def drawn(command: pb.TrainCmd, client: str) -> NDArray[np.float32]:
    """Return an update that depends on the job, on its round, and on the client alone."""
    seed = crc32(f"{command.job.name} {command.job_round} {client}".encode())
    return np.random.default_rng(seed).normal(size=SIZE).astype(np.float32)


def by_job(command: pb.TrainCmd, client: str) -> NDArray[np.float32]:
    """Return an update that is the same for all clients, so that it does not matter who was drawn."""
    return drawn(command, "anybody")


class Fleet:
    """Clients that answer every command, and what they were asked."""

    def __init__(self, host: Host, values: Values) -> None:
        self.host, self.values = host, values
        self.rounds: defaultdict[int, list[str]] = defaultdict(list)  # the clients of each round
        self.order: list[str] = []  # the jobs, in the order of their commands
        self.open: Counter[str] = Counter()  # rounds that each client has at once
        self.most: Counter[str] = Counter()

    async def answer(self, client: str, max_jobs: int | None = None) -> None:
        """Answer the commands to one client, until cancelled."""
        session = self.host.join(client, {"site": "fleet"}, max_jobs=max_jobs)
        while True:
            command = await self.host.command(session)
            self.rounds[command.round].append(client)
            self.order.append(command.job.name)
            held = sum(client in open_.members for open_ in self.host.rounds)
            self.most[client] = max(self.most[client], held)
            await self.host.offer(self.host.update(command, client, self.values(command, client)))


@asynccontextmanager
async def fleet(host: Host, clients: Sequence[str], values: Values = by_job, **max_jobs: int) -> AsyncIterator[Fleet]:
    """Yield clients that answer."""
    made = Fleet(host, values)
    async with asyncio.TaskGroup() as tasks:
        answers = [tasks.create_task(made.answer(client, max_jobs.get(client))) for client in clients]
        yield made
        for task in answers:
            task.cancel()


async def until(holds: Callable[[], bool]) -> None:
    """Wait until something holds that the event loop brings about."""
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110 (what changes it sets no event)
            await asyncio.sleep(0.001)


def named(name: str, **keys: Any) -> Any:
    return spec(name=name, **{"seed": 1, "start": "fresh", **keys})


async def model_of(host: Host, job_id: int) -> bytes:
    """Return the values of a job's newest model."""
    (row,) = await host.facts.db(host.store.models.newest, 1, job_id)
    return row.digest.encode()


async def alone(folder: Path, job: Any, clients: Sequence[str]) -> bytes:
    """Return the model of a job that has run alone."""
    async with running(folder) as host, fleet(host, clients):
        row, _ = await host.jobs.start(job, "")
        assert await host.ended(row.job_id) == "completed"
        return await model_of(host, row.job_id)


async def test_jobs_that_run_at_once_make_the_models_that_each_makes_alone(tmp_path: Path) -> None:
    clients = [f"c{number}" for number in range(6)]
    jobs = [
        named("mean", rounds=4, min_clients=2, sample_clients=2),
        named("momentum", rounds=4, min_clients=2, sample_clients=2, server_optimizer={"args": {"momentum": 0.9}}),
        named("delta", rounds=4, min_clients=2, sample_clients=2, download_encoding="int8"),
    ]
    for job in jobs:
        (tmp_path / job.name).mkdir()
    expected = [await alone(tmp_path / job.name, job, clients) for job in jobs]
    (tmp_path / "all").mkdir()
    async with running(tmp_path / "all", max_running_jobs=3) as host, fleet(host, clients) as answers:
        rows = [(await host.jobs.start(job, ""))[0] for job in jobs]
        assert [await host.ended(row.job_id) for row in rows] == ["completed"] * 3
        assert [await model_of(host, row.job_id) for row in rows] == expected
        versions = [row.version for row in await host.facts.db(host.store.models.newest, 100)]
        assert max(versions) == 15  # three first models and twelve rounds have one each
        assert all(len(asked) == len(set(asked)) == 2 for asked in answers.rounds.values())
        assert set(answers.most.values()) == {1}  # no client had two rounds at once


async def test_the_last_update_of_a_round_does_not_wait_for_another_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedring.server.update.acceptance._LONGEST_GATHERING", 50.0)
    async with running(tmp_path, max_running_jobs=2) as host:
        sites = {"a": "first", "b": "first", "c": "first", "d": "second"}
        sessions = {client: host.join(client, {"site": site}) for client, site in sites.items()}
        for name, least in (("first", 3), ("second", 1)):
            await host.jobs.start(named(name, min_clients=least, clients={"site": name}), "")
        commands = {client: await host.command(session) for client, session in sessions.items()}

        async def push(client: str) -> None:
            await host.push(sessions[client], commands[client], ONES)

        async with asyncio.timeout(40):
            waiting = asyncio.create_task(push("a"))
            await asyncio.sleep(0.1)
            assert not waiting.done()
            await push("d")
            assert await host.ended(2) == "completed"
            await waiting  # in the same commit
            await asyncio.gather(push("b"), push("c"))
            assert await host.ended(1) == "completed"


async def test_the_job_with_the_fewest_updates_gets_the_client_that_is_free(tmp_path: Path) -> None:
    async with running(tmp_path, max_running_jobs=2) as host:
        for name in ("first", "second"):
            await host.jobs.start(named(name, rounds=3), "")
        await until(lambda: len(list(host.rounds)) == 2)
        async with fleet(host, ["a"]) as answers:
            assert [await host.ended(job_id) for job_id in (1, 2)] == ["completed"] * 2
            turns = zip(answers.order[::2], answers.order[1::2], strict=True)
            assert [set(turn) for turn in turns] == [{"first", "second"}] * 3


async def test_a_client_takes_part_in_as_many_rounds_as_it_says(tmp_path: Path) -> None:
    async with running(tmp_path, max_running_jobs=3) as host:
        sessions = {name: host.join(name, max_jobs=most) for name, most in (("none", 0), ("two", 2))}
        commands = []
        for name in ("first", "second"):
            await host.jobs.start(named(name), "")
            commands.append(await host.command(sessions["two"]))
        await host.jobs.start(named("third"), "")
        assert [command.job.name for command in commands] == ["first", "second"]
        await until(lambda: len(list(host.rounds)) == 3)
        third = host.rounds.of_job(3)
        assert third is not None
        assert (third.phase, third.state.busy) == (Phase.WAITING, frozenset({"two"}))
        assert host.rounds.turns.jobs == {"two": [1, 2]}
        assert why_busy(host.rounds.turns.jobs["two"], 2).startswith("it takes part in a round of job 1, 2")
        assert "max_jobs is 0" in why_busy((), 0)
        for command in commands:
            await host.offer(host.update(command, "two"))
        assert (await host.command(sessions["two"])).job.name == "third"
        assert sessions["none"].outbox.empty()


async def test_a_round_that_waits_for_busy_clients_has_no_deadline_until_it_is_its_turn(tmp_path: Path) -> None:
    async with running(tmp_path, max_running_jobs=2) as host:
        session = host.join("a")
        await host.jobs.start(named("first"), "")
        command = await host.command(session)
        second, _ = await host.jobs.start(named("second", barrier_timeout_seconds=0.05, max_abandoned=1), "")
        await until(lambda: host.rounds.of_job(second.job_id) is not None)
        await asyncio.sleep(0.2)  # longer than the barrier's time
        assert host.rounds.of_job(second.job_id) is not None
        await host.offer(host.update(command, "a"))
        await host.offer(host.update(await host.command(session), "a"))
        assert await host.ended(second.job_id) == "completed"


async def test_two_jobs_that_need_the_same_group_of_workers_take_turns(tmp_path: Path) -> None:
    async with running(tmp_path, max_running_jobs=3) as host:
        ring = {"site": "ring"}
        for name, labels in (("a", ring), ("b", ring), ("c", {})):
            host.join(name, labels, max_jobs=2)
        for number, name in enumerate(("first", "second"), 1):
            await host.jobs.start(named(name, mode="data_parallel", min_clients=2, clients=ring), "")
            await until(lambda count=number: len(list(host.rounds)) == count)  # type: ignore[misc]
        await host.jobs.start(named("third", max_abandoned=1), "")
        await until(lambda: len(list(host.rounds)) == 3)
        first, second, third = host.rounds
        await until(lambda: {first.phase, third.phase} == {Phase.TRAINING})
        assert (second.phase, second.group) == (Phase.WAITING, None)
        assert not first.members & third.members  # who trains in a group takes part in nothing else
        assert await host.jobs.stop(first.row.job_id) == (1, first.row.round)
        assert await host.jobs.stop(third.row.job_id) == (3, third.row.round)
        await until(lambda: second.phase is Phase.TRAINING)


async def test_further_jobs_wait_in_the_queue_by_priority_and_can_be_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path, max_running_jobs=2) as host:
        begun, take_up = list[int](), host.store.jobs.take_up

        def noted(job_id: int) -> None:
            begun.append(job_id)
            take_up(job_id)

        monkeypatch.setattr(host.store.jobs, "take_up", noted)
        for number, priority in enumerate((0, 0, 0, 5, 0, -1), 1):
            await host.jobs.start(named(f"job {number}", priority=priority), "")
        await until(lambda: len(list(host.rounds)) == 2)
        assert set(host.jobs.running) == {1, 2}

        async def queue() -> list[int]:
            rows = await host.facts.db(host.store.jobs.queued)
            return [row.job_id for row in rows if row.job_id not in host.jobs.running]

        assert await queue() == [4, 3, 5, 6]
        await host.jobs.move(6)
        await host.jobs.move(4, last=True)
        await host.jobs.move(5, before=3)
        assert await queue() == [6, 5, 3, 4]
        for job_id, before in ((1, 0), (7, 0), (3, 1)):
            with pytest.raises(NoSuchJob):
                await host.jobs.move(job_id, before=before)
        with pytest.raises(SeveralJobs, match=r"1 \(job 1\), 2 \(job 2\)"):
            await host.jobs.stop(0)
        async with fleet(host, ["a"]):
            assert [await host.ended(job_id) for job_id in range(1, 7)] == ["completed"] * 6
        assert begun == [1, 2, 6, 5, 3, 4]


async def test_a_restart_resumes_every_job_that_ran(tmp_path: Path) -> None:
    clients, names = ["a", "b", "c"], ("first", "second", "third")
    jobs = [named(name, rounds=2, sample_clients=1) for name in names]
    for job in jobs:
        (tmp_path / job.name).mkdir()
    expected = [await alone(tmp_path / job.name, job, clients) for job in jobs]
    (tmp_path / "all").mkdir()
    async with running(tmp_path / "all", max_running_jobs=3) as host:
        sessions = [host.join(name) for name in clients]
        for job in jobs:
            await host.jobs.start(job, "")
        commands = [await host.command(session) for session in sessions]
        assert {command.job.name for command in commands} == set(names)
        await host.offer(host.update(commands[0], "a", by_job(commands[0], "a")))  # that round publishes
        await host.command(sessions[0])  # and the next one has begun
    # With a lower limit all three go on, too; the first new one waits.
    async with running(tmp_path / "all", max_running_jobs=1) as host:
        assert len(host.rounds.interrupted.rows) == 3 or list(host.rounds)
        await host.jobs.start(named("fourth"), "")
        async with fleet(host, clients):
            assert [await host.ended(job_id) for job_id in range(1, 5)] == ["completed"] * 4
        assert [await model_of(host, job_id) for job_id in range(1, 4)] == expected
        assert host.rounds.interrupted.rows == {}


async def test_no_new_round_draws_the_clients_of_one_that_waits_to_be_resumed(tmp_path: Path) -> None:
    async with running(tmp_path, max_running_jobs=2) as host:
        session = host.join("a")
        await host.jobs.start(named("first"), "")
        await host.command(session)
    host = Host(tmp_path, max_running_jobs=2)
    await reload(host.parts)
    session = host.join("a")
    row, _ = await host.jobs.start(named("second"), "")
    job, _ = await host.parts.starter.begin(row, named("second"))
    open_ = await host.parts.opener.open(job, 1, await host.parts.starter.base_of(job))
    assert open_.state.busy == {"a"}
    host.rounds.job_ended(1)
    assert open_.state.busy == set()
    host.facts.close()


async def test_models_that_are_made_at_once_have_versions_of_their_own(tmp_path: Path) -> None:
    async with running(tmp_path) as host:
        facts = host.facts
        async with facts.new_version() as first, facts.new_version() as second:
            assert (first, second) == (1, 2)
        drawn = []

        async def draw(error: Exception | None = None) -> None:
            async with facts.new_version() as version:
                drawn.append(version)
                if error:
                    raise error

        with pytest.raises(ValueError, match="disk"):
            await draw(ValueError("the disk refuses it"))
        await draw()
        assert drawn == [3, 3]


async def test_two_fresh_jobs_at_once_have_two_lines_of_models(tmp_path: Path) -> None:
    async with running(tmp_path, max_running_jobs=3) as host:
        sessions = [host.join(name) for name in ("a", "b")]
        for name in ("first", "second"):
            await host.jobs.start(named(name, sample_clients=1), "")
        commands = [await host.command(session) for session in sessions]
        lines = {(command.residual_after_epoch, command.residual_after) for command in commands}
        assert len(lines) == 2
        assert all(command.residual_after < command.round for command in commands)


TRUSTED = ["fedring", "tests.unit.spinning"]
RULE = "tests.unit.spinning:"


@pytest.mark.parametrize("where", ["configure", "combine"])
async def test_code_of_one_job_that_never_ends_holds_up_no_other_job(tmp_path: Path, where: str) -> None:
    spinning.BEGAN.clear()
    spinning.RELEASED.clear()
    async with running(tmp_path, max_running_jobs=2, trusted=TRUSTED) as host, fleet(host, ["a", "b"]):
        try:
            rule = {"rule": f"{RULE}Spins", "args": {"where": where}}
            endless, _ = await host.jobs.start(named("endless", aggregation=rule, sample_clients=1), "")
            assert await asyncio.to_thread(spinning.BEGAN.wait, 60)
            for number in range(2):  # they begin while the code runs, as well
                other, _ = await host.jobs.start(named(f"other {number}", sample_clients=1), "")
                assert await host.ended(other.job_id) == "completed"
            assert endless.job_id in host.jobs.running
        finally:
            spinning.RELEASED.set()
        assert await host.ended(endless.job_id) == "completed"


async def test_a_failing_strategy_a_damaged_model_and_a_stop_end_one_job_each(tmp_path: Path) -> None:
    clients = [f"c{number}" for number in range(4)]
    expected = await alone(tmp_path, named("good", rounds=4, sample_clients=1), clients)
    (tmp_path / "all").mkdir()
    async with running(tmp_path / "all", max_running_jobs=4, trusted=TRUSTED) as host:
        held = host.join("held", {"site": "held"})
        ours: dict[str, Any] = {"clients": {"site": "fleet"}, "sample_clients": 1}
        stopped, _ = await host.jobs.start(named("stopped", clients={"site": "held"}), "")
        await host.command(held)
        held = host.join("other", {"site": "other"})
        damaged, _ = await host.jobs.start(named("damaged", max_abandoned=1, clients={"site": "other"}), "")
        command = await host.command(held)
        (base,) = await host.facts.db(host.store.models.newest, 1, damaged.job_id)
        path = tmp_path / "all" / "blobs" / base.blob
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        async with fleet(host, clients):
            failing, _ = await host.jobs.start(
                named("failing", aggregation={"rule": f"{RULE}Fails"}, max_abandoned=1, **ours), ""
            )
            good, _ = await host.jobs.start(named("good", rounds=4, **ours), "")
            await host.offer(host.update(command, "other"))
            assert await host.jobs.stop(stopped.job_id) == (stopped.job_id, 1)
            states = {row.name: await host.ended(row.job_id) for row in (failing, damaged, stopped, good)}
            assert states == {"failing": "failed", "damaged": "failed", "stopped": "stopped", "good": "completed"}
            assert await model_of(host, good.job_id) == expected


async def test_two_jobs_with_noise_do_not_spend_the_same_rest_of_a_budget(tmp_path: Path) -> None:
    """Of a budget that has room for one round, two jobs at once spend one."""
    pytest.importorskip("dp_accounting")
    noise = {"clip": 1.0, "noise_multiplier": 4.0, "adaptive": False, "delta": 1e-5}
    keys: dict[str, Any] = {"min_clients": 2, "min_clients_to_aggregate": 2, "weights": "uniform"}
    async with running(tmp_path, max_running_jobs=2) as host:
        one = epsilon([4.0], 1e-5)
        spec_of: Callable[..., Any] = partial(named, dp={**noise, "max_epsilon": 1.2 * one}, **keys)
        sessions = [host.join(name) for name in ("a", "b", "c", "d")]
        first, _ = await host.jobs.start(spec_of("first", sample_clients=2), "")
        await until(lambda: any(open_.phase is Phase.TRAINING for open_ in host.rounds))
        second, _ = await host.jobs.start(spec_of("second", sample_clients=2), "")
        assert await host.ended(second.job_id) == "failed"
        row = await host.facts.db(host.store.jobs.get, second.job_id)
        assert row is not None
        assert "the rounds that other jobs have open" in row.reason
        await host.jobs.stop(first.job_id)  # without a model, nothing is spent
        assert await host.ended(first.job_id) == "stopped"
        third, _ = await host.jobs.start(spec_of("third", sample_clients=2), "")
        await until(lambda: host.rounds.of_job(third.job_id) is not None)
        assert len(sessions) == 4


async def test_a_job_that_cannot_open_its_round_gives_back_what_was_reserved_for_it(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    noise = {"clip": 1.0, "noise_multiplier": 4.0, "adaptive": False, "delta": 1e-5}
    noise["max_epsilon"] = 1.2 * epsilon([4.0], 1e-5)
    keys: dict[str, Any] = {"min_clients": 2, "min_clients_to_aggregate": 2, "weights": "uniform", "dp": noise}
    async with running(tmp_path, max_running_jobs=2) as host:
        sessions = [host.join(name) for name in ("a", "b")]
        unable, _ = await host.jobs.start(
            named("unable", evaluate_on_server=True, data="no_module:samples", **keys), ""
        )
        assert await host.ended(unable.job_id) == "failed"
        assert await host.facts.db(host.store.rounds.newest) == []
        able, _ = await host.jobs.start(named("able", **keys), "")
        for session in sessions:
            await host.offer(host.update(await host.command(session), session.client_id))
        assert await host.ended(able.job_id) == "completed"


async def test_after_a_restart_no_budget_is_spent_before_an_asynchronous_round_goes_on(tmp_path: Path) -> None:
    """Its clients still work on commands of it, as they do on those of rounds that have ended and cost nothing more."""
    pytest.importorskip("dp_accounting")
    noise = {"clip": 1.0, "noise_multiplier": 4.0, "adaptive": False, "delta": 1e-5}
    noise["max_epsilon"] = 1.2 * epsilon([4.0], 1e-5)
    keys: dict[str, Any] = {"min_clients": 2, "min_clients_to_aggregate": 2, "weights": "uniform", "dp": noise}
    slow = named("first", asynchronous={"concurrency": 2, "buffer": 2}, **keys)
    async with running(tmp_path) as host:
        sessions = [host.join(name) for name in ("a", "b")]
        first, _ = await host.jobs.start(slow, "")
        for session in sessions:
            await host.command(session)
    host = Host(tmp_path, max_running_jobs=2)
    await reload(host.parts)
    assert not host.rounds.interrupted.all_resumed.is_set()
    second, _ = await host.jobs.start(named("second", **keys), "")
    waiting, _ = await host.parts.starter.begin(second, named("second", **keys))
    refused = asyncio.create_task(host.parts.opener.refuses(waiting))
    going_on, _ = await host.parts.starter.begin(first, slow)
    (row,) = await host.facts.db(host.store.rounds.unended)
    await host.parts.opener.resume(row, going_on)
    assert "the rounds that other jobs have open" in await refused
    host.facts.close()
