"""A client and rounds that a group trains: which it joins, and what it does with them."""

import queue
import threading
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from fedring.client import Federation, connect
from fedring.client.config import ClientConfig
from fedring.client.group.data_parallel import table_of
from fedring.client.group.rendezvous import RendezvousStream
from fedring.client.group.round import plan_of
from fedring.client.task import Task
from fedring.daemon.config import ConfigError, load_config
from fedring.rpc.errors import BadRequest, Unavailable
from fedring.train.errors import SeamError
from fedring.v1 import rendezvous_pb2 as pb

if TYPE_CHECKING:
    from tests.scripted_server import ScriptedServer

SECONDS = 60.0


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


@pytest.fixture
def task(server: "ScriptedServer", settings: dict[str, Any], model: nn.Module) -> Iterator[Task]:
    """The task of a data-parallel round, before any training."""
    command = server.command(model, round_=3)
    command.job.mode = "data_parallel"
    command.job.data_parallel = '{"hook": "fp16"}'
    config = load_config(ClientConfig, flags=settings).config
    with Federation(config, modes=("data_parallel",)) as federation:
        server.joins.get(timeout=SECONDS)
        server.train(command)
        yield next(federation)


def test_a_users_own_loop_never_gets_a_round_that_needs_a_group(
    server: "ScriptedServer", settings: dict[str, Any], model: nn.Module
) -> None:
    grouped = server.command(model, round_=1)
    grouped.job.mode = "data_parallel"
    with connect(**settings) as federation:
        server.joins.get(timeout=SECONDS)
        server.train(grouped)
        tasks: queue.Queue[Task] = queue.Queue()
        taker = threading.Thread(target=lambda: tasks.put(next(federation)))
        taker.start()
        failure = server.failures.get(timeout=SECONDS)
        assert (failure.round, failure.reason) == (1, "unknown_mode")
        server.train(server.command(model, round_=2))
        assert tasks.get(timeout=SECONDS).round == 2
        taker.join()


def test_all_workers_use_the_same_seed_for_the_order_of_the_samples(task: Task) -> None:
    assert plan_of(task).seed == task.command.seed
    assert task.plan.seed != task.command.seed
    assert table_of(task).hook == "fp16"


def test_a_table_that_this_client_does_not_understand_is_refused(task: Task) -> None:
    task.command.job.data_parallel = '{"quantum": true}'
    with pytest.raises(SeamError, match=r"data_parallel.quantum: .* update this client"):
        table_of(task)


def test_a_worker_that_does_not_deliver_has_not_failed(task: Task, server: "ScriptedServer") -> None:
    task.end.stand_aside(0.1)
    assert task.end.done
    task.fail("last", "a failure that is reported after all others")
    assert server.failures.get(timeout=SECONDS).reason == "last"


def test_the_round_ends_here_if_the_server_has_no_rendezvous(task: Task) -> None:
    with RendezvousStream(task.link, task.command) as rendezvous:
        news = rendezvous.wait(lambda news: news.WhichOneof("message") == "ended", lambda: None)
        assert news.ended.reason == "unknown_method"
        rendezvous.tell(pb.WorkerMessage(joined=pb.Joined(generation=1)))  # It is dropped, as there is no stream.


def test_a_worker_whose_first_message_was_damaged_on_the_way_enters_again(task: Task, server: "ScriptedServer") -> None:
    calls = queue.Queue[str]()

    async def form(messages: AsyncIterator[pb.WorkerMessage], context: Any) -> None:
        calls.put((await anext(messages)).enter.run_id)
        if calls.qsize() < 3:
            raise BadRequest("these bytes are not an Enter")
        await context.write(pb.GroupMessage(ended=pb.Ended(reason="test")))

    server.form = form
    with RendezvousStream(task.link, task.command) as rendezvous:
        news = rendezvous.wait(lambda news: news.WhichOneof("message") == "ended", lambda: None)
    assert (news.ended.reason, calls.qsize()) == ("test", 3)


def test_a_worker_that_talks_while_its_stream_is_opened_again_is_asked_again(
    task: Task, server: "ScriptedServer"
) -> None:
    """A worker may say that its peers are lost while the server is being restarted, at any moment of that."""
    streams, refused = 20, queue.Queue[str]()

    async def form(messages: AsyncIterator[pb.WorkerMessage], context: Any) -> None:
        first = await anext(messages)
        if not first.HasField("enter"):
            refused.put(str(first))
        generation = first.enter.generation + 1
        await context.write(pb.GroupMessage(prepare=pb.Prepare(generation=generation)))
        async for message in messages:
            if message.HasField("ready"):
                break
        if generation < streams:
            raise Unavailable("as if it had been restarted")
        await context.write(pb.GroupMessage(ended=pb.Ended(reason="test")))

    server.form = form
    seen = pb.GroupMessage()
    with RendezvousStream(task.link, task.command) as rendezvous:
        while not seen.HasField("ended"):
            rendezvous.tell(pb.WorkerMessage(broken=pb.Broken(generation=0, reason="lost")))
            if rendezvous.newest != seen:
                seen = rendezvous.newest
                if seen.HasField("prepare"):
                    ready = pb.Ready(generation=seen.prepare.generation, address="127.0.0.1:1")
                    rendezvous.tell(pb.WorkerMessage(ready=ready))
    assert seen.ended.reason == "test"
    assert refused.empty()


def test_peers_on_other_hosts_are_reached_in_plaintext_only_if_that_is_allowed() -> None:
    with pytest.raises(ConfigError, match="insecure = true"):
        load_config(ClientConfig, flags={"peer_listen": "0.0.0.0:7600"})
    assert load_config(ClientConfig, flags={"peer_listen": "0.0.0.0:7600", "insecure": True}).config.insecure
