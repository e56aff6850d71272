"""Messages, bytes, subgroups and futures, compared with what this rank computes by itself."""

import queue
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fedring.ring import allgather_bytes
from tests.system.ring_scripts import collectives
from tests.system.ring_scripts.collectives import all_of, check_equal, make, started


def bytes_of_different_lengths(rank: int, size: int) -> None:
    for unit, limit in ((0, 10), (1000, 100_000), (700_000, 1 << 30)):
        gather = allgather_bytes(bytes([rank]) * (unit * rank), limit=limit)
        gather.wait(20)
        assert [bytes(one) for one in gather.collect()] == [bytes([other]) * (unit * other) for other in range(size)]
    gathers = [allgather_bytes(memoryview(bytes([turn, rank]))) for turn in range(20)]
    total = gathers[-1].future.then(lambda done: sum(one[1] for one in done.value()))
    assert total.wait() == sum(range(size))
    for turn, gather in enumerate(gathers):
        assert [list(one) for one in gather.collect()] == [[turn, other] for other in range(size)]


def messages(rank: int, size: int) -> None:
    if size == 1:
        return
    after, before = (rank + 1) % size, (rank - 1) % size
    for count in (1, 300_000):
        outgoing = started(dist.isend(make(rank, count), after))
        incoming = torch.empty(count)
        assert dist.recv(incoming, before) == before
        outgoing.wait()
        check_equal(incoming, make(before, count))
    first, second = torch.empty(2), torch.empty(3)
    sends = [dist.isend(make(rank, 2), after, tag=7), dist.isend(make(rank, 3), after, tag=8)]
    dist.recv(second, before, tag=8)  # tags may be received in another order
    dist.recv(first, before, tag=7)
    check_equal(first, make(before, 2))
    check_equal(second, make(before, 3))
    for send in sends:
        started(send).wait()
    nothing = torch.empty(0)
    empty_send = started(dist.isend(nothing, after))
    dist.recv(nothing, before)
    empty_send.wait()
    operations = [
        dist.P2POp(dist.irecv, incoming := torch.empty(4), before),
        dist.P2POp(dist.isend, make(rank, 4), after),
        dist.P2POp(dist.isend, make(rank + 50, 4), after),
        dist.P2POp(dist.irecv, incoming2 := torch.empty(4), before),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    check_equal(incoming, make(before, 4))
    check_equal(incoming2, make(before + 50, 4))


def messages_from_any_rank(rank: int, size: int) -> None:
    if size == 1:
        return
    if rank > 0:
        dist.send(make(rank, 3), 0, tag=rank % 2)
        dist.send(make(rank + 20, 3), 0, tag=rank % 2)
    else:
        seen: list[int] = []
        for tag in [other % 2 for other in range(1, size) for _ in range(2)]:
            tensor = torch.empty(3)
            source = dist.recv(tensor, tag=tag)
            check_equal(tensor, make(source + 20 * seen.count(source), 3))  # those of one rank come in their order
            seen.append(source)
        assert sorted(seen) == sorted(2 * list(range(1, size)))
    dist.barrier()
    if rank == 0:
        future = started(dist.irecv(late := torch.empty(2))).get_future()
        dist.barrier()
        check_equal(future.wait()[0], make(1, 2))
        check_equal(late, make(1, 2))
    else:
        dist.barrier()
        if rank == 1:
            dist.send(make(1, 2), 0)


def a_message_to_the_own_rank(rank: int, size: int) -> None:
    work = started(dist.isend(make(rank, 3), rank))
    into = torch.empty(3)
    started(dist.irecv(into, rank)).wait()
    work.wait()
    check_equal(into, make(rank, 3))


def subgroups(rank: int, size: int) -> None:
    lower: Any = dist.new_group(list(range((size + 1) // 2)), group_desc="lower half")
    upside_down: Any = dist.new_group(list(range(size))[::-1], sort_ranks=False, timeout=timedelta(seconds=60))
    mine: Any = dist.new_group([rank], use_local_synchronization=True)
    members = dist.get_process_group_ranks(lower) if rank < (size + 1) // 2 else []
    for _ in range(2):
        if members:
            tensor = make(rank, 7)
            dist.all_reduce(tensor, group=lower)
            check_equal(tensor, all_of(len(members), 7).sum(0))
        tensor = make(rank, 6)
        dist.broadcast(tensor, size - 1, group=upside_down)
        check_equal(tensor, make(size - 1, 6))
        dist.all_reduce(tensor, group=mine)
        check_equal(tensor, make(size - 1, 6))
    assert upside_down.rank() == size - 1 - rank
    dist.destroy_process_group(upside_down)
    again: Any = dist.new_group()
    tensor = make(rank, 3)
    dist.all_reduce(tensor, group=again)
    check_equal(tensor, all_of(size, 3).sum(0))


def a_group_under_another_backend(rank: int, size: int) -> float:
    """Make groups while the default group is of another backend: each has an endpoint of its own."""
    group: Any = dist.new_group(backend="fedring")
    other: Any = dist.new_group([0, 1], backend="fedring")
    tensor = torch.ones(1000)
    dist.all_reduce(tensor, group=group)
    if rank < 2:
        dist.all_reduce(tensor, group=other)
    dist.broadcast(tensor, 0)
    assert dist.get_backend(group) == "fedring"
    return tensor[0].item()


def futures(rank: int, size: int) -> None:
    work = started(dist.all_reduce(make(rank, 3), async_op=True))
    assert work is not None
    doubled = work.get_future().then(lambda done: done.value()[0] * 2).then(lambda done: done.value() + 1)
    check_equal(doubled.wait(), all_of(size, 3).sum(0) * 2 + 1)
    gathered = torch.futures.collect_all(
        [started(dist.all_reduce(make(rank, 2), async_op=True)).get_future() for _ in range(3)]
    )
    for future in gathered.wait():
        check_equal(future.value()[0], all_of(size, 2).sum(0))
    noticed: queue.SimpleQueue[float] = queue.SimpleQueue()
    last = started(dist.all_reduce(make(rank, 1), async_op=True)).get_future()
    last.add_done_callback(lambda done: noticed.put(done.value()[0].item()))
    assert noticed.get(timeout=60) == all_of(size, 1).sum().item()


def collectives_in_callbacks(rank: int, size: int) -> None:
    """Start collectives in callbacks and wait for them; they are attached and run in another order on each rank."""
    works = [started(dist.all_reduce(torch.full((10,), float(number)), async_op=True)) for number in range(8)]

    def nested(number: int) -> Callable[[Any], Tensor]:
        def callback(done: Any) -> Tensor:
            inner = started(dist.all_reduce(done.value()[0] + number, async_op=True)).get_future()
            result: Tensor = inner.wait()[0]
            return result

        return callback

    order = list(range(8)) if rank % 2 else list(range(7, -1, -1))
    results: dict[int, Any] = {}
    for number in order:
        chain = works[number].get_future().then(nested(number))
        results[number] = chain.then(
            lambda done: started(dist.all_reduce(done.value() * 1, async_op=True)).get_future().wait()
        )
    for number in range(8):
        check_equal(results[number].wait()[0], torch.full((10,), float((number * size + number) * size * size)))


CHECKS = [
    *collectives.CHECKS,
    bytes_of_different_lengths,
    messages,
    messages_from_any_rank,
    a_message_to_the_own_rank,
    subgroups,
    futures,
    collectives_in_callbacks,
]


def all_checks(rank: int, size: int) -> list[str]:
    """Run all checks, and return their names."""
    passed = []
    for check in CHECKS:
        check(rank, size)
        passed.append(check.__name__)
        dist.barrier()
    return passed
