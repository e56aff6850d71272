"""Every collective of torch.distributed, compared with what this rank computes by itself."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fedring.ring import RingOptions, traffic

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
)


def make(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a rank's tensor: small whole numbers, which every dtype adds exactly, different on each rank.

    It is on the default device.
    """
    generator = torch.Generator().manual_seed(rank + 1)
    return torch.randint(0, 4, shape, generator=generator, device="cpu").to(torch.get_default_device(), dtype)


def all_of(size: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the tensors of all ranks, stacked."""
    return torch.stack([make(rank, *shape, dtype=dtype) for rank in range(size)])


def check_equal(tensor: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(tensor, wanted.to(tensor.device, tensor.dtype), rtol=0, atol=0)


def started(work: dist.Work | None) -> dist.Work:
    """Return the work that torch hands out to members of a group, and None to others."""
    assert work is not None
    return work


def all_reduce_of_every_dtype(rank: int, size: int) -> None:
    for dtype in DTYPES:
        for shape in ((), (1,), (7,), (3, 5), (300_001,)):
            tensor = make(rank, *shape, dtype=dtype)
            dist.all_reduce(tensor)
            check_equal(tensor, all_of(size, *shape, dtype=dtype).sum(0))
    flags = torch.tensor([rank == 0, False, True])
    dist.all_reduce(flags)
    assert flags.tolist() == [True, False, True]


def all_reduce_of_every_kind(rank: int, size: int) -> None:
    kinds: dict[Any, Callable[[Tensor], Tensor]] = {
        dist.ReduceOp.AVG: lambda all_: all_.sum(0) / size,
        dist.ReduceOp.PRODUCT: lambda all_: all_.prod(0),
        dist.ReduceOp.MIN: lambda all_: all_.amin(0),
        dist.ReduceOp.MAX: lambda all_: all_.amax(0),
    }
    for kind, wanted in kinds.items():
        for count in (5, 200_000):
            tensor = make(rank, count)
            work = started(dist.all_reduce(tensor, kind, async_op=True))
            assert work.wait()
            assert work.is_success()
            check_equal(tensor, wanted(all_of(size, count).cpu()))  # as the ring computes: a GPU divides otherwise
    bits = {dist.ReduceOp.BAND: torch.bitwise_and, dist.ReduceOp.BOR: torch.bitwise_or}
    for kind, combine in (bits | {dist.ReduceOp.BXOR: torch.bitwise_xor}).items():
        tensor = make(rank, 9, dtype=torch.int32)
        dist.all_reduce(tensor, kind)
        result, *others = all_of(size, 9, dtype=torch.int32)
        for other in others:
            result = combine(result, other)
        check_equal(tensor, result)


def all_reduce_of_tensors_of_every_layout(rank: int, size: int) -> None:
    base = torch.zeros(6, 8)
    view = base[::2, 1:7:3]  # neither contiguous nor whole
    view.copy_(make(rank, 3, 2))
    dist.all_reduce(view)
    check_equal(view, all_of(size, 3, 2).sum(0))
    assert base.count_nonzero() <= 6
    empty = torch.empty(0, 3)
    dist.all_reduce(empty)
    dist.broadcast(empty, 0)
    complex_ = torch.complex(make(rank, 4), make(rank + 10, 4))
    dist.all_reduce(complex_)
    check_equal(complex_.real, all_of(size, 4).sum(0))
    weight = torch.nn.Parameter(make(rank, 4))
    dist.all_reduce(weight)
    check_equal(weight.detach(), all_of(size, 4).sum(0))
    several = [make(rank, 3), make(rank, 2, 2), make(rank)]
    dist.all_reduce_coalesced(several)
    for tensor in several:
        check_equal(tensor, all_of(size, *tensor.shape).sum(0))


def all_reduce_of_sparse_tensors(rank: int, size: int) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
        for rows in (size + 1, 100_000):  # directly, and around the ring
            tensor = _sparse(rank, rows, dtype)
            wanted = torch.stack([_sparse(other, rows, dtype).to_dense() for other in range(size)]).sum(0)
            dist.all_reduce(tensor)
            assert tensor.is_coalesced()
            check_equal(tensor.to_dense(), wanted)
    some = torch.full((5,), float(rank == 0)).to_sparse()  # only one rank has any
    work = started(dist.all_reduce(some, async_op=True))
    assert work.wait()
    check_equal(some.to_dense(), torch.ones(5))


def _sparse(rank: int, rows: int, dtype: torch.dtype) -> Tensor:
    """Return a rank's tensor [rows, 3, 3] with one dense dimension, one of whose entries is given in two parts."""
    places = torch.tensor([[0, rank, rank + 1, rank], [0, 1, 2, 1]])
    return torch.sparse_coo_tensor(places, make(rank, 4, 3, dtype=dtype), (rows, 3, 3), check_invariants=True)


def half_precision_on_the_wire(rank: int, size: int) -> None:
    for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        group: Any = dist.new_group(pg_options=RingOptions.model_validate({"wire_dtype": name}))
        for count in (100, 400_000):
            before = traffic().sent_bytes
            tensor = make(rank, count) + 0.001
            dist.all_reduce(tensor, group=group)
            torch.testing.assert_close(tensor, all_of(size, count).sum(0) + 0.001 * size, rtol=2e-2, atol=1e-2)
            check_equal(tensor.to(dtype).float(), tensor)  # all ranks hold what half precision can carry
            copies = [torch.empty_like(tensor) for _ in range(size)]
            if count > 1000:  # 2 (n - 1) / n halves, and headers
                assert traffic().sent_bytes - before <= 2 * (size - 1) / size * 2 * count + 4000
            dist.all_gather(copies, tensor)
            for copy in copies:
                check_equal(copy, tensor)
        dist.destroy_process_group(group)


def broadcast_from_every_rank(rank: int, size: int) -> None:
    for root in range(size):
        for tensor in (make(rank, 5), make(rank, 300_000), make(rank, 4, 6).t(), torch.tensor(rank == root)):
            wanted = make(root, *tensor.shape) if tensor.dim() == 1 else None
            dist.broadcast(tensor, root)
            if wanted is not None:
                check_equal(tensor, wanted)
            elif tensor.dim():
                check_equal(tensor, make(root, 4, 6).t())
            else:
                assert tensor.item() is True


def reduce_to_every_rank(rank: int, size: int) -> None:
    for root in range(size):
        for count in (3, 250_000):
            tensor = make(rank, count)
            dist.reduce(tensor, root, dist.ReduceOp.MAX)
            check_equal(tensor, all_of(size, count).amax(0) if rank == root else make(rank, count))


def all_gather_in_all_its_forms(rank: int, size: int) -> None:
    for shape in ((), (4,), (2, 3), (200_000,)):
        outputs = [torch.full(shape, -1.0) for _ in range(size)]
        dist.all_gather(outputs, make(rank, *shape))
        check_equal(torch.stack(outputs), all_of(size, *shape))
    uneven = [torch.empty(other + 1) for other in range(size)]
    dist.all_gather(uneven, make(rank, rank + 1))
    for other, tensor in enumerate(uneven):
        check_equal(tensor, make(other, other + 1))
    whole = torch.empty(size * 3, 2)
    dist.all_gather_into_tensor(whole, make(rank, 3, 2))
    check_equal(whole, all_of(size, 3, 2).flatten(0, 1))
    stacked = torch.empty(size, 5, dtype=torch.bool)
    dist.all_gather_into_tensor(stacked, torch.arange(5) == rank)
    check_equal(stacked, torch.arange(5) == torch.arange(size)[:, None])
    lists = [[torch.empty(2), torch.empty(3)] for _ in range(size)]
    dist.all_gather_coalesced(lists, [make(rank, 2), make(rank, 3)])
    for other, (two, three) in enumerate(lists):
        check_equal(two, make(other, 2))
        check_equal(three, make(other, 3))


def gather_and_scatter_at_every_rank(rank: int, size: int) -> None:
    for root in range(size):
        into = [torch.empty(3, 2) for _ in range(size)] if rank == root else None
        dist.gather(make(rank, 3, 2), into, dst=root)
        if into is not None:
            check_equal(torch.stack(into), all_of(size, 3, 2))
        mine = torch.empty(4)
        dist.scatter(mine, list(all_of(size, 4)) if rank == root else None, src=root)
        check_equal(mine, make(rank, 4))


def reduce_scatter_in_all_its_forms(rank: int, size: int) -> None:
    for count in (3, 150_000):
        each = [make(rank * size + other, count) for other in range(size)]
        wanted = torch.stack([make(other * size + rank, count) for other in range(size)]).sum(0)
        output = torch.empty(count)
        dist.reduce_scatter(output, each)
        check_equal(output, wanted)
        whole = torch.cat(each)
        kept = whole.clone()
        output = torch.empty(count)
        dist.reduce_scatter_tensor(output, whole, dist.ReduceOp.AVG)
        torch.testing.assert_close(output, wanted / size)
        check_equal(whole, kept)
    uneven = [make(rank, other + 1) for other in range(size)]
    output = torch.empty(rank + 1)
    dist.reduce_scatter(output, uneven)
    check_equal(output, torch.stack([make(other, rank + 1) for other in range(size)]).sum(0))


def all_to_all_in_all_its_forms(rank: int, size: int) -> None:
    mine = [make(rank * size + to, 2, to + 1) for to in range(size)]
    into = [torch.empty(2, rank + 1) for _ in range(size)]
    dist.all_to_all(into, mine)
    for source, tensor in enumerate(into):
        check_equal(tensor, make(source * size + rank, 2, rank + 1))
    output = torch.empty(size * 2, 3)
    dist.all_to_all_single(output, make(rank, size * 2, 3))
    for source in range(size):
        check_equal(output[source * 2 : source * 2 + 2], make(source, size * 2, 3)[rank * 2 : rank * 2 + 2])
    sent, received = list(range(1, size + 1)), [rank + 1] * size  # rank r gives r' + 1 rows to rank r'
    output = torch.empty(sum(received), 2)
    dist.all_to_all_single(output, make(rank, sum(sent), 2), received, sent)
    begin = sum(sent[:rank])
    for source, part in enumerate(torch.split(output, received)):
        check_equal(part, make(source, sum(sent), 2)[begin : begin + rank + 1])


def coalesced_blocks(rank: int, size: int) -> None:
    from torch.distributed.distributed_c10d import _coalescing_manager

    tensors = [make(rank, 4), make(rank, 5)]
    with _coalescing_manager(async_ops=True) as block:
        for tensor in tensors:
            dist.all_reduce(tensor)
    block.wait()
    outputs = [torch.empty(size * 4), torch.empty(size * 5)]
    with _coalescing_manager():
        for output, count in zip(outputs, (4, 5), strict=True):
            dist.all_gather_into_tensor(output, make(rank, count))
    with _coalescing_manager(device=torch.device("cpu")):
        dist.broadcast(extra := make(rank, 3), 0)
    for tensor, output in zip(tensors, outputs, strict=True):
        check_equal(tensor, all_of(size, *tensor.shape).sum(0))
        check_equal(output, all_of(size, *tensor.shape).flatten())
    check_equal(extra, make(0, 3))


def objects(rank: int, size: int) -> None:
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, {"rank": rank, "text": "x" * rank * 1000})
    assert everyone == [{"rank": other, "text": "x" * other * 1000} for other in range(size)]
    gathered: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(("r", rank), gathered, dst=0)
    assert gathered is None or gathered == [("r", other) for other in range(size)]
    box: list[Any] = [rank, {rank}]
    dist.broadcast_object_list(box, src=size - 1)
    assert box == [size - 1, {size - 1}]
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [f"for {other}" for other in range(size)] if rank == 0 else None, src=0)
    assert mine == [f"for {rank}"]
    if size > 1 and rank < 2:
        sent: list[Any] = ["ping", 1] if rank == 0 else [None, None]
        (dist.send_object_list if rank == 0 else dist.recv_object_list)(sent, 1 - rank)
        assert sent == ["ping", 1]


def barriers(rank: int, size: int) -> None:
    dist.barrier()
    started(dist.barrier(async_op=True)).wait(timedelta(seconds=60))
    dist.group.WORLD.monitored_barrier()  # type: ignore[union-attr]
    dist.group.WORLD.monitored_barrier(timedelta(seconds=60), wait_all_ranks=True)  # type: ignore[union-attr]


CHECKS = [
    all_reduce_of_every_dtype,
    all_reduce_of_every_kind,
    all_reduce_of_tensors_of_every_layout,
    all_reduce_of_sparse_tensors,
    half_precision_on_the_wire,
    broadcast_from_every_rank,
    reduce_to_every_rank,
    all_gather_in_all_its_forms,
    gather_and_scatter_at_every_rank,
    reduce_scatter_in_all_its_forms,
    all_to_all_in_all_its_forms,
    coalesced_blocks,
    objects,
    barriers,
]
