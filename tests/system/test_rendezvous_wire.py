"""The rendezvous of a real fl-server, used by workers that speak the wire contract by hand."""

import queue
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from grpc import StatusCode

from fedring.v1 import federation_pb2 as fed
from fedring.v1 import rendezvous_pb2 as pb
from fedring.v1.rendezvous_pb2_grpc import RendezvousServiceStub
from tests.fleets import Control, Fleet
from tests.system.wire import SECONDS, SIZE, Refused, WireClient, next_commands, payload_of, run

Clients = Callable[..., list[WireClient]]
DIGEST = bytes(32)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Start one fl-server for all tests of this file."""
    with Fleet(tmp_path_factory.mktemp("rendezvous")) as fleet:
        yield fleet


class WireWorker:
    """One Form stream of a client."""

    def __init__(self, client: WireClient, command: fed.TrainCmd, **enter: Any) -> None:
        self.client, self.command = client, command
        self._out: queue.Queue[pb.WorkerMessage | None] = queue.Queue()
        facts: dict[str, Any] = {"run_id": command.run_id, "round": command.round, **enter}
        self.say(enter=pb.Enter(**facts))
        stub = RendezvousServiceStub(client.channel)
        self._call = stub.Form(iter(self._out.get, None), metadata=client.metadata, timeout=2 * SECONDS)

    def say(self, **message: Any) -> None:
        """Send a message."""
        self._out.put(pb.WorkerMessage(**message))

    def hear(self, kind: str) -> Any:
        """Return the next message, which must be of this kind."""
        try:
            message = next(self._call)
        except grpc.RpcError as error:
            raise Refused(error) from error
        assert message.WhichOneof("message") == kind
        return getattr(message, kind)

    def be_ready(self, samples: int = 0) -> int:
        """Answer the next `prepare`; return its generation."""
        generation: int = self.hear("prepare").generation
        address = f"{self.client.client_id}.example:1"
        self.say(ready=pb.Ready(generation=generation, address=address, samples=samples))
        return generation

    def join(self, generation: int) -> pb.Group:
        """Join the group that the server announces, and return it."""
        group: pb.Group = self.hear("group")
        self.say(joined=pb.Joined(generation=generation))
        return group

    def train(self, generation: int, digest: bytes = DIGEST) -> None:
        """Report that the training of the group is done."""
        assert self.hear("start").generation == generation
        self.say(done=pb.Done(generation=generation, digest=digest, num_samples=5, metrics={"steps": 3.0}))

    def deliver(self) -> None:
        """Push the round's update."""
        self.hear("deliver")
        payload = payload_of(np.ones(SIZE, np.float32))
        self.client.push(self.client.header(self.command, payload), payload)

    def vanish(self) -> None:
        """End the stream."""
        self._call.cancel()


def workers(opened: list[WireClient]) -> list[WireWorker]:
    return [WireWorker(client, client.expect("train")) for client in opened]


def start(control: Control, count: int, **keys: Any) -> tuple[int, Any]:
    return run(control, mode="data_parallel", min_clients=count, **keys)


def test_workers_of_a_round_learn_each_others_addresses_and_one_delivers(control: Control, clients: Clients) -> None:
    opened = clients("b", "a")
    job_id, events = start(control, 2)
    b, a = workers(opened)
    generation = a.be_ready()
    assert b.be_ready() == generation
    for rank, worker in enumerate((a, b)):
        group = worker.join(generation)
        assert (group.rank, list(group.members)) == (rank, ["a.example:1", "b.example:1"])
    a.train(generation)
    b.train(generation)
    b.hear("wait")
    a.deliver()
    assert a.hear("ended").reason == b.hear("ended").reason == ""
    assert [event.kind for event in events][-1] == "job_ended"
    round_ = control.rounds(job_id=job_id)[0]
    assert (round_.phase, round_.selected, round_.delivered, list(round_.missing)) == ("published", 2, 2, [])
    assert {client.client_id: client.num_samples for client in round_.clients} == {"a": 10, "b": 5}
    assert {client.client_id: dict(client.metrics) for client in round_.clients}["b"] == {"steps": 3.0}


@pytest.mark.parametrize(("samples", "text"), [((7, 5), "b has found 5 training samples and a 7"), ((7, 0), "")])
def test_operators_are_told_once_that_workers_have_found_other_numbers_of_samples(
    control: Control, clients: Clients, samples: tuple[int, int], text: str
) -> None:
    """A worker of an older version does not say how many it has found."""
    opened = clients("b", "a")
    _, events = start(control, 2)
    b, a = workers(opened)

    def form() -> int:
        generation = a.be_ready(samples[0])
        assert b.be_ready(samples[1]) == generation
        for worker in (a, b):
            worker.join(generation)
        return generation

    first = form()
    assert (a.hear("start").generation, b.hear("start").generation) == (first, first)
    a.say(broken=pb.Broken(generation=first, reason="mismatch"))
    generation = form()
    a.train(generation)
    b.train(generation)
    b.hear("wait")
    a.deliver()
    told = [event.text for event in events if event.kind == "other_samples"]
    assert len(told) == bool(text)
    assert "".join(told).startswith(text)


def test_the_command_carries_the_jobs_table(control: Control, clients: Clients) -> None:
    (client,) = clients()
    start(control, 1, data_parallel={"hook": "dgc", "ratio": 0.25})
    command: fed.TrainCmd = client.expect("train")
    assert command.job.mode == "data_parallel"
    assert '"ratio":0.25' in command.job.data_parallel
    assert command.encoding.name == "fp32"


def test_a_lost_worker_ends_the_generation_for_the_others(control: Control, clients: Clients) -> None:
    opened = clients("a", "b")
    _, events = start(control, 2, data_parallel={"replacement_seconds": 0})
    a, b = workers(opened)
    generation = a.be_ready()
    b.be_ready()
    a.join(generation)
    b.join(generation)
    a.hear("start")
    b.vanish()
    assert a.be_ready() == generation + 1
    a.join(generation + 1)
    a.train(generation + 1)
    a.deliver()
    changes = [event for event in events if event.kind in ("group_formed", "group_lost", "round_published")]
    assert [event.kind for event in changes] == ["group_formed", "group_lost", "group_formed", "round_published"]
    assert "lost b" in changes[1].text


def test_a_worker_whose_session_ends_is_lost(control: Control, clients: Clients) -> None:
    opened = clients("a", "b")
    start(control, 2, data_parallel={"replacement_seconds": 0})
    a, b = workers(opened)
    generation = a.be_ready()
    b.be_ready()
    a.hear("group")
    b.hear("group")
    clients("b")  # the client joins again, which ends its older session
    assert a.be_ready() == generation + 1
    with pytest.raises((Refused, StopIteration)):
        b.hear("start")


def test_a_round_whose_workers_have_different_models_is_abandoned(control: Control, clients: Clients) -> None:
    opened = clients("a", "b")
    job_id, events = start(control, 2, max_abandoned=1)
    a, b = workers(opened)
    generation = a.be_ready()
    b.be_ready()
    a.join(generation)
    b.join(generation)
    a.train(generation)
    b.train(generation, digest=bytes(31) + b"x")
    assert a.hear("ended").reason == "diverged"
    assert [event.kind for event in events][-1] == "job_ended"
    assert control.job(job_id).reason == "diverged"


def test_a_client_that_has_not_trained_with_the_group_cannot_deliver(control: Control, clients: Clients) -> None:
    (client,) = clients()
    start(control, 1)
    command = client.expect("train")
    payload = payload_of(np.ones(SIZE, np.float32))
    with pytest.raises(Refused) as caught:
        client.push(client.header(command, payload), payload)
    assert caught.value.reason == "not_a_worker"


def refusal(worker: WireWorker) -> Refused:
    with pytest.raises(Refused) as caught:
        worker.hear("prepare")
    return caught.value


def test_a_client_that_does_not_belong_to_the_round_is_refused(control: Control, clients: Clients) -> None:
    both = clients("a", "b")
    start(control, 2, sample_clients=1)
    ((chosen, command),) = next_commands(both, 1).items()
    another_round = fed.TrainCmd(run_id=command.run_id, round=command.round + 1)
    for client in both:
        error = refusal(WireWorker(client, another_round if client.client_id == chosen else command))
        assert (error.code, error.reason) == (StatusCode.FAILED_PRECONDITION, "unknown_round")


def test_a_generation_that_was_never_formed_is_refused(control: Control, clients: Clients) -> None:
    (client,) = clients()
    start(control, 1)
    command = client.expect("train")
    error = refusal(WireWorker(client, command, generation=(1 << 31) - 1))
    assert (error.code, error.reason) == (StatusCode.INVALID_ARGUMENT, "bad_request")
    assert WireWorker(client, command).be_ready() < 1000


@pytest.mark.parametrize("address", ["", "nowhere", "a b:1", "x" * 300 + ":1"])
def test_a_malformed_address_is_refused(control: Control, clients: Clients, address: str) -> None:
    (client,) = clients()
    start(control, 1)
    worker = WireWorker(client, client.expect("train"))
    worker.say(ready=pb.Ready(generation=worker.hear("prepare").generation, address=address))
    error = refusal(worker)
    assert (error.code, error.reason) == (StatusCode.INVALID_ARGUMENT, "bad_address")


@pytest.mark.parametrize(
    ("done", "reason"),
    [
        ({"digest": b"short"}, "bad_done"),
        ({"num_samples": 1 << 60}, "bad_done"),
        ({"train_seconds": float("nan")}, "bad_metrics"),
        ({"train_seconds": 1e308}, "bad_metrics"),
        ({"metrics": {"loss": float("inf")}}, "bad_metrics"),
        ({"metrics": {"loss": 1e308}}, "bad_metrics"),
        ({"metrics": {"a b": 1.0}}, "bad_metrics"),
        ({"metrics": {f"m{i}": 1.0 for i in range(33)}}, "bad_metrics"),
    ],
)
def test_an_invalid_report_of_a_worker_is_refused(
    control: Control, clients: Clients, done: dict[str, Any], reason: str
) -> None:
    (client,) = clients()
    start(control, 1)
    worker = WireWorker(client, client.expect("train"))
    worker.hear("prepare")
    worker.say(done=pb.Done(**{"digest": DIGEST, **done}))
    error = refusal(worker)
    assert (error.code, error.reason) == (StatusCode.INVALID_ARGUMENT, reason)
