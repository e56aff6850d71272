"""Every reduction of every dtype by every collective that reduces: right, or refused before anything starts."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ring_groups import ring_groups, run
from torch import Tensor

from fedring.ring import NotSupported, RingProcessGroup
from fedring.ring.engine import collectives

SIZE = 3
COUNT = 5  # values of one rank's part
Op = dist.ReduceOp
Wanted = Callable[[Tensor], Tensor]

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
COMPLEX = (torch.complex64, torch.complex128)
OTHERS = (torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2)
OPS: dict[Any, Wanted] = {
    Op.SUM: lambda all_: all_.sum(0),
    Op.AVG: lambda all_: all_.sum(0).div(SIZE, rounding_mode=None if can_be_fraction(all_.dtype) else "trunc"),
    Op.PRODUCT: lambda all_: all_.prod(0),
    Op.MIN: lambda all_: all_.amin(0),
    Op.MAX: lambda all_: all_.amax(0),
    Op.BAND: lambda all_: all_[0] & all_[1] & all_[2],
    Op.BOR: lambda all_: all_[0] | all_[1] | all_[2],
    Op.BXOR: lambda all_: all_[0] ^ all_[1] ^ all_[2],
}
BITS = (Op.BAND, Op.BOR, Op.BXOR)


def can_be_fraction(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def exists(op: Any, dtype: torch.dtype) -> bool:
    """Return whether the ring has the reduction."""
    if dtype in OTHERS:
        return False
    if dtype == torch.bool:
        return bool(op != Op.AVG)
    if dtype in COMPLEX:
        return op in (Op.SUM, Op.AVG, Op.PRODUCT)
    return op not in BITS or not dtype.is_floating_point


def values(rank: int, dtype: torch.dtype, count: int) -> Tensor:
    """Return a rank's values: small whole numbers, with which every dtype computes exactly, and some negative."""
    generator = torch.Generator().manual_seed(rank)
    low = -4 if dtype.is_signed and dtype != torch.bool else 0
    real = torch.randint(low, 5, (count,), generator=generator)
    if dtype.is_complex:
        return torch.complex(real.double(), real.flip(0).double()).to(dtype)
    return real.to(dtype)


def wanted(op: Any, dtype: torch.dtype, count: int) -> Tensor:
    return OPS[op](torch.stack([values(rank, dtype, count) for rank in range(SIZE)])).to(dtype)


def check_equal(tensor: Tensor, wanted: Tensor) -> None:
    """Compare exactly; only a third of something is rounded differently."""
    torch.testing.assert_close(tensor, wanted)


@pytest.fixture(scope="module")
def groups() -> Iterator[list[RingProcessGroup]]:
    with ring_groups(SIZE) as made:
        yield made


def options(kind: Any, op: Any) -> Any:
    opts = kind()
    opts.reduceOp = op
    return opts


def all_reduce(groups: list[RingProcessGroup], op: Any, dtype: torch.dtype, count: int) -> None:
    tensors = [values(rank, dtype, count) for rank in range(SIZE)]
    run(groups, lambda rank, group: group.allreduce([tensors[rank]], options(dist.AllreduceOptions, op)))
    for tensor in tensors:
        check_equal(tensor, wanted(op, dtype, count))


def all_reduce_coalesced(groups: list[RingProcessGroup], op: Any, dtype: torch.dtype, count: int) -> None:
    tensors = [[values(rank, dtype, count), values(rank, dtype, 2)] for rank in range(SIZE)]
    opts = options(dist.AllreduceCoalescedOptions, op)
    run(groups, lambda rank, group: group.allreduce_coalesced(tensors[rank], opts))
    for first, second in tensors:
        check_equal(first, wanted(op, dtype, count))
        check_equal(second, wanted(op, dtype, 2))


def reduce(groups: list[RingProcessGroup], op: Any, dtype: torch.dtype, count: int) -> None:
    tensors = [values(rank, dtype, count) for rank in range(SIZE)]
    opts = options(dist.ReduceOptions, op)
    opts.rootRank = 1
    run(groups, lambda rank, group: group.reduce([tensors[rank]], opts))
    check_equal(tensors[1], wanted(op, dtype, count))
    assert torch.equal(tensors[2], values(2, dtype, count))


def reduce_scatter(groups: list[RingProcessGroup], op: Any, dtype: torch.dtype, count: int) -> None:
    outputs = [torch.empty(count, dtype=dtype) for _ in range(SIZE)]
    opts = options(dist.ReduceScatterOptions, op)

    def start(rank: int, group: RingProcessGroup) -> Any:
        return group.reduce_scatter(
            [outputs[rank]], [list(torch.split(values(rank, dtype, SIZE * count), count))], opts
        )

    run(groups, start)
    check_equal(torch.cat(outputs), wanted(op, dtype, SIZE * count))


def reduce_scatter_single(groups: list[RingProcessGroup], op: Any, dtype: torch.dtype, count: int) -> None:
    outputs = [torch.empty(count, dtype=dtype) for _ in range(SIZE)]
    opts = options(dist.ReduceScatterOptions, op)
    run(groups, lambda rank, group: group.reduce_scatter_single(outputs[rank], values(rank, dtype, SIZE * count), opts))
    check_equal(torch.cat(outputs), wanted(op, dtype, SIZE * count))


def reduce_scatter_coalesced(groups: list[RingProcessGroup], op: Any, dtype: torch.dtype, count: int) -> None:
    outputs = [[torch.empty(count, dtype=dtype), torch.empty(1, dtype=dtype)] for _ in range(SIZE)]
    opts = options(dist.ReduceScatterOptions, op)

    def start(rank: int, group: RingProcessGroup) -> Any:
        inputs = [values(rank, dtype, SIZE * count), values(rank, dtype, SIZE)]
        return group.reduce_scatter_single_coalesced(outputs[rank], inputs, opts)

    run(groups, start)
    for place, length in enumerate((count, 1)):
        check_equal(torch.cat([output[place] for output in outputs]), wanted(op, dtype, SIZE * length))


COLLECTIVES = [
    all_reduce,
    all_reduce_coalesced,
    reduce,
    reduce_scatter,
    reduce_scatter_single,
    reduce_scatter_coalesced,
]


@pytest.mark.parametrize("collective", COLLECTIVES, ids=lambda one: one.__name__)
def test_every_reduction_of_every_dtype_is_right_or_refused(
    collective: Callable[..., None], groups: list[RingProcessGroup]
) -> None:
    for op, dtype in product(OPS, (*FLOATS, *INTEGERS, *COMPLEX, torch.bool, *OTHERS)):
        if exists(op, dtype):
            collective(groups, op, dtype, COUNT)
            continue
        with pytest.raises(NotSupported, match=r"^(there is no \w+ of|the ring has no reductions of) torch"):
            collective(groups, op, dtype, COUNT)
    all_reduce(groups, Op.SUM, torch.float32, COUNT)  # after all the refusals


@pytest.mark.parametrize(
    ("op", "dtype"), [(Op.PRODUCT, torch.complex64), (Op.AVG, torch.int64), (Op.SUM, torch.complex128)], ids=str
)
def test_reductions_around_the_ring_are_right_too(op: Any, dtype: torch.dtype, groups: list[RingProcessGroup]) -> None:
    count = 100_001
    assert not collectives.is_direct(SIZE, count * dtype.itemsize)
    all_reduce(groups, op, dtype, count)


def test_a_mean_of_integers_is_rounded_towards_zero(groups: list[RingProcessGroup]) -> None:
    for dtype, (low, mean_of_low, high) in {
        torch.int8: (-5, -5, 5),
        torch.int64: (-(2**40), -(2**40), 2**40),
        torch.uint8: (7, 7, 80),
    }.items():
        tensors = [torch.tensor([low, high + rank, low if rank else low + 1], dtype=dtype) for rank in range(SIZE)]
        run(groups, lambda rank, group, tensors=tensors: group.allreduce([tensors[rank]], Op.AVG))  # type: ignore[misc]
        exact = (3 * low + 1) / 3
        assert tensors[0].tolist() == [mean_of_low, high + 1, int(exact)]


def test_a_premultiplied_sum_is_refused(groups: list[RingProcessGroup]) -> None:
    with pytest.raises(NotSupported, match="premul_sum"):
        groups[0].allreduce([torch.ones(2)], dist._make_nccl_premul_sum(2.0))  # type: ignore[attr-defined]


@pytest.mark.parametrize("wrong", ["max", 3, object()])
def test_what_is_no_reduction_is_refused(wrong: Any, groups: list[RingProcessGroup]) -> None:
    with pytest.raises(TypeError, match="ReduceOp"):
        groups[0].allreduce([torch.ones(2)], wrong)


def test_conjugated_and_negated_views_are_reduced_by_their_values(groups: list[RingProcessGroup]) -> None:
    bases = [values(rank, torch.complex64, COUNT) for rank in range(SIZE)]
    conjugates = [base.conj() for base in bases]
    assert all(view.is_conj() for view in conjugates)
    run(groups, lambda rank, group: group.allreduce([conjugates[rank]]))
    check_equal(conjugates[0].resolve_conj(), wanted(Op.SUM, torch.complex64, COUNT).conj().resolve_conj())
    check_equal(bases[1], wanted(Op.SUM, torch.complex64, COUNT))
    negated = [values(rank, torch.complex64, COUNT).conj().imag for rank in range(SIZE)]
    assert all(view.is_neg() for view in negated)
    run(groups, lambda rank, group: group.allreduce([negated[rank]]))
    check_equal(negated[2].resolve_neg(), -wanted(Op.SUM, torch.complex64, COUNT).imag)
