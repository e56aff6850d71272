"""The backend's process group: several ranks in one process, each with an endpoint of its own."""

import gc
import logging
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from datetime import timedelta
from logging.handlers import QueueHandler
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ring_groups import WAIT, ring_groups
from tests.waiting import until
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed.distributed_c10d import _coalescing_manager

from fedring.ring import (
    CollectiveTimeout,
    Mismatch,
    NotSupported,
    PeerLost,
    RingError,
    RingProcessGroup,
    allgather_bytes,
    traffic,
)
from fedring.ring.engine.collectives import PART_BYTES
from fedring.ring.torch.work import deferred

PART = PART_BYTES // 4
"""Float32 values of a whole frame."""

Make = Callable[..., list[RingProcessGroup]]


@pytest.fixture
def make() -> Iterator[Make]:
    """Return a function that makes the ranks of a group. They leave it together at the end."""
    with ExitStack() as stack:
        yield lambda size, **options: stack.enter_context(ring_groups(size, **options))


def test_options_are_accepted_as_torch_passes_them_and_as_people_write_them(make: Make) -> None:
    groups = make(2)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    for arguments in (([torch.tensor([1.0])], options), (torch.tensor([1.0]), dist.ReduceOp.MAX)):
        works = [group.allreduce(*arguments) for group in groups]
        assert all(work.wait() for work in works)
        assert works[0].result()[0].item() == 1.0
    works = [group.allreduce([torch.tensor([2.0])]) for group in groups]
    assert [work.get_future().wait()[0].item() for work in works] == [4.0, 4.0]
    tensors = [torch.tensor([float(rank)]) for rank in range(2)]
    for work in [group.broadcast(tensor, 1) for group, tensor in zip(groups, tensors, strict=True)]:
        work.wait()
    assert tensors[0].item() == 1.0


def test_a_timeout_among_the_options_is_the_operations_own(make: Make) -> None:
    first, _ = make(2)
    options = dist.BarrierOptions()
    options.timeout = timedelta(milliseconds=300)
    with pytest.raises(CollectiveTimeout) as caught:
        first.barrier(options).wait()
    assert caught.value.rank == 1


def test_names_and_store_are_the_groups(make: Make) -> None:
    (group,) = make(1)
    group._set_group_name("seven")
    group._set_group_desc("for tests")
    assert (group.group_name, group.group_desc, group.name(), group._get_backend_name()) == (
        "seven",
        "for tests",
        "fedring",
        "fedring",
    )
    assert (group.rank(), group.size()) == (0, 1)
    assert isinstance(group.get_group_store(), HashStore)


def test_a_group_of_one_needs_no_streams(make: Make) -> None:
    (group,) = make(1)
    tensor, output = torch.tensor([3.0, 5.0]), torch.empty(2)
    group.allreduce(tensor).wait()
    group.reduce([tensor], 0).wait()
    group.reduce_scatter_single(output, tensor).wait()
    group.barrier().wait()
    assert group.allgather_bytes(b"me").collect() == [b"me"]
    assert tensor.tolist() == output.tolist() == [3.0, 5.0]
    assert group.world.endpoint.traffic.sent_frames == 0


def test_a_callback_runs_on_another_thread_and_keeps_nobody_waiting(make: Make) -> None:
    groups = make(2)
    works = [group.allreduce(torch.ones(2)) for group in groups]
    for work in works:
        work.wait()
    release = threading.Event()
    blocked = [work.get_future().then(lambda done: release.wait(60)) for work in works]  # attached after the end
    later = [group.allreduce(torch.ones(2)).get_future() for group in groups]
    assert [future.wait()[0].tolist() for future in later] == [[2.0, 2.0]] * 2
    assert not any(future.done() for future in blocked)
    release.set()
    assert all(future.wait() for future in blocked)


def test_collectives_that_callbacks_start_match_in_any_order_of_the_callbacks(make: Make) -> None:
    groups = make(2)
    started = [[group.allreduce(torch.full((3,), float(number))) for number in range(6)] for group in groups]
    nested: list[dict[int, Any]] = [{}, {}]
    for rank, group in enumerate(groups):

        def again(done: Any, group: RingProcessGroup = group) -> Tensor:
            result: Tensor = group.allreduce(done.value()[0] + 1).get_future().wait()[0]
            return result

        for number in range(6) if rank else range(5, -1, -1):
            nested[rank][number] = started[rank][number].get_future().then(again)
    for number in range(6):
        assert [nested[rank][number].wait().tolist() for rank in range(2)] == [[4.0 * number + 2] * 3] * 2


def test_a_failed_future_raises_for_everyone_who_asks_for_its_value(make: Make) -> None:
    groups = make(2)
    work = groups[0].barrier()
    groups[1].abort()
    future = work.get_future()
    for ask in (future.wait, future.value, future.then(lambda done: done.value()).wait, work.wait):
        with pytest.raises(RingError, match="rank 1 has aborted"):
            ask()
    assert not work.is_success()
    assert work.is_completed()
    with pytest.raises(RingError, match="rank 1 has aborted"):
        str(torch.futures.collect_all([future]).wait()[0].value())


@pytest.mark.parametrize("error", [LookupError("the callback has failed"), PeerLost("rank 1 is lost", rank=1)])
def test_a_failed_future_keeps_no_reference_to_those_who_waited(error: Exception) -> None:
    def fail() -> None:
        raise error

    class Model:
        pass

    def wait() -> "weakref.ref[Model]":
        model = Model()
        with pytest.raises(type(error), match=str(error)) as raised:
            future.wait()
        assert vars(raised.value) == vars(error)
        return weakref.ref(model)

    future, complete = deferred("0", fail)
    complete()
    model = wait()
    gc.collect()
    assert model() is None


def test_a_callbacks_error_is_logged_if_nobody_can_wait_for_it(make: Make) -> None:
    (group,) = make(1)
    records: queue.Queue[logging.LogRecord] = queue.Queue()
    handler = QueueHandler(records)
    logging.getLogger("fedring.ring.torch.work").addHandler(handler)

    def fail(done: Any) -> None:
        raise LookupError("from a callback")

    group.allreduce(torch.ones(1)).get_future().add_done_callback(fail)
    assert "from a callback" in records.get(timeout=60).getMessage()
    logging.getLogger("fedring.ring.torch.work").removeHandler(handler)


def test_exchanges_of_gradients_are_counted_and_other_operations_are_not(make: Make) -> None:
    groups = make(2)
    operations: list[Callable[[RingProcessGroup], Any]] = [
        lambda group: group.allreduce(torch.ones(2)),
        lambda group: group.broadcast(torch.ones(2), 0),
        lambda group: group.allgather_bytes(b"gradient"),
        lambda group: group.barrier(),
    ]
    for operation in operations:
        for work in [operation(group) for group in groups]:
            work.wait()
    until(lambda: all(group.world.endpoint.traffic.exchanges == 2 for group in groups))


def test_messages_of_bytes_arrive_in_rank_order(make: Make) -> None:
    groups = make(3)
    gathers = [group.allgather_bytes(b"x" * rank, limit=10) for rank, group in enumerate(groups)]
    for gather in gathers:
        gather.wait(60)
        assert [bytes(one) for one in gather.collect()] == [b"", b"x", b"xx"]
    with pytest.raises(ValueError, match="limit"):
        groups[0].allgather_bytes(b"xxx", limit=2)


def test_other_groups_do_not_gather_bytes() -> None:
    with pytest.raises(NotSupported, match="fedring"):
        allgather_bytes(b"")
    assert traffic().sent_bytes >= 0


def test_messages_from_any_rank_time_out_with_a_reason(make: Make) -> None:
    first, _ = make(2)
    receipt = first.recv_anysource([torch.empty(1)], 4)
    assert not receipt.is_completed()
    with pytest.raises(CollectiveTimeout, match="tag 4"):
        receipt.wait(timedelta(milliseconds=100))


def test_messages_of_ranks_that_have_left_since_are_received_from_any_rank(make: Make) -> None:
    first, *others = make(3)
    for other in others:
        other.send([torch.full((2,), float(other.ring.rank))], 0, 4).wait()
        other.shutdown()
    until(lambda: all(map(first.ring.has_left, (1, 2))))
    received = torch.zeros(2)
    for _ in others:
        receipt = first.recv_anysource([received], 4)
        receipt.wait()
        assert received.tolist() == [receipt.source_rank()] * 2
    with pytest.raises(PeerLost, match="has left"):
        first.recv_anysource([received], 4).wait()


def test_a_receipt_from_any_rank_is_not_coalesced(make: Make) -> None:
    first, second = make(2)
    cpu, received = torch.device("cpu"), torch.zeros(2)
    with pytest.raises(NotSupported, match="coalesces"), _coalescing_manager(first, cpu):
        first.recv_anysource([received], 4)
    with pytest.raises(NotSupported, match="was refused"), _coalescing_manager(first, cpu), suppress(NotSupported):
        first.recv_anysource([received], 4)
    second.send([torch.ones(2)], 0, 4)
    first.recv_anysource([received], 4).wait()
    assert received.tolist() == [1.0, 1.0]


def test_a_group_of_one_rank_has_nobody_to_receive_from(make: Make) -> None:
    (only,) = make(1)
    with pytest.raises(ValueError, match="no other rank"):
        only.recv_anysource([torch.zeros(1)], 0)


def test_operations_of_different_shapes_fail_on_both_ranks(make: Make) -> None:
    groups = make(2)
    works = [group.allreduce(torch.ones(count)) for group, count in zip(groups, (2, 3), strict=True)]
    for work in works:
        with pytest.raises(Mismatch):
            work.wait()


def test_a_rank_that_leaves_is_named_by_the_others(make: Make) -> None:
    first, second, third = make(3)
    works = [group.allreduce(torch.ones(3)) for group in (first, second)]
    third.shutdown()
    for work in works:
        with pytest.raises(PeerLost) as caught:
            work.wait()
        assert caught.value.rank == 2


def test_values_are_sent_in_half_precision_if_the_option_says_so(make: Make) -> None:
    groups = make(2, wire_dtype="bf16")
    tensors = [torch.full((1000,), 1 + 2**-12) for _ in groups]
    for work in [group.allreduce(tensor) for group, tensor in zip(groups, tensors, strict=True)]:
        work.wait()
    assert tensors[0].tolist() == tensors[1].tolist() == [2.0] * 1000


@pytest.mark.parametrize(
    "wrong",
    [
        lambda group: group.allgather([[torch.empty(3)] * 2], [torch.empty(4)]),
        lambda group: group.allgather([[torch.empty(3)]], [torch.empty(3)]),
        lambda group: group.all_gather_single(torch.empty(7), torch.empty(3)),
        lambda group: group.reduce_scatter_single(torch.empty(2), torch.empty(3)),
        lambda group: group.all_to_all_single(torch.empty(3), torch.empty(3), [], []),
        lambda group: group.all_to_all_single(torch.empty(3), torch.empty(3), [1, 1], [1, 2]),
        lambda group: group.allreduce([torch.empty(1), torch.empty(1, dtype=torch.int32)]),
    ],
)
def test_tensors_that_do_not_fit_are_refused_before_anything_is_sent(
    wrong: Callable[[RingProcessGroup], Any], make: Make
) -> None:
    groups = make(2)
    with pytest.raises(ValueError, match=r"fit|ranks|fill|times|split|dtype"):
        wrong(groups[0])
    for work in [group.allreduce(torch.ones(1)) for group in groups]:
        work.wait()  # the group can still be used


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_cuda_tensors_are_staged_through_host_memory(make: Make) -> None:
    groups = make(2)
    tensors = [torch.full((1000,), float(rank + 1), device="cuda") for rank in range(2)]
    futures = [group.allreduce(tensor).get_future() for group, tensor in zip(groups, tensors, strict=True)]
    assert [future.wait()[0].device.type for future in futures] == ["cuda", "cuda"]
    assert all(tensor.eq(3).all() for tensor in tensors)


def _gather(group: RingProcessGroup, rank: int, counts: tuple[int, int]) -> Any:
    outputs = [torch.empty(counts[0]) for _ in counts] if rank == 0 else []
    return group.gather([outputs] if rank == 0 else [], [torch.ones(counts[rank])])


def _scatter(group: RingProcessGroup, rank: int, counts: tuple[int, int]) -> Any:
    inputs = [[torch.ones(counts[0]) for _ in counts]] if rank == 0 else []
    return group.scatter([torch.empty(counts[rank])], inputs)


def _all_to_all(group: RingProcessGroup, rank: int, counts: tuple[int, int]) -> Any:
    outputs, inputs = [1, 1] if rank == 0 else [counts[1], 1], [1, counts[0]] if rank == 0 else [1, 1]
    return group.alltoall_base(torch.empty(sum(outputs)), torch.ones(sum(inputs)), outputs, inputs)


@pytest.mark.parametrize("counts", [(3, 0), (0, 3), (PART, 2 * PART), (2 * PART, PART)], ids=str)
@pytest.mark.parametrize("start", [_gather, _scatter, _all_to_all])
def test_other_numbers_of_values_on_the_other_rank_are_a_mismatch(
    make: Make, start: Callable[[RingProcessGroup, int, tuple[int, int]], Any], counts: tuple[int, int]
) -> None:
    """Neither rank may wait for frames that never come, or end with values that nobody takes.

    The first frames may be equally large.
    """
    works = [start(group, rank, counts) for rank, group in enumerate(make(2))]
    errors = []
    for work in works:
        try:
            work.wait(WAIT)
        except RingError as error:
            errors.append(type(error))
    assert set(errors) == {Mismatch}  # of one rank or both
