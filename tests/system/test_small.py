"""Small models come with their command, and small updates are sent in one message."""

import queue
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import numpy as np
import pytest
from grpc import StatusCode

from fedring.rpc.streams import GRPC_PREFIX
from fedring.v1 import federation_pb2 as pb
from tests.fleets import Control, Fleet
from tests.metrics_page import Page, eventually
from tests.system.wire import SECONDS, SIZE, Refused, WireClient, offer_of, parameters, payload_of, run, vector_job

ONES = np.ones(SIZE, np.float32)
Clients = Callable[..., list[WireClient]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Start one fl-server for all tests of this file."""
    with Fleet(tmp_path_factory.mktemp("small"), {"metrics_listen": "127.0.0.1:0"}) as fleet:
        yield fleet


def update_of(client: WireClient, command: pb.TrainCmd) -> pb.SmallUpdate:
    payload = payload_of(ONES)
    return pb.SmallUpdate(offer=offer_of(client.header(command, payload), payload), payload=payload)


@contextmanager
def until_received(server: Fleet) -> Iterator[None]:
    """Wait at the end of the block until the server has received the update that the block sends."""
    address = server.ready["metrics"]
    before = received_bytes(Page(address))
    yield
    eventually(address, lambda page: received_bytes(page) > before)


def received_bytes(page: Page) -> float:
    return page("grpc_server_received_bytes_total", grpc_method="ClientUpdateService/PushSmallUpdates")


@contextmanager
def blocked_database(server: Fleet) -> Iterator[None]:
    """Let the server's transactions wait until the end of the block."""
    database = sqlite3.connect(server.directory / "state" / "server" / "facts.sqlite", SECONDS, isolation_level=None)
    with closing(database):
        database.execute("BEGIN IMMEDIATE")
        yield
        database.execute("ROLLBACK")


def packet(payload: bytes, encoding: str) -> pb.Packet:
    return pb.Packet(
        vector=pb.VECTOR_PARAMETERS, kind=pb.KIND_DELTA, encoding=encoding, bytes=len(payload), num_samples=10
    )


def test_a_small_update_in_one_message_moves_the_model(control: Control, clients: Clients) -> None:
    job_id, events = run(control)
    (a,) = clients("a")
    command = a.expect("train")
    base, payload = parameters(a, command.model_version), payload_of(ONES)
    assert not a.push_small(a.header(command, payload), payload).already
    assert [event.kind for event in events][-1] == "job_ended"
    assert control.job(job_id).state == "completed"
    np.testing.assert_array_equal(parameters(a), base + ONES)
    assert control.rounds(job_id=job_id)[0].upload_bytes > len(payload)


def test_one_call_takes_updates_of_many_rounds_and_each_counts_for_its_own_round(
    control: Control, clients: Clients
) -> None:
    job_id, events = run(control, rounds=3)
    (a,) = clients("a")
    sizes = []

    def updates() -> Iterator[pb.SmallUpdate]:
        for _ in range(3):
            update = update_of(a, a.expect("train"))
            sizes.append(update.ByteSize() + GRPC_PREFIX)
            yield update

    assert [answer.already for answer in a.push_many_small(updates())] == [False] * 3
    assert [event.kind for event in events][-1] == "job_ended"
    assert [round_.upload_bytes for round_ in control.rounds(job_id=job_id)] == sizes[::-1]


def test_a_call_that_waits_for_updates_ends_with_its_session(server: Fleet, control: Control, clients: Clients) -> None:
    job_id = control.start_job(vector_job(min_clients=2)).job_id
    a, _ = clients("a", "b")
    sent: queue.Queue[pb.SmallUpdate | None] = queue.Queue()
    sent.put(update_of(a, a.expect("train")))
    answers = a.push_many_small(iter(sent.get, None))
    assert not next(answers).already
    a.stop_watching()
    with pytest.raises(Refused) as refused:
        next(answers)
    sent.put(None)
    assert refused.value.code is StatusCode.CANCELLED
    log = (server.directory / "logs" / "server.log").read_text()
    assert "PushSmallUpdates refused: no_session" not in log  # a client that leaves causes no warning
    control.stop_job(job_id)


def test_an_update_that_is_being_stored_is_answered_even_if_its_session_ends(
    server: Fleet, control: Control, clients: Clients
) -> None:
    job_id = control.start_job(vector_job(min_clients=2)).job_id
    a, _ = clients("a", "b")
    update = update_of(a, a.expect("train"))
    sent: queue.Queue[pb.SmallUpdate | None] = queue.Queue()
    answers = a.push_many_small(iter(sent.get, None))
    with ThreadPoolExecutor(1) as reading, blocked_database(server):
        first = reading.submit(next, answers)
        with until_received(server):
            sent.put(update)
        (newer,) = clients("a")
        a.ended.get(timeout=SECONDS)
    assert not first.result().already
    with pytest.raises(Refused):
        next(answers)
    sent.put(None)
    assert newer.push_small(update.offer, update.payload).already
    control.stop_job(job_id)


def test_events_of_updates_that_are_stored_together_have_the_round_after_all_of_them(
    server: Fleet, control: Control, clients: Clients
) -> None:
    _, events = run(control, min_clients=3)
    three = clients("a", "b", "c")
    updates = [update_of(client, client.expect("train")) for client in three]
    with ThreadPoolExecutor(3) as pushing, blocked_database(server):
        for client, update in zip(three, updates, strict=True):
            with until_received(server):
                pushing.submit(client.push_small, update.offer, update.payload)
    delivered = [event.state.delivered for event in events if event.kind == "update_accepted"]
    assert delivered == [1, 3, 3]


def test_a_repeated_update_is_recognised_with_either_call(control: Control, clients: Clients) -> None:
    job_id = control.start_job(vector_job(min_clients=2)).job_id
    a, b = clients("a", "b")
    command, _ = a.expect("train"), b.expect("train")
    payload, other = payload_of(ONES), payload_of(2 * ONES)
    header = a.header(command, payload)
    assert not a.push_small(header, payload).already
    assert a.push_small(header, payload).already
    again = a.push(header, payload)
    assert again is not None
    assert again.accepted.already
    with pytest.raises(Refused) as refused:
        a.push_small(a.header(command, other), other)
    assert (refused.value.code, refused.value.reason) == (StatusCode.ALREADY_EXISTS, "already_accepted_other")
    control.stop_job(job_id)


def test_one_message_may_only_contain_a_complete_small_update(control: Control, clients: Clients) -> None:
    size = 20_000
    job_id, events = run(control, model_args={"size": size})
    (a,) = clients("a")
    command = a.expect("train")
    small, large = (payload_of(np.ones(size, np.float32), name) for name in ("int8", "fp32"))
    for name, payload, sent in (("int8", small, small[:-1]), ("fp32", large, large), ("fp32", large, b"")):
        with pytest.raises(Refused) as refused:
            a.push_small(a.header(command, payload, packets=[packet(payload, name)]), sent)
        assert (refused.value.code, refused.value.reason) == (StatusCode.INVALID_ARGUMENT, "bad_chunk")
    a.push_small(a.header(command, small, packets=[packet(small, "int8")]), small)
    assert [event.kind for event in events][-1] == "job_ended"
    assert control.job(job_id).state == "completed"


def test_a_small_model_comes_with_its_command_unless_the_client_was_sent_it_before(
    control: Control, clients: Clients
) -> None:
    run(control, rounds=3, evaluate=True)
    (a,) = clients("a")
    for fetches in (True, False, True):
        command = a.expect("train")
        carried = command.HasField("model")
        header, payload = a.fetch(command.model_version)
        if carried:
            assert (command.model.header, command.model.payload) == (header, payload)
        update = payload_of(ONES)
        a.push_small(a.header(command, update), update)
        order = a.expect("evaluate")
        if fetches:
            a.fetch(order.model_version)
        report = pb.EvaluationReport(round=order.round, model_digest=order.model_digest, correct=1, total=1)
        a.commands.ReportEvaluation(report, metadata=a.metadata)
        assert carried == (command.job_round != 2)


def test_a_repeated_command_contains_no_model(control: Control, clients: Clients) -> None:
    job_id = control.start_job(vector_job()).job_id
    (a,) = clients("a")
    assert a.expect("train").HasField("model")
    (again,) = clients("a")
    assert not again.expect("train").HasField("model")
    control.stop_job(job_id)


@pytest.mark.parametrize("keys", [{"model_args": {"size": 20_000}}, {"download_encoding": "uniform"}])
def test_large_models_and_models_sent_as_deltas_do_not_come_with_their_command(
    control: Control, clients: Clients, keys: dict[str, object]
) -> None:
    job_id = control.start_job(vector_job(**keys)).job_id
    (a,) = clients("a")
    assert not a.expect("train").HasField("model")
    control.stop_job(job_id)
