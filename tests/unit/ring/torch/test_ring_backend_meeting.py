"""Workers agree through a store who forms the next generation, and choose where to listen."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.ring_endpoints import world
from tests.ring_groups import candidate
from tests.waiting import until
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore

from fedring.ring import Endpoint, PeerLost, RingError, RingOptions
from fedring.ring.torch import forming
from fedring.ring.torch.meeting import Candidate, Meeting, Membership, Terms
from fedring.ring.torch.rendezvous import create, meet
from fedring.ring.torch.world import current
from fedring.ring.transport.channels import is_serving

LONG = timedelta(seconds=60)
OPTIONS = RingOptions(local_transport=False)


def hosted(kind: str, folder: Path) -> Callable[[], Store]:
    """Return a function that connects to one store."""
    if kind == "tcp":
        server = TCPStore("127.0.0.1", 0, None, True, LONG, wait_for_workers=False)
        return lambda: PrefixStore("p", TCPStore("127.0.0.1", server.port, None, False, LONG, wait_for_workers=False))
    if kind == "file":
        return lambda: FileStore(str(folder / "store"), -1)
    store = HashStore()
    return lambda: store


@pytest.fixture(params=["hash", "file", "tcp"])
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Store]:
    """Return a function that connects to a store."""
    return hosted(request.param, tmp_path)


class Worker:
    """A worker that takes part in attempts, each on a thread."""

    def __init__(self, store: Store, slot: int, *, size: int = 3, min_size: int = 3, last_call: float = 60) -> None:
        self.meeting = Meeting(store, OPTIONS)
        self.terms = Terms(slot, size, min_size, last_call, 60)
        self.result: tuple[Endpoint, Membership] | None = None
        self.error: RingError | None = None
        self._thread = threading.Thread()

    def start(self, *, step: int = 0, seconds: float = 60) -> "Worker":
        """Take part in the next attempt."""
        self.die()
        self.result, self.error = None, None
        self._thread = threading.Thread(target=self._run, args=(step, time.monotonic() + seconds))
        self._thread.start()
        return self

    def end(self) -> Membership:
        """Wait until the attempt is closed, and return the membership, as formed."""
        self._thread.join()
        assert self.result is not None, self.error
        self.meeting.formed(self.result[1])
        return self.result[1]

    def failed(self) -> RingError:
        """Wait until it fails, and return the error."""
        self._thread.join()
        assert self.error is not None
        return self.error

    def die(self) -> None:
        """Stop answering."""
        if self.result is not None:
            self.result[0].close()

    @property
    def address(self) -> str:
        assert self.result is not None
        return self.result[0].address

    def _run(self, step: int, deadline: float) -> None:
        try:
            self.result = self.meeting.take_part(self.terms, step=step, deadline=deadline)
        except RingError as error:
            self.error = error


@pytest.fixture
def workers(connect: Callable[[], Store]) -> Iterator[Callable[..., Worker]]:
    """Return a function that makes workers; at the end all of them stop answering."""
    with ExitStack() as stack:

        def make(slot: int, **terms: Any) -> Worker:
            worker = Worker(connect(), slot, **terms)
            stack.callback(worker.die)
            return worker

        yield make


def all_meet(workers: Sequence[Worker], *, step: int = 0) -> Membership:
    """Let the workers meet, and return the membership that they agree on."""
    for worker in workers:
        worker.start(step=step)
    found = [worker.end() for worker in workers]
    assert all(one == found[0] for one in found)
    return found[0]


def seated(store: Store, attempt: int, slot: int) -> None:
    """Wait until somebody has taken a seat."""
    until(lambda: store.check([f"{attempt}/{slot}"]) and store.get(f"{attempt}/{slot}"))


def test_ranks_learn_each_others_addresses_and_one_generation(workers: Callable[..., Worker]) -> None:
    three = [workers(slot) for slot in (2, 1, 0)]
    membership = all_meet(three)
    assert membership.addresses == [worker.address for worker in reversed(three)]
    assert {worker.result[0].generation for worker in three if worker.result} == {membership.generation}


def test_a_replacement_joins_the_survivors(workers: Callable[..., Worker]) -> None:
    three = [workers(slot) for slot in range(3)]
    before = all_meet(three)
    three[0].die()
    three[0] = workers(0)
    for worker, step in zip(three, (0, 5, 6), strict=True):
        worker.start(step=step)
    after, *_ = [worker.end() for worker in three]
    assert [one.slot for one in after.members] == [2, 1, 0]
    assert after.generation != before.generation


def test_survivors_go_on_without_a_replacement(workers: Callable[..., Worker]) -> None:
    three = [workers(slot, min_size=2) for slot in range(3)]
    all_meet(three)
    three[1].die()
    two = [three[0], three[2]]
    for worker in two:
        worker.terms = Terms(worker.terms.slot, 3, 2, 0.5, 60)
    after = all_meet(two, step=1)
    assert [one.slot for one in after.members] == [0, 2]


def test_a_latecomer_forms_no_world_of_its_own(connect: Callable[[], Store], workers: Callable[..., Worker]) -> None:
    three = [workers(slot, min_size=1) for slot in range(3)]
    all_meet(three)
    three[2].die()
    late = workers(2, min_size=1, last_call=0.1).start(seconds=3)
    error = late.failed()  # the other two still answer
    assert isinstance(error, PeerLost)
    assert three[0].meeting.waiting(3) == 0


def test_only_workers_that_still_run_are_counted_as_waiting(
    connect: Callable[[], Store], workers: Callable[..., Worker]
) -> None:
    two = [workers(slot, size=4, min_size=2, last_call=0.1) for slot in range(2)]
    all_meet(two)
    store = connect()
    dead = candidate("dead", 2).model_copy(update={"address": "127.0.0.1:1"})
    store.set("1/2", dead.model_dump_json())
    assert two[0].meeting.waiting(4) == 0
    late = workers(3, size=4, min_size=2, last_call=0.1).start()
    seated(store, 1, 3)
    assert two[0].meeting.waiting(4) == 1
    for worker in two:
        worker.start(step=1)
    assert late.end() == two[0].end() == two[1].end()
    assert two[0].meeting.waiting(4) == 0


def test_restarted_workers_do_not_meet_those_of_the_attempt_before(workers: Callable[..., Worker]) -> None:
    old = [workers(slot) for slot in range(3)]
    before = all_meet(old)
    for worker in old:
        worker.die()
    new = [workers(slot) for slot in range(3)]
    after = all_meet(new)
    assert not set(before.addresses) & set(after.addresses)
    assert [one.slot for one in after.members] == [0, 1, 2]


def test_the_seat_of_a_worker_that_died_is_taken_again(
    connect: Callable[[], Store], workers: Callable[..., Worker]
) -> None:
    store = connect()
    dead = candidate("dead", 1).model_copy(update={"address": "127.0.0.1:1"})
    store.set("0/1", dead.model_dump_json())
    first, third = workers(0).start(), workers(2).start()
    until(lambda: not store.get("0/1"))
    second = workers(1).start()
    assert first.end() == second.end() == third.end()


def test_a_later_worker_with_the_same_slot_replaces_an_earlier_one(
    connect: Callable[[], Store], workers: Callable[..., Worker]
) -> None:
    store = connect()
    earlier = workers(0, size=2, min_size=2).start()
    seated(store, 0, 0)
    later = workers(0, size=2, min_size=2).start()
    assert "slot 0 belongs to the worker at 127.0.0.1:" in str(earlier.failed())
    other = workers(1, size=2, min_size=2).start()
    assert later.end() == other.end()


def test_a_worker_that_was_frozen_does_not_take_the_seat_of_its_replacement(
    connect: Callable[[], Store], workers: Callable[..., Worker]
) -> None:
    two = [workers(slot, size=2, min_size=2) for slot in range(2)]
    all_meet(two)
    frozen, two[1] = two[1], workers(1, size=2, min_size=2)
    second = all_meet(two, step=5)
    two[1].start(step=6)
    seated(connect(), second.attempt + 1, 1)
    assert "slot 1 belongs to" in str(frozen.start(step=5).failed())
    two[0].start(step=6)
    assert two[0].end() == two[1].end()


def test_the_attempt_goes_on_if_the_worker_that_closed_it_died(
    connect: Callable[[], Store], workers: Callable[..., Worker]
) -> None:
    store = connect()
    waiting = [workers(slot).start() for slot in (0, 1)]
    for slot in (0, 1):
        seated(store, 0, slot)
    seats = [Candidate.model_validate_json(store.get(f"0/{slot}")) for slot in (0, 1)]
    last = store.get("membership").decode()
    closed = Membership.model_validate_json(last).next([*seats, candidate("dead", 2)]).model_dump_json()
    store.compare_set("membership", last, closed)  # and then it dies, before it has woken the others
    assert all(json.loads(closed) == json.loads(worker.end().model_dump_json()) for worker in waiting)


def test_keys_of_old_attempts_are_deleted(connect: Callable[[], Store], workers: Callable[..., Worker]) -> None:
    two = [workers(slot, size=2, min_size=2) for slot in range(2)]
    attempts = [all_meet(two).attempt for _ in range(4)]
    keys = [key for key in connect().list_keys() if "/" in key and not key.startswith("efcount")]
    assert {int(key.split("/")[0]) for key in keys} <= set(attempts[-2:])


@pytest.mark.parametrize(("slot", "missing"), [(0, 1), (1, 0)])
def test_a_rank_that_does_not_come_is_named(slot: int, missing: int) -> None:
    error = Worker(HashStore(), slot, size=2, min_size=2).start(seconds=0.3).failed()
    assert f"rank {missing} did not come" in str(error)
    assert error.rank == missing


def test_a_rank_that_cannot_be_reached_is_named() -> None:
    store = HashStore()
    far = candidate("far", 1).model_copy(update={"address": "127.0.0.1:1", "size": 2})
    store.set("0/1", far.model_dump_json())
    error = Worker(store, 0, size=2, min_size=2).start(seconds=0.5).failed()
    assert "rank 1 has come, but 127.0.0.1:1 cannot be reached" in str(error)


def test_a_worker_that_waits_for_long_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    server = TCPStore("127.0.0.1", 0, None, True, LONG, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, None, False, LONG, wait_for_workers=False)
    Worker(client, 0).start(seconds=1.5).failed()
    assert "waitForInput" not in capfd.readouterr().err


def test_a_store_that_is_gone_is_named_with_what_to_do() -> None:
    server = TCPStore("127.0.0.1", 0, None, True, LONG, wait_for_workers=False)
    port = server.port
    worker = Worker(TCPStore("127.0.0.1", port, None, False, LONG, wait_for_workers=False), 0).start()
    seated(server, 0, 0)
    del server
    assert f"the store at 127.0.0.1:{port} is gone" in str(worker.failed())


def wanted(store: Store) -> Any:
    """Return torch's description of a default group of one rank."""
    return SimpleNamespace(
        store=store, group_rank=0, group_size=1, global_ranks_in_group=[], group_id="0", timeout=LONG
    )


def test_workers_listen_on_the_interface_that_reaches_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    tcp = TCPStore("localhost", 0, 1, True, LONG, use_libuv=False)
    for store in (HashStore(), PrefixStore("a", PrefixStore("b", tcp))):
        group = create(wanted(store), None)
        assert group.world.endpoint.address.startswith("127.0.0.1:")
        group.shutdown()
    assert current() is None


def test_the_option_listen_goes_before_the_interface_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("FEDRING_RING_LISTEN", "127.0.0.2:0")
    group = create(wanted(HashStore()), None)
    assert group.world.endpoint.address.startswith("127.0.0.2:")
    group.shutdown()


def test_a_neighbour_that_has_left_in_order_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have finished all that it had to do while this worker still waits for others."""
    answers: list[bool] = []

    def ask(*arguments: Any, **options: Any) -> bool:
        answers.append(is_serving(*arguments, **options))
        return answers[-1]

    monkeypatch.setattr(forming, "is_serving", ask)
    with world(2, OPTIONS) as two:
        first, second = two.endpoints
        two.match()
        second.close()
        until(lambda: first.has_left(second.address))
        with forming._watching(first, two.members):
            until(lambda: len(answers) == 2 or first.failure is not None)
        assert first.failure is None
        assert answers[:2] == [False, False]


def test_a_member_that_dies_before_it_is_connected_is_replaced_in_the_next_attempt() -> None:
    store = HashStore()
    other = Worker(store, 1, size=2, min_size=2).start()
    groups: list[Any] = []
    begin = time.monotonic()

    def enter() -> None:
        description = wanted(store)
        description.group_size = 2
        groups.append(create(description, RingOptions(local_transport=False)))

    entering = threading.Thread(target=enter)
    entering.start()
    other.end()
    other.die()
    replacement = wanted(store)
    replacement.group_rank, replacement.group_size = 1, 2
    replacement.global_ranks_in_group = [0, 1]  # not a second default group in this process
    _, group = meet(replacement, RingOptions(local_transport=False), default=False)
    entering.join()
    assert time.monotonic() - begin < 50  # without a question whether it still runs, a minute
    assert [one.place for one in (*groups, group)] == [(0, 2), (1, 2)]
    assert store.get("membership").decode().count("worker") == 2
    closing = [threading.Thread(target=one.shutdown) for one in (*groups, group)]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join()
