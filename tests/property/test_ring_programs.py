"""The collectives without a network: they give the same bits in any order and with any delay of what is sent."""

import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedring.ring.engine import collectives
from fedring.ring.engine.program import Expect, Program, Receive, Send
from fedring.ring.engine.reduction import Reduction
from fedring.ring.errors import BadFrame

MAX_PAYLOAD, PART, DIRECT = 64, 48, 60  # small, so that small data take every path
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16,
    torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool,
)  # fmt: skip
OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
SIZES = st.integers(1, 6)
COUNTS = st.integers(0, 12) | st.integers(0, 300)
SEEDS = st.integers(0, 2**32 - 1)
LENGTHS = st.lists(st.integers(0, 20) | st.integers(0, 300), min_size=1, max_size=6)


@contextmanager
def small_limits() -> Iterator[None]:
    """Lower the limits, so that small data take every path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "MAX_PAYLOAD", MAX_PAYLOAD)
        patch.setattr(collectives, "PART_BYTES", PART)
        patch.setattr(collectives, "DIRECT_BYTES", DIRECT)
        patch.setattr(collectives, "DIRECT_BYTES_OF_TWO", DIRECT)
        yield


class Simulation:
    """Runs the programs of all ranks. A Send is copied when it is delivered, as late as the order of events allows.

    No rank is sent more in all than its program says that it expects: so no order of events can exceed that.
    """

    def __init__(self, programs: Sequence[Program], seed: int) -> None:
        self._programs = programs
        self._random = random.Random(seed)
        self._outboxes: list[deque[Send]] = [deque() for _ in programs]
        self._inboxes: list[dict[tuple[int, int, int], memoryview]] = [{} for _ in programs]
        self._waiting: list[Receive | None] = [None] * len(programs)
        self._expected = [_expected(program) for program in programs]
        self._came: list[dict[int, list[int]]] = [defaultdict(list) for _ in programs]  # sizes of frames, by their rank

    def run(self) -> None:
        """Run every program to its end, and check that nothing is left over."""
        for rank in range(len(self._programs)):
            self._advance(rank, None)
        while senders := [rank for rank, outbox in enumerate(self._outboxes) if outbox]:
            self._deliver(self._random.choice(senders))
        assert self._waiting == [None] * len(self._programs), "a program waits for what is never sent"
        assert not any(self._inboxes), "something was sent that no program asks for"
        for came, expected in zip(self._came, self._expected, strict=True):
            for source, sizes in came.items():
                assert sum(sizes) <= expected.data[source]
                assert len(sizes) <= expected.frames

    def _deliver(self, rank: int) -> None:
        """Deliver some frame of a rank. Those to one peer stay in order."""
        targets = sorted({send.to for send in self._outboxes[rank]})
        to = self._random.choice(targets)
        send = next(send for send in self._outboxes[rank] if send.to == to)
        self._outboxes[rank] = deque(other for other in self._outboxes[rank] if other is not send)
        assert len(send.data) <= MAX_PAYLOAD
        place = (rank, send.tag, send.part)
        assert place not in self._inboxes[to]
        self._inboxes[to][place] = memoryview(bytes(send.data))
        self._came[to][rank].append(len(send.data))
        waiting = self._waiting[to]
        if waiting is not None and waiting.place == place:
            self._waiting[to] = None
            self._advance(to, self._taken(to, waiting))

    def _advance(self, rank: int, answer: memoryview | None) -> None:
        try:
            while True:
                step, answer = self._programs[rank].send(answer), None  # type: ignore[arg-type]  # None first
                if isinstance(step, Send):
                    assert step.to != rank
                    self._outboxes[rank].append(step)
                    continue
                assert isinstance(step, Receive)
                if step.place in self._inboxes[rank]:
                    answer = self._taken(rank, step)
                else:
                    self._waiting[rank] = step
                    return
        except StopIteration:
            return

    def _taken(self, rank: int, step: Receive) -> memoryview:
        data = self._inboxes[rank].pop(step.place)
        assert step.size in (-1, len(data))
        return data


def _expected(program: Program) -> Expect:
    """Return the first word of a program."""
    expected = next(program)
    assert isinstance(expected, Expect)
    return expected


def run(size: int, seed: int, program: Callable[[int], Program]) -> None:
    with small_limits():
        Simulation([program(rank) for rank in range(size)], seed).run()


def memory(tensor: Tensor) -> memoryview:
    return tensor.view(torch.uint8).numpy().data


def inputs(size: int, count: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    """Return tensors of small whole numbers, so that sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 3, (count,), generator=generator).to(dtype) for _ in range(size)]


def reduced(op: str, tensors: Sequence[Tensor]) -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total = OPS[op](total, tensor)
    return total.div(len(tensors)) if op == "avg" else total


def allowed(op: str, dtype: torch.dtype) -> bool:
    return op not in ("avg", "band", "bor", "bxor") or (op == "avg") == dtype.is_floating_point


KINDS = [(op, dtype) for op in OPS for dtype in DTYPES if allowed(op, dtype)]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(KINDS), SIZES, COUNTS, SEEDS)
def test_allreduce_leaves_the_reduction_on_every_rank(
    kind: tuple[str, torch.dtype], size: int, count: int, seed: int
) -> None:
    op, dtype = kind
    tensors = inputs(size, count, dtype, seed)
    wanted = reduced(op, tensors)
    run(size, seed, lambda rank: collectives.allreduce(rank, size, memory(tensors[rank]), Reduction(op, dtype)))
    for tensor in tensors:
        torch.testing.assert_close(tensor, wanted)
        assert memory(tensor) == memory(tensors[0])


@given(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]), SIZES, COUNTS, SEEDS, st.booleans())
def test_allreduce_of_numbers_that_round_ends_with_the_same_bits_everywhere(
    dtype: torch.dtype, size: int, count: int, seed: int, half: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(count, generator=generator).to(dtype) for _ in range(size)]
    wanted = torch.stack(tensors).double().mean(0)
    wire = torch.bfloat16 if half and dtype == torch.float32 else None
    reduction = Reduction("avg", dtype, wire)
    run(size, seed, lambda rank: collectives.allreduce(rank, size, memory(tensors[rank]), reduction))
    assert all(memory(tensor) == memory(tensors[0]) for tensor in tensors)
    tolerance = 1e-6 if dtype == torch.float32 and wire is None else 0.05
    torch.testing.assert_close(tensors[0].double(), wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("wire", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count", [5, 500])
def test_values_that_half_precision_holds_are_sent_exactly(wire: torch.dtype, count: int) -> None:
    tensors = inputs(3, count, torch.float32, 0)
    wanted = reduced("sum", tensors)
    reduction = Reduction("sum", torch.float32, wire)
    run(3, 0, lambda rank: collectives.allreduce(rank, 3, memory(tensors[rank]), reduction))
    for tensor in tensors:
        assert torch.equal(tensor, wanted)


@given(LENGTHS, SEEDS)
def test_reduce_scatter_leaves_each_rank_its_part(lengths: list[int], seed: int) -> None:
    size = len(lengths)
    cuts = [sum(lengths[:rank]) for rank in range(size + 1)]
    tensors = inputs(size, cuts[-1], torch.float32, seed)
    wanted = reduced("sum", tensors)
    reduction = Reduction("sum", torch.float32)
    run(size, seed, lambda rank: collectives.reduce_scatter(rank, size, memory(tensors[rank]), reduction, cuts))
    for rank, tensor in enumerate(tensors):
        mine = slice(cuts[rank], cuts[rank + 1])
        assert torch.equal(tensor[mine], wanted[mine])


@given(SIZES, COUNTS, SEEDS, st.data())
def test_reduce_leaves_the_reduction_on_the_root(size: int, count: int, seed: int, data: st.DataObject) -> None:
    root = data.draw(st.integers(0, size - 1))
    tensors = inputs(size, count, torch.int32, seed)
    wanted = reduced("sum", tensors)
    reduction = Reduction("sum", torch.int32)
    run(size, seed, lambda rank: collectives.reduce(rank, size, memory(tensors[rank]), reduction, root))
    assert torch.equal(tensors[root], wanted)


def messages(lengths: Sequence[int], seed: int) -> list[bytes]:
    generator = random.Random(seed)
    return [generator.randbytes(length) for length in lengths]


@given(LENGTHS, SEEDS)
def test_allgather_leaves_every_ranks_values_on_every_rank(lengths: list[int], seed: int) -> None:
    wanted = messages(lengths, seed)
    size = len(lengths)
    outputs = [[bytearray(length) for length in lengths] for _ in range(size)]
    for rank in range(size):
        outputs[rank][rank][:] = wanted[rank]
    run(size, seed, lambda rank: collectives.allgather(rank, size, [memoryview(one) for one in outputs[rank]]))
    assert outputs == [wanted] * size


@given(LENGTHS, SEEDS, st.booleans())
def test_allgather_of_bytes_needs_no_lengths(lengths: list[int], seed: int, exact: bool) -> None:
    wanted = messages(lengths, seed)
    size = len(lengths)
    outputs = [[memoryview(b"")] * size for _ in range(size)]
    for rank in range(size):
        outputs[rank][rank] = memoryview(wanted[rank])
    limit = max(lengths) if exact else 10_000
    run(size, seed, lambda rank: collectives.allgather_bytes(rank, size, outputs[rank], limit))
    assert [[bytes(one) for one in mine] for mine in outputs] == [wanted] * size


@pytest.mark.parametrize("length", [11, 500])
def test_a_message_over_the_limit_is_refused(length: int) -> None:
    outputs = [[memoryview(bytes(length)), memoryview(b"")], [memoryview(b""), memoryview(b"")]]
    with pytest.raises(BadFrame, match="limit is 10"):
        run(2, 0, lambda rank: collectives.allgather_bytes(rank, 2, outputs[rank], 10))


@given(SIZES, COUNTS, SEEDS, st.data())
def test_broadcast_leaves_the_roots_bytes_everywhere(size: int, count: int, seed: int, data: st.DataObject) -> None:
    root = data.draw(st.integers(0, size - 1))
    held = [bytearray(one) for one in messages([count] * size, seed)]
    wanted = bytes(held[root])
    run(size, seed, lambda rank: collectives.broadcast(rank, size, memoryview(held[rank]), root))
    assert held == [wanted] * size


@given(LENGTHS, SEEDS, st.data())
def test_gather_and_scatter_are_inverse(lengths: list[int], seed: int, data: st.DataObject) -> None:
    size = len(lengths)
    root = data.draw(st.integers(0, size - 1))
    mine = [memoryview(one) for one in messages(lengths, seed)]
    outputs = [bytearray(length) for length in lengths]
    views = [memoryview(one) for one in outputs]
    run(size, seed, lambda rank: collectives.gather(rank, views if rank == root else [], mine[rank], root))
    assert outputs == mine
    back = [bytearray(length) for length in lengths]
    run(
        size,
        seed,
        lambda rank: collectives.scatter(rank, views if rank == root else [], memoryview(back[rank]), root),
    )
    assert back == mine


@given(SIZES, SEEDS, st.data())
def test_all_to_all_transposes(size: int, seed: int, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 200), min_size=size * size, max_size=size * size))
    flat = [memoryview(one) for one in messages(lengths, seed)]
    sent = [flat[rank * size : (rank + 1) * size] for rank in range(size)]
    came = [[bytearray(len(sent[source][rank])) for source in range(size)] for rank in range(size)]
    views = [[memoryview(one) for one in row] for row in came]
    run(size, seed, lambda rank: collectives.all_to_all(rank, size, views[rank], sent[rank]))
    assert came == [[sent[source][rank] for source in range(size)] for rank in range(size)]


@given(st.integers(1, 20), SEEDS)
def test_nobody_passes_a_barrier_before_all_have_come(size: int, seed: int) -> None:
    come: set[int] = set()

    def program(rank: int) -> Program:
        barrier = collectives.barrier(rank, size)
        yield _expected(barrier)
        come.add(rank)
        yield from barrier
        assert len(come) == size

    run(size, seed, program)


@pytest.mark.parametrize("size", [17, 20])
def test_groups_of_many_ranks_use_the_ring_for_small_data_too(size: int) -> None:
    tensors = inputs(size, 3, torch.float32, 0)
    wanted = reduced("sum", tensors)
    reduction = Reduction("sum", torch.float32)
    run(size, 0, lambda rank: collectives.allreduce(rank, size, memory(tensors[rank]), reduction))
    assert all(torch.equal(tensor, wanted) for tensor in tensors)


def test_the_simulation_finds_a_program_that_changes_what_it_has_sent() -> None:
    memories = [bytearray(b"one"), bytearray(b"two")]
    came = [b"", b""]

    def program(rank: int) -> Program:
        yield Expect({1 - rank: 3}, frames=1)
        yield Send(1 - rank, memoryview(memories[rank]))
        memories[rank][:] = b"bad"
        came[rank] = bytes((yield Receive(1 - rank, 3)))

    run(2, 0, program)
    assert came == [b"bad", b"bad"]
