"""The memory of users' tensors belongs to the ring only while an operation runs."""

import gc
import struct
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from tests.ring_endpoints import world
from tests.ring_groups import WAIT, ring_groups, run
from tests.waiting import until
from torch import Tensor

from fedring.ring import PeerLost, RingError, RingProcessGroup
from fedring.ring.engine import collectives
from fedring.ring.errors import BadFrame
from fedring.ring.torch import tensors as tensors_module
from fedring.ring.torch.tensors import SparseSum, as_bytes
from fedring.ring.transport.interface import Outgoing
from fedring.v1 import peer_pb2 as pb

SIZE = 2
Start = Callable[[RingProcessGroup, int, list[Tensor]], Any]

# What each collective does with tensors of n, n, 2 n and 2 n values on each rank.
COLLECTIVES: dict[str, Start] = {
    "all_reduce": lambda group, rank, t: group.allreduce([t[0]]),
    "all_reduce of several": lambda group, rank, t: group.allreduce_coalesced(t),
    "reduce": lambda group, rank, t: group.reduce([t[0]]),
    "broadcast": lambda group, rank, t: group.broadcast([t[0]]),
    "all_gather": lambda group, rank, t: group.allgather([list(torch.split(t[2], len(t[0])))], [t[0]]),
    "all_gather to one tensor": lambda group, rank, t: group.all_gather_single(t[2], t[0]),
    "coalesced all_gather": lambda group, rank, t: group.all_gather_single_coalesced(t[2:], t[:2]),
    "gather": lambda group, rank, t: group.gather([] if rank else [list(torch.split(t[2], len(t[0])))], [t[0]]),
    "gather to one tensor": lambda group, rank, t: group.gather_single(t[2] if rank == 0 else torch.empty(0), t[0]),
    "scatter": lambda group, rank, t: group.scatter([t[0]], [] if rank else [list(torch.split(t[2], len(t[0])))]),
    "reduce_scatter": lambda group, rank, t: group.reduce_scatter([t[0]], [list(torch.split(t[2], len(t[0])))]),
    "reduce_scatter of one tensor": lambda group, rank, t: group.reduce_scatter_single(t[0], t[2]),
    "coalesced reduce_scatter": lambda group, rank, t: group.reduce_scatter_single_coalesced(t[:2], t[2:]),
    "all_to_all": lambda group, rank, t: group.alltoall(
        list(torch.split(t[2], len(t[0]))), list(torch.split(t[3], len(t[0])))
    ),
    "all_to_all of one tensor": lambda group, rank, t: group.all_to_all_single(t[2], t[3], [], []),
    "send": lambda group, rank, t: group.recv([t[1]], 0, 0) if rank else group.send([t[0]], 1, 0),
    "receive from any rank": lambda group, rank, t: (
        group.recv_anysource([t[1]], 0) if rank else group.send([t[0]], 1, 0)
    ),
}


@pytest.fixture(scope="module")
def groups() -> Iterator[list[RingProcessGroup]]:
    with ring_groups(SIZE) as made:
        yield made


def tensors(count: int) -> list[Tensor]:
    return [torch.ones(size) for size in (count, count, 2 * count, 2 * count)]


class Lent(tensors_module._Memory):
    """Memory that a tensor lends to the ring, counted as long as anybody refers to it."""

    all: ClassVar[weakref.WeakSet["Lent"]] = weakref.WeakSet()

    def __init__(self, flat: Tensor) -> None:
        super().__init__(flat)
        self.all.add(self)


@pytest.fixture(autouse=True)
def _count_what_is_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors_module, "_Memory", Lent)


def check_ours(each: list[Tensor]) -> None:
    """Check that nobody else uses the memory of the tensors, and resize it."""
    until(lambda: len(Lent.all) == 0)  # a thread may still be about to return
    for tensor in each:
        size = tensor.untyped_storage().nbytes()
        tensor.untyped_storage().resize_(0)
        tensor.untyped_storage().resize_(2 * size)
        tensor.fill_(1.0)


@pytest.mark.parametrize("count", [100, 300_000], ids=["small", "large"])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_tensors_can_be_resized_after_every_collective(name: str, count: int, groups: list[RingProcessGroup]) -> None:
    each = [tensors(count) for _ in range(SIZE)]
    run(groups, lambda rank, group: COLLECTIVES[name](group, rank, each[rank]))
    run(groups, lambda rank, group: group.barrier())  # a rank may have sent its part before the other one waits
    for rank in range(SIZE):
        check_ours(each[rank])


@pytest.mark.parametrize("local_transport", [True, False])
@pytest.mark.parametrize(
    "name", ["all_reduce", "all_gather to one tensor", "all_to_all", "send", "coalesced all_gather"]
)
def test_tensors_can_be_resized_after_an_operation_that_failed(name: str, local_transport: bool) -> None:
    """Only one rank starts; then the other one leaves."""
    with ring_groups(SIZE, local_transport=local_transport) as groups:
        rank = 1 if name == "send" else 0
        mine = tensors(300_000)
        work = COLLECTIVES[name](groups[rank], rank, mine)
        assert Lent.all
        groups[1 - rank].abort()
        with pytest.raises((PeerLost, RingError)):
            work.wait()
        check_ours(mine)
        with pytest.raises(RingError):
            COLLECTIVES[name](groups[rank], rank, mine).wait()
        check_ours(mine)


def test_after_a_failure_a_link_that_is_new_reads_no_tensors() -> None:
    with world(4) as ring:
        first, peer = ring.endpoints[0], ring.members[2]
        assert peer not in first.links
        first.fail(RingError("stop"))
        copied = threading.Event()
        first.send(peer, Outgoing(pb.Head(kind=pb.FRAME_KIND_DATA), as_bytes(torch.ones(3)), copied.set))
        first.close()  # sends all that is still to be sent
        assert not copied.is_set()


def test_bytes_are_the_tensors_own_memory_and_keep_it() -> None:
    tensor = torch.arange(3, dtype=torch.int16)
    data = as_bytes(tensor)
    assert (data.format, data.readonly, bytes(data)) == ("B", False, b"\0\0\1\0\2\0")
    data[0] = 7
    assert tensor.tolist() == [7, 1, 2]
    del tensor
    gc.collect()
    assert bytes(data) == b"\7\0\1\0\2\0"
    assert len(as_bytes(torch.empty(0))) == 0


@pytest.mark.parametrize("index", [4, -1, 1 << 62, -(1 << 63)])
def test_entries_outside_of_a_sparse_tensor_end_the_generation(index: int) -> None:
    with ring_groups(2) as groups:
        tensor = torch.tensor([1.0, 0, 0, 0]).to_sparse()
        theirs = SparseSum(tensor.clone(), "sum", rank=1, size=2)
        theirs.messages[1] = memoryview(struct.pack("<qf", index, 1.0))
        program = collectives.allgather_bytes(1, 2, theirs.messages, theirs.limit)
        groups[1].ring.start(theirs.what, program, timeout=60)
        work = groups[0].allreduce([tensor])
        for _ in range(2):  # whoever asks again is told again
            with pytest.raises(BadFrame, match="rank 1 sent entries outside of the tensor") as raised:
                work.wait(WAIT)
            assert raised.value.rank == 1
        assert isinstance(groups[0].world.endpoint.failure, BadFrame)
        assert tensor.to_dense().tolist() == [1, 0, 0, 0]
