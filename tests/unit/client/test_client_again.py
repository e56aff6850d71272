"""Rounds that the server asks for again: which a client trains again, and which not."""

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.waiting import until
from torch import nn

from fedring.client import ClientConfig, RoundOver, Task, connect
from fedring.client.metrics import ClientMetrics
from fedring.client.session.inbox import Assignment
from fedring.client.session.link import ServerLink
from fedring.client.transfer.delivery import Delivery
from fedring.client.transfer.spool import Spool
from fedring.codec.digest import name_of
from fedring.rpc.errors import UnknownRound
from fedring.v1 import federation_pb2 as pb

if TYPE_CHECKING:
    from tests.scripted_server import ScriptedServer

SECONDS = 60.0
MINE = name_of(b"my update")


def test_a_round_whose_deadline_passed_at_the_client_is_trained_when_the_server_asks_again(
    server: "ScriptedServer", settings: dict[str, Any]
) -> None:
    """The deadline of a round does not advance while the server is down, but the client's clock goes on."""
    model, tasks = nn.Linear(4, 2), list[Task]()
    with connect(**settings) as federation:
        server.joins.get(timeout=SECONDS)
        command = server.command(model, round_=3, deadline_seconds=600)
        server.train(command)
        first = next(federation)
        first.end._assignment.deadline = 0.0  # it has passed
        assert first.cancelled
        waiting = threading.Thread(target=lambda: tasks.append(next(federation)), daemon=True)
        waiting.start()
        until(lambda: not federation.ids)  # the round has ended for the client
        server.train(command)
        waiting.join(SECONDS)
        (second,) = tasks
        assert (second.round, second.cancelled) == (3, False)
        second.load_into(model)
        second.submit(model, samples=1)


def test_a_worker_whose_group_was_lost_during_the_delivery_trains_with_the_next_group(
    server: "ScriptedServer", settings: dict[str, Any]
) -> None:
    model = nn.Linear(4, 2)
    errors = [UnknownRound("the group has ended", reason="not_a_worker")]
    server.on_header = lambda header: errors.pop() if errors else None
    with connect(**settings) as federation:
        server.joins.get(timeout=SECONDS)
        server.train(server.command(model, round_=3))
        first = next(federation)
        first.load_into(model)
        with pytest.raises(RoundOver, match="not_a_worker"):
            first.submit(model, samples=1)
        second = next(federation)
        assert (second.round, second is first) == (3, False)
        second.load_into(model)
        second.submit(model, samples=1)
    assert server.accepted.get_nowait()[0].round == 3


@pytest.mark.parametrize(
    ("accepted", "fields", "known", "done"),
    [
        (MINE, {}, MINE, True),  # it was accepted while the restored server asked for the round again
        ("", {}, MINE, False),
        (MINE, {}, name_of(b"another"), False),  # the server was restored once more
        (MINE, {"model_digest": name_of(b"another model")}, MINE, False),
        (MINE, {"round": 8}, MINE, False),
        (MINE, {"run_id": "other"}, MINE, False),
    ],
    ids=["accepted", "not accepted", "forgotten", "another model", "another round", "another run"],
)
def test_a_round_is_not_trained_again_if_its_update_was_accepted_in_an_earlier_epoch(
    settings: dict[str, Any], tmp_path: Path, accepted: str, fields: dict[str, Any], known: str, done: bool
) -> None:
    given: dict[str, Any] = {"run_id": "run", "epoch": 1, "round": 7, "model_digest": name_of(b"a model")}
    asked_again: dict[str, Any] = {**given, "epoch": 2, **fields}
    before = Assignment(pb.TrainCmd(**given), 0.0, accepted_name=accepted)
    now = Assignment(pb.TrainCmd(**asked_again), time.monotonic() + SECONDS, previous=before)
    nowhere: dict[str, Any] = settings | {"server": "127.0.0.1:1"}  # a server would say itself what it knows
    link = ServerLink(ClientConfig(**nowhere), ClientMetrics(), evaluates=False, tell=lambda sentence: None)
    try:
        link.connection.last_accepted = pb.LastAccepted(epoch=1, round=7, name=known)
        assert Delivery(link, Spool(tmp_path, "alice")).settle(now) == done
        assert now.accepted_name == (MINE if done else "")
    finally:
        link.close()
        link.join()
