"""A wrong argument raises an error on the rank that passes it, and the group goes on working."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ring_groups import ring_groups, run
from torch import Tensor

from fedring.ring import NotSupported, RingError, RingProcessGroup

SIZE = 2
Wrong = Callable[[Any], Any]  # called with a group, with arguments that its types do not allow


@pytest.fixture(scope="module")
def groups() -> Iterator[list[RingProcessGroup]]:
    with ring_groups(SIZE) as made:
        yield made


def check_usable(groups: list[RingProcessGroup]) -> None:
    """Run a collective and exchange messages on all ranks."""
    tensors = [torch.full((3,), rank + 1.0) for rank in range(SIZE)]
    run(groups, lambda rank, group: group.allreduce([tensors[rank]]))
    assert [tensor.tolist() for tensor in tensors] == [[3.0] * 3] * SIZE
    sends = [group.send([torch.full((2,), float(rank))], 1 - rank, 7) for rank, group in enumerate(groups)]
    run(groups, lambda rank, group: group.recv([tensors[rank][:2]], 1 - rank, 7))
    assert [tensor[0].item() for tensor in tensors] == [1.0, 0.0]
    for send in sends:
        assert send.wait()


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


def root(kind: Any, number: int) -> Any:
    opts = kind()
    opts.rootRank = number
    return opts


def expanded() -> Tensor:
    return ones(1).expand(3)


def freed() -> Tensor:
    tensor = ones(4)[1:]
    tensor.untyped_storage().resize_(0)
    return tensor


RANKS: dict[str, Wrong] = {
    "broadcast from rank 99": lambda group: group.broadcast([ones(2)], root(dist.BroadcastOptions, 99)),
    "broadcast from rank -1": lambda group: group.broadcast([ones(2)], root(dist.BroadcastOptions, -1)),
    "broadcast from the number of ranks": lambda group: group.broadcast(ones(2), SIZE),
    "reduce to rank 99": lambda group: group.reduce([ones(2)], root(dist.ReduceOptions, 99)),
    "reduce to rank -2": lambda group: group.reduce(ones(2), -2, dist.ReduceOp.SUM),
    "gather to rank 99": lambda group: group.gather([[]], [ones(2)], root(dist.GatherOptions, 99)),
    "scatter from rank 99": lambda group: group.scatter([ones(2)], [], root(dist.ScatterOptions, 99)),
    "send to rank 99": lambda group: group.send([ones(2)], 99, 0),
    "send to rank -1": lambda group: group.send([ones(2)], -1, 0),
    "receive from rank 99": lambda group: group.recv([ones(2)], 99, 0),
    "receive from rank -1": lambda group: group.recv([ones(2)], -1, 0),
    "send with tag -1": lambda group: group.send([ones(2)], 1, -1),
    "send with a tag that no key has room for": lambda group: group.send([ones(2)], 1, 10**70),
    "receive with tag -1": lambda group: group.recv([ones(2)], 1, -1),
    "receive from any rank with tag -1": lambda group: group.recv_anysource([ones(2)], -1),
}
COUNTS: dict[str, Wrong] = {
    "all_reduce of nothing": lambda group: group.allreduce([]),
    "coalesced all_reduce of nothing": lambda group: group.allreduce_coalesced([]),
    "all_reduce of several dtypes": lambda group: group.allreduce([ones(1), ones(1, dtype=torch.int32)]),
    "all_reduce of a sparse tensor and another": lambda group: group.allreduce([ones(2).to_sparse(), ones(2)]),
    "broadcast of nothing": lambda group: group.broadcast([]),
    "reduce of nothing": lambda group: group.reduce([]),
    "send of nothing": lambda group: group.send([], 1, 0),
    "send of two tensors": lambda group: group.send([ones(1), ones(1)], 1, 0),
    "all_gather to nothing": lambda group: group.allgather([[]], [ones(2)]),
    "all_gather to no list": lambda group: group.allgather([], [ones(2)]),
    "all_gather to two lists": lambda group: group.allgather([[ones(2)] * 2] * 2, [ones(2)]),
    "all_gather to three tensors": lambda group: group.allgather([[ones(2)] * 3], [ones(2)]),
    "all_gather of another length": lambda group: group.allgather([[ones(3)] * 2], [ones(2)]),
    "all_gather of another dtype": lambda group: group.allgather([[ones(2), ones(2).int()]], [ones(2)]),
    "gather to one tensor of another length": lambda group: group.gather_single(ones(5), ones(2)),
    "gather to one tensor of another dtype": lambda group: group.gather_single(ones(4).int(), ones(2)),
    "all_gather to one tensor of another length": lambda group: group.all_gather_single(ones(5), ones(2)),
    "all_gather to one tensor of another dtype": lambda group: group.all_gather_single(ones(4).int(), ones(2)),
    "coalesced all_gather, the second wrong": lambda group: group.all_gather_single_coalesced(
        [ones(4), ones(5)], [ones(2), ones(2)]
    ),
    "coalesced all_gather of lists, the second wrong": lambda group: group.allgather_coalesced(
        [[ones(2), ones(2)], [ones(2), ones(3)]], [ones(2), ones(3)]
    ),
    "coalesced all_gather of fewer": lambda group: group.all_gather_single_coalesced([ones(4)], [ones(2), ones(2)]),
    "coalesced all_gather of nothing": lambda group: group.all_gather_single_coalesced([], []),
    "gather to one tensor": lambda group: group.gather([[ones(2)]], [ones(2)], root(dist.GatherOptions, 0)),
    "gather to nothing": lambda group: group.gather([], [ones(2)], root(dist.GatherOptions, 0)),
    "gather of another length": lambda group: group.gather(
        [[ones(2), ones(3)]], [ones(2)], root(dist.GatherOptions, 0)
    ),
    "gather of another dtype": lambda group: group.gather(
        [[ones(2), ones(2).int()]], [ones(2)], root(dist.GatherOptions, 0)
    ),
    "scatter of one tensor": lambda group: group.scatter([ones(2)], [[ones(2)]], root(dist.ScatterOptions, 0)),
    "scatter of another length": lambda group: group.scatter(
        [ones(2)], [[ones(2), ones(3)]], root(dist.ScatterOptions, 0)
    ),
    "reduce_scatter of one tensor": lambda group: group.reduce_scatter([ones(2)], [[ones(2)]]),
    "reduce_scatter of another length": lambda group: group.reduce_scatter([ones(2)], [[ones(3), ones(2)]]),
    "reduce_scatter of another dtype": lambda group: group.reduce_scatter([ones(2).int()], [[ones(2), ones(2)]]),
    "reduce_scatter of one tensor of another length": lambda group: group.reduce_scatter_single(ones(2), ones(3)),
    "coalesced reduce_scatter, the second wrong": lambda group: group.reduce_scatter_single_coalesced(
        [ones(2), ones(2)], [ones(4), ones(3)]
    ),
    "all_to_all of one tensor": lambda group: group.alltoall([ones(2)], [ones(2)]),
    "all_to_all of nothing": lambda group: group.alltoall([], []),
    "all_to_all of two dtypes": lambda group: group.alltoall([ones(2), ones(2).int()], [ones(2), ones(2)]),
    "all_to_all of another own length": lambda group: group.alltoall([ones(1), ones(2)], [ones(2), ones(2)]),
    "all_to_all of negative sizes": lambda group: group.all_to_all_single(ones(2), ones(2), [3, -1], [1, 1]),
    "all_to_all of other sizes": lambda group: group.all_to_all_single(ones(2), ones(2), [1, 1], [2, 2]),
    "all_to_all of three sizes": lambda group: group.all_to_all_single(ones(2), ones(2), [1, 1, 0], []),
    "all_to_all of three rows": lambda group: group.all_to_all_single(ones(3), ones(3), [], []),
    "all_reduce of an expanded tensor": lambda group: group.allreduce([expanded()]),
    "all_gather to an expanded tensor": lambda group: group.allgather([[expanded(), ones(3)]], [ones(3)]),
    "reduce_scatter to an expanded tensor": lambda group: group.reduce_scatter_single(expanded(), ones(6)),
    "receive to an expanded tensor": lambda group: group.recv([expanded()], 1, 0),
    "receive from any rank to an expanded tensor": lambda group: group.recv_anysource([expanded()], 0),
    "too long a message of bytes": lambda group: group.allgather_bytes(b"four", limit=3),
}
TYPES: dict[str, Wrong] = {
    "all_reduce of numbers": lambda group: group.allreduce([1, 2]),
    "all_reduce of None": lambda group: group.allreduce(None),
    "broadcast from a name": lambda group: group.broadcast(ones(2), "first"),
    "broadcast from half a rank": lambda group: group.broadcast(ones(2), 0.5),
    "send to a name": lambda group: group.send([ones(2)], "first", 0),
    "send of a number": lambda group: group.send([3], 1, 0),
    "send with a name as its tag": lambda group: group.send([ones(2)], 1, "tag"),
    "all_gather of a number": lambda group: group.allgather([[ones(2), ones(2)]], [3]),
    "all_gather to numbers": lambda group: group.allgather([[ones(2), 3]], [ones(2)]),
    "all_gather of a number to one tensor": lambda group: group.all_gather_single(ones(2), 3),
    "reduce_scatter of numbers": lambda group: group.reduce_scatter([ones(1)], [[1, 2]]),
    "all_to_all of None": lambda group: group.alltoall([ones(1), ones(1)], None),
    "a number as the timeout": lambda group: group.allreduce([ones(2)], timeout=5),
    "a text instead of bytes": lambda group: group.allgather_bytes("text"),
}
REFUSED: dict[str, Wrong] = {
    "a meta tensor": lambda group: group.allreduce([ones(2).to("meta")]),
    "a tensor whose memory was freed": lambda group: group.allreduce([freed()]),
    "a quantized tensor": lambda group: group.allreduce([torch.quantize_per_tensor(ones(2), 0.1, 0, torch.qint8)]),
    "a sparse tensor": lambda group: group.broadcast([ones(2).to_sparse()]),
    "a compressed sparse tensor": lambda group: group.allreduce([torch.eye(2).to_sparse_csr()]),
    "a sparse tensor to send": lambda group: group.send([ones(2).to_sparse()], 1, 0),
    "sparse inputs": lambda group: group.alltoall([ones(2), ones(2)], [ones(2).to_sparse()] * 2),
}
CASES = [
    *((name, ValueError, wrong) for name, wrong in (RANKS | COUNTS).items()),
    *((name, TypeError, wrong) for name, wrong in TYPES.items()),
    *((name, NotSupported, wrong) for name, wrong in REFUSED.items()),
]


@pytest.mark.filterwarnings("ignore:.*(quantize_per_tensor|Sparse CSR|torch.ao.quantization)")
@pytest.mark.parametrize(("error", "wrong"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_wrong_argument_is_refused_and_the_group_goes_on(
    error: type[Exception], wrong: Wrong, groups: list[RingProcessGroup]
) -> None:
    with pytest.raises(error) as caught:
        wrong(groups[0])
    assert not isinstance(caught.value, RingError)
    check_usable(groups)


def test_tensors_of_classes_that_hide_their_values_are_refused(groups: list[RingProcessGroup]) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(2)
    with pytest.raises(NotSupported, match="FakeTensor"):
        groups[0].allreduce([fake])
    check_usable(groups)


def test_parameters_and_views_of_every_kind_are_reduced_in_place(groups: list[RingProcessGroup]) -> None:
    def make(rank: int) -> list[Tensor]:
        base = torch.full((4, 6), rank + 1.0)
        with torch.inference_mode():
            made_in_inference = torch.full((2, 3), rank + 1.0)
        leaf = torch.full((2,), rank + 1.0, requires_grad=True)
        return [base[1], base[:, 2].unsqueeze(1), base[2:, 3:].t(), made_in_inference.t(), leaf, leaf * 1]

    each = [make(rank) for rank in range(SIZE)]
    for place in (0, 1, 2, 3, 4, 5):
        run(groups, lambda rank, group, place=place: group.allreduce([each[rank][place]]))  # type: ignore[misc]
    for tensors in each:
        row, column, corner, *others = (tensor.detach() for tensor in tensors)
        assert row.tolist() == [3.0, 3.0, 6.0, 3.0, 3.0, 3.0]  # the column has added row[2] again
        assert column.flatten().tolist() == [3.0, 6.0, 3.0, 3.0]
        assert all(torch.equal(tensor, torch.full_like(tensor, 3.0)) for tensor in (corner, *others))


def test_what_is_sent_may_lie_where_the_result_goes(groups: list[RingProcessGroup]) -> None:
    """Each rank exchanges the halves of one tensor in place, directly and in parts, and by each collective."""
    for count in (4, 700_000):
        whole = [torch.arange(2 * count, dtype=torch.float64) + rank * 4 * count for rank in range(SIZE)]
        kept = [tensor.clone() for tensor in whole]
        halves = [list(torch.split(tensor, count)) for tensor in kept]
        run(groups, lambda rank, group, whole=whole: group.all_to_all_single(whole[rank], whole[rank], [], []))  # type: ignore[misc]
        for rank in range(SIZE):
            assert torch.equal(whole[rank], torch.cat([halves[source][rank] for source in range(SIZE)]))
        whole = [tensor.clone() for tensor in kept]
        parts = [list(torch.split(tensor, count)) for tensor in whole]

        def gather(rank: int, group: RingProcessGroup, parts: Any = parts) -> Any:
            outputs = [parts[1]] if rank == 1 else []
            return group.gather(outputs, [parts[rank][0]], root(dist.GatherOptions, 1))

        run(groups, gather)
        assert torch.equal(whole[1], torch.cat([halves[0][0], halves[1][0]]))
        whole = [tensor.clone() for tensor in kept]
        parts = [list(torch.split(tensor, count)) for tensor in whole]

        def scatter(rank: int, group: RingProcessGroup, parts: Any = parts) -> Any:
            return group.scatter([parts[rank][1]], [parts[0]] if rank == 0 else [], root(dist.ScatterOptions, 0))

        run(groups, scatter)
        assert torch.equal(parts[0][1], halves[0][0])
        assert torch.equal(parts[1][1], halves[0][1])


def test_a_group_that_was_left_refuses_everything_and_ends_what_still_runs(groups: list[RingProcessGroup]) -> None:
    subgroups = []
    for group in groups:
        world = group.world
        subgroup = RingProcessGroup(
            world, group.get_group_store(), range(SIZE), name="sub", timeout=timedelta(seconds=60)
        )
        subgroups.append(subgroup)
    run(subgroups, lambda rank, group: group.barrier())
    first = subgroups[0]
    waits = first.recv([ones(2)], 1, 0)
    first.shutdown()
    with pytest.raises(RingError, match="has left the group 'sub'"):
        waits.wait()
    calls: list[Wrong] = [
        lambda group: group.allreduce([ones(2)]),
        lambda group: group.send([ones(2)], 1, 0),
        lambda group: group.recv([ones(2)], 1, 0),
        lambda group: group.recv_anysource([ones(2)], 0).wait(),
        lambda group: group.barrier(),
        lambda group: group.monitored_barrier(),
        lambda group: group.allgather_bytes(b""),
    ]
    for call in calls:
        with pytest.raises(RingError, match="has left the group 'sub'"):
            call(first)
    subgroups[1].shutdown()
    check_usable(groups)
