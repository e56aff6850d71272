"""The collectives of torch.distributed, over the ring.

Each method starts a collective and returns a work for it; the tensors hold the result once the work has ended. torch
calls some of them by two names, with a tensor or a list, and with options or plain arguments: all forms are accepted.
All arguments are checked before the first operation of a call starts.
In torch 2.13 a subclass of ProcessGroup that a backend's creator returns becomes the group.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from fedring.c10d import Store
from fedring.ring.engine import collectives
from fedring.ring.engine.barrier import monitored_barrier
from fedring.ring.engine.operation import Kind
from fedring.ring.engine.program import Program
from fedring.ring.engine.reduction import Reduction
from fedring.ring.errors import NotSupported
from fedring.ring.torch.arguments import as_list, check_count, only, only_list, op_name, pairs, rank_of, root_of, tag_of
from fedring.ring.torch.compiler import opaque
from fedring.ring.torch.member import Member
from fedring.ring.torch.messages import BytesGather, Messages, ReceiveFromAny, gather_bytes
from fedring.ring.torch.private_names import record_no_flights_of
from fedring.ring.torch.tensors import (
    SparseSum,
    Staged,
    apart,
    as_bytes,
    check_dtypes,
    check_size,
    check_storable,
    fill,
    in_host_memory,
    plain,
    split,
    store,
    storing,
)
from fedring.ring.torch.work import RingWork, together
from fedring.ring.torch.world import World

Timeout = timedelta | None
Start = Callable[[], RingWork]  # starts an operation whose arguments have been checked


@opaque
class RingProcessGroup(Member):
    """The group that `torch.distributed.init_process_group("fedring", ...)` makes.

    Attributes:
        messages: This rank's messages to other ranks, for callers whose messages are bytes.
    """

    def __init__(self, world: World, store: Store, ranks: Sequence[int], *, name: str, timeout: timedelta) -> None:
        super().__init__(world, store, ranks, name=name, timeout=timeout)
        self.messages = Messages(self.ring)

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Timeout = None) -> RingWork:
        """Reduce the tensors over all ranks, in place."""
        given = as_list(tensors)
        if given[0].layout is torch.sparse_coo:
            return self._allreduce_sparse(only(given), op_name(opts), self.seconds(opts, timeout))
        staged = Staged(given)
        wire = self.wire if staged.dtype == torch.float32 else None
        reduction = Reduction(op_name(opts), staged.dtype, wire)
        program = self._or_barrier(collectives.allreduce(*self.place, staged.data, reduction), staged)
        what = f"allreduce {_text(reduction, staged)}"
        return self.start(
            what,
            program,
            results=given,
            seconds=self.seconds(opts, timeout),
            finish=storing([staged]),
            kind=Kind.GRADIENTS,
        )

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: Timeout = None) -> RingWork:
        """Reduce the tensors over all ranks, into the root's.

        The tensors of other ranks stay as they are.
        """
        given, root = as_list(tensors), root_of(opts, self.ring.size)
        is_root = self.ring.rank == root
        staged = Staged(given, copy=not is_root)
        is_options = op is None and not isinstance(opts, int)
        reduction = Reduction(op_name(opts if is_options else op), staged.dtype)
        if self.ring.size == 1:
            program = collectives.allreduce(*self.place, staged.data, reduction)
        else:
            program = self._or_barrier(collectives.reduce(*self.place, staged.data, reduction, root), staged)
        finish = storing([staged]) if is_root else None
        what = f"reduce {_text(reduction, staged)} to {root}"
        return self.start(what, program, results=given, seconds=self.seconds(opts, timeout), finish=finish)

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Timeout = None) -> RingWork:
        """Copy the root's tensors to all ranks' tensors."""
        given, root = as_list(tensors), root_of(opts, self.ring.size)
        staged = Staged(given)
        program = self._or_barrier(collectives.broadcast(*self.place, staged.data, root), staged)
        finish = None if self.ring.rank == root else storing([staged])
        what = f"broadcast {_shape(staged)} from {root}"
        return self.start(what, program, results=given, seconds=self.seconds(opts, timeout), finish=finish)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Timeout = None) -> RingWork:
        """Gather all ranks' inputs: `outputs[r]` becomes rank r's.

        Lengths may differ, and all ranks must know them.
        """
        return self._allgather(outputs, inputs, opts, timeout)()

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> RingWork:
        """Gather all ranks' inputs in `output`, one after another."""
        return self._all_gather_single(output, input, opts)()

    _allgather_base = all_gather_single

    def allgather_coalesced(self, output_lists: Any, inputs: Any, opts: Any = None) -> RingWork:
        """Gather all ranks' inputs: `output_lists[r][i]` becomes rank r's input i."""
        columns = [list(column) for column in zip(*output_lists, strict=True)]
        return self._together([self._allgather([into], [mine], opts) for into, mine in pairs(columns, inputs)])

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> RingWork:
        """Gather all ranks' inputs in the outputs, each as in `all_gather_single`."""
        return self._together([self._all_gather_single(into, mine, opts) for into, mine in pairs(outputs, inputs)])

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Timeout = None) -> RingWork:
        """Gather all ranks' inputs on the root.

        Its `outputs[r]` becomes rank r's input.
        """
        root = root_of(opts, self.ring.size)
        is_root = self.ring.rank == root
        mine = in_host_memory(plain(only(inputs)))
        into = only_list(outputs) if is_root else []
        staged = [Staged([output]) for output in into]
        if is_root:
            check_count("outputs", into, self.ring.size)
            mine = apart(mine, [one.flat for one in staged])
        for one in staged:
            check_size(one.flat, mine)
        program = collectives.gather(self.ring.rank, [one.data for one in staged], as_bytes(mine), root)
        what = f"gather {mine.dtype} to {root}"
        return self.start(what, program, results=into, seconds=self.seconds(opts, timeout), finish=storing(staged))

    def gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> RingWork:
        """Gather all ranks' inputs in the root's `output`, one after another.

        torch calls it from 2.14 on.
        """
        root, mine = root_of(opts, self.ring.size), in_host_memory(plain(input))
        staged: list[Staged] = []
        chunks: Sequence[Tensor] = []
        if self.ring.rank == root:
            staged, count = [Staged([output])], mine.numel()
            if staged[0].flat.numel() != count * self.ring.size:
                filled = f"{self.ring.size} inputs of {count} values do not fill {staged[0].flat.numel()} values"
                raise ValueError(filled)
            mine, chunks = apart(mine, [staged[0].flat]), torch.split(staged[0].flat, [count] * self.ring.size)
            check_size(chunks[0], mine)
        program = collectives.gather(self.ring.rank, [as_bytes(chunk) for chunk in chunks], as_bytes(mine), root)
        results = [output] if staged else []
        what = f"gather {mine.dtype} to {root}"
        return self.start(what, program, results=results, seconds=self.seconds(opts), finish=storing(staged))

    gather_into_tensor = gather_single

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Timeout = None) -> RingWork:
        """Scatter the root's inputs: the output becomes its `inputs[rank]`."""
        root, into = root_of(opts, self.ring.size), only(outputs)
        staged = Staged([into])
        mine: list[Tensor] = []
        if self.ring.rank == root:
            mine = [apart(in_host_memory(plain(one)), [staged.flat]) for one in only_list(inputs)]
            check_count("inputs", mine, self.ring.size)
        for one in mine:
            check_size(staged.flat, one)
        program = collectives.scatter(self.ring.rank, [as_bytes(one) for one in mine], staged.data, root)
        what = f"scatter {staged.dtype} from {root}"
        return self.start(what, program, results=[into], seconds=self.seconds(opts, timeout), finish=storing([staged]))

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Timeout = None) -> RingWork:
        """Reduce all ranks' `inputs[rank]` into the output. Lengths may differ between ranks."""
        each = only_list(inputs)
        check_count("inputs", each, self.ring.size)
        sizes = [plain(one).numel() for one in each]
        return self._reduce_scatter(only(outputs), each, sizes, opts=opts, timeout=timeout)()

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> RingWork:
        """Reduce all ranks' inputs, and store this rank's part in the output."""
        return self._reduce_scatter_single(output, input, opts)()

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> RingWork:
        """Reduce all ranks' inputs, and store this rank's parts.

        Each output is filled as in `reduce_scatter_single`.
        """
        return self._together([self._reduce_scatter_single(into, mine, opts) for into, mine in pairs(outputs, inputs)])

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Timeout = None) -> RingWork:
        """Exchange tensors: `outputs[r]` becomes rank r's `inputs[rank]`."""
        given, mine = as_list(outputs), as_list(inputs)
        check_count("outputs", given, self.ring.size)
        check_count("inputs", mine, self.ring.size)
        staged = [Staged([output]) for output in given]
        into = [one.flat for one in staged]
        program = self._all_to_all(into, [in_host_memory(plain(one)) for one in mine])
        what, seconds = f"all_to_all {into[0].dtype}", self.seconds(opts, timeout)
        return self.start(what, program, results=given, seconds=seconds, finish=storing(staged))

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int], opts: Any = None
    ) -> RingWork:
        """Exchange parts along the first dimension.

        Part r of `output` becomes this rank's part of rank r's `input`.
        """
        staged, mine = Staged([output]), plain(input)
        into = split(staged.flat, plain(output), output_sizes, self.ring.size)
        program = self._all_to_all(into, split(in_host_memory(mine), mine, input_sizes, self.ring.size))
        what = f"all_to_all {staged.dtype}"
        return self.start(what, program, results=[output], seconds=self.seconds(opts), finish=storing([staged]))

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None, timeout: Timeout = None) -> RingWork:
        """Return a work that ends once all ranks have reached the barrier."""
        return self.start("barrier", collectives.barrier(*self.place), results=[], seconds=self.seconds(opts, timeout))

    def monitored_barrier(self, timeout: Timeout | float = None, wait_all_ranks: bool = False) -> None:
        """Wait until all ranks have reached the barrier.

        Args:
            timeout: How long rank 0 waits for the others: a timedelta, or seconds; None = the group's timeout.
            wait_all_ranks: Whether rank 0's error names all ranks that are missing, and not only the first.

        Raises:
            CollectiveTimeout: Rank 0's error names the first rank that has not come in time, or all of them.
        """
        given = timedelta(seconds=timeout) if isinstance(timeout, int | float) else timeout
        seconds = self.seconds() if given is None else given.total_seconds()
        monitored_barrier(self.ring, seconds, name_all=wait_all_ranks)

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> RingWork:
        """Send the tensor to a rank."""
        tensor, to = only(tensors), rank_of("destination", dst, self.ring.size)
        operation = self.messages.send(Staged([tensor]), to, tag_of(tag), timeout=self.seconds())
        return self.block.add(RingWork(self.ring, [operation], [tensor]))

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> RingWork:
        """Receive the tensor from a rank."""
        tensor, source = only(tensors), rank_of("source", src, self.ring.size)
        staged = Staged([tensor])
        finish = storing([staged])
        operation = self.messages.receive(staged, source, tag_of(tag), timeout=self.seconds())
        return self.block.add(RingWork(self.ring, [operation], [tensor], finish=finish))

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> RingWork:
        """Receive the tensor from any rank.

        The rank is decided when somebody waits for the message.

        Raises:
            ValueError: The group has no other rank.
            NotSupported: It would be coalesced with others, which start at once.
        """
        if self.ring.size == 1:
            raise ValueError("a group of one rank has no other rank to receive from")
        if self.block.break_off():
            raise NotSupported(
                "a message from any rank cannot be received in a block that coalesces: receive it after it"
            )
        tensor = only(tensors)
        staged = Staged([tensor])
        finish, seconds = storing([staged]), self.seconds()
        receipt = ReceiveFromAny(self.messages, staged, tag_of(tag), tensor=tensor, finish=finish, timeout=seconds)
        return self.block.add(receipt)

    def allgather_bytes(self, payload: bytes | memoryview, *, limit: int = 1 << 30) -> BytesGather:
        """Start an allgather of payloads of at most `limit` bytes."""
        return gather_bytes(self.ring, payload, limit=limit, timeout=self.seconds())

    def _allreduce_sparse(self, tensor: Tensor, op: str, seconds: float) -> RingWork:
        rank, size = self.place
        total = SparseSum(tensor, op, rank=rank, size=size)
        program = collectives.allgather_bytes(rank, size, total.messages, total.limit)
        return self.start(
            total.what, program, results=[tensor], seconds=seconds, finish=total.store, kind=Kind.GRADIENTS
        )

    def _allgather(self, outputs: Any, inputs: Any, opts: Any, timeout: Timeout = None) -> Start:
        into, mine = only_list(outputs), only(inputs)
        check_count("outputs", into, self.ring.size)
        staged = [Staged([output]) for output in into]
        check_dtypes([one.flat for one in staged])
        fill(staged[self.ring.rank].flat, mine)
        program = collectives.allgather(*self.place, [one.data for one in staged])
        what = f"allgather {staged[0].dtype} {[one.flat.numel() for one in staged]}"
        seconds = self.seconds(opts, timeout)
        return partial(self.start, what, program, results=into, seconds=seconds, finish=storing(staged))

    def _all_gather_single(self, output: Tensor, input: Tensor, opts: Any) -> Start:
        staged, count = Staged([output]), plain(input).numel()
        if staged.flat.numel() != count * self.ring.size:
            raise ValueError(f"{self.ring.size} inputs of {count} values do not fill {staged.flat.numel()} values")
        chunks = torch.split(staged.flat, [count] * self.ring.size)
        fill(chunks[self.ring.rank], input)
        program = collectives.allgather(*self.place, [as_bytes(chunk) for chunk in chunks])
        what, seconds = f"allgather {staged.dtype} {[count] * self.ring.size}", self.seconds(opts)
        return partial(self.start, what, program, results=[output], seconds=seconds, finish=storing([staged]))

    def _reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> Start:
        return self._reduce_scatter(output, [input], [plain(output).numel()] * self.ring.size, opts=opts)

    def _reduce_scatter(
        self, output: Tensor, inputs: list[Tensor], sizes: list[int], *, opts: Any, timeout: Timeout = None
    ) -> Start:
        staged = Staged(inputs, copy=True)  # the algorithm overwrites it
        cuts = [0, *accumulate(sizes)]
        if cuts[-1] != staged.flat.numel():
            raise ValueError(f"{staged.flat.numel()} values are not {self.ring.size} times {sizes[0]} values")
        into, rank = plain(output), self.ring.rank
        part = staged.flat[cuts[rank] : cuts[rank + 1]]
        check_size(part, into)
        check_storable(into)
        reduction = Reduction(op_name(opts), staged.dtype)
        if self.ring.size == 1:
            program = collectives.allreduce(*self.place, staged.data, reduction)
        else:
            program = collectives.reduce_scatter(*self.place, staged.data, reduction, cuts)
        program = self._or_barrier(program, staged)
        what = f"reduce_scatter {_text(reduction, staged)} at {cuts}"
        seconds, finish = self.seconds(opts, timeout), partial(store, part, into)
        return partial(self.start, what, program, results=[output], seconds=seconds, finish=finish)

    def _all_to_all(self, into: Sequence[Tensor], parts: Sequence[Tensor]) -> Program:
        rank = self.ring.rank
        check_dtypes([*into, *parts])
        check_size(into[rank], parts[rank])
        sent = [as_bytes(apart(one, into)) for one in parts]
        return collectives.all_to_all(*self.place, [as_bytes(one) for one in into], sent)

    def _together(self, starts: Sequence[Start]) -> RingWork:
        """Start several checked operations, and return one work for them."""
        return together(self.ring, [start() for start in starts])

    def _or_barrier(self, program: Program, staged: Staged) -> Program:
        """Return the program, or a barrier if there are no values.

        The barrier still notices ranks that run something else.
        """
        return program if staged.flat.numel() else collectives.barrier(*self.place)


record_no_flights_of(RingProcessGroup)


def _text(reduction: Reduction, staged: Staged) -> str:
    wire = f" as {reduction.wire}" if reduction.wire else ""
    return f"{reduction.op} {_shape(staged)}{wire}"


def _shape(staged: Staged) -> str:
    return f"{staged.dtype} [{staged.flat.numel()}]"
