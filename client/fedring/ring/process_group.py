"""torch.distributed's collectives, over the ring.

torch calls some of them by two names, with tensors or lists of them, and with options or plain arguments: all forms are
taken. In torch 2.13 a subclass of ProcessGroup that a backend's creator returns becomes the group.
"""

from collections.abc import Sequence
from datetime import timedelta
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from fedring.ring import arguments, collectives
from fedring.ring.gathering import BytesGather, gather_bytes
from fedring.ring.member import Member, storing
from fedring.ring.messages import Messages, ReceiveFromAny
from fedring.ring.monitored import monitored_barrier
from fedring.ring.program import Program
from fedring.ring.reduction import Reduction
from fedring.ring.sparse import SparseSum
from fedring.ring.staging import Staged, as_bytes, check_size, fill, in_host_memory, plain
from fedring.ring.work import RingWork, together
from fedring.ring.world import World

Limit = timedelta | None


class RingProcessGroup(Member):
    """What `torch.distributed.init_process_group("fedring", ...)` makes."""

    def __init__(self, world: World, store: Store, ranks: Sequence[int], *, name: str, timeout: timedelta) -> None:
        super().__init__(world, store, ranks, name=name, timeout=timeout)
        self._messages = Messages(self.ring)

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Limit = None) -> RingWork:
        """The tensors are being reduced over all ranks, in place."""
        listed = arguments.listed(tensors)
        if listed[0].layout is torch.sparse_coo:
            return self._allreduce_sparse(arguments.only(listed), arguments.op(opts), self.limit(opts, timeout))
        staged = Staged(listed)
        wire = self.wire if staged.dtype == torch.float32 else None
        reduction = Reduction(arguments.op(opts), staged.dtype, wire)
        program = self._or_barrier(collectives.allreduce(*self.place, staged.data, reduction), staged)
        what = f"allreduce {_text(reduction, staged)}"
        return self.start(what, program, results=listed, limit=self.limit(opts, timeout), finish=storing([staged]))

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: Limit = None) -> RingWork:
        """The root's tensors are being reduced over all ranks, in place; the others' stay."""
        listed, root = arguments.listed(tensors), arguments.root(opts)
        is_root = self.ring.rank == root
        staged = Staged(listed, copy=not is_root)
        reduction = Reduction(arguments.op(opts if op is None else op), staged.dtype)
        if self.ring.size == 1:
            program = collectives.allreduce(*self.place, staged.data, reduction)
        else:
            program = self._or_barrier(collectives.reduce(*self.place, staged.data, reduction, root), staged)
        finish = storing([staged]) if is_root else None
        what = f"reduce {_text(reduction, staged)} to {root}"
        return self.start(what, program, results=listed, limit=self.limit(opts, timeout), finish=finish)

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Limit = None) -> RingWork:
        """The tensors are becoming the root's."""
        listed, root = arguments.listed(tensors), arguments.root(opts)
        staged = Staged(listed)
        program = self._or_barrier(collectives.broadcast(*self.place, staged.data, root), staged)
        finish = None if self.ring.rank == root else storing([staged])
        what = f"broadcast {_shape(staged)} from {root}"
        return self.start(what, program, results=listed, limit=self.limit(opts, timeout), finish=finish)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Limit = None) -> RingWork:
        """`outputs[r]` is becoming rank r's input; all ranks know all lengths, which may differ."""
        into, mine = arguments.only_list(outputs), arguments.only(inputs)
        self.check_count("outputs", into)
        staged = [Staged([output]) for output in into]
        fill(staged[self.ring.rank].flat, mine)
        program = collectives.allgather(*self.place, [one.data for one in staged])
        what = f"allgather {staged[0].dtype} {[one.flat.numel() for one in staged]}"
        return self.start(what, program, results=into, limit=self.limit(opts, timeout), finish=storing(staged))

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> RingWork:
        """`output` is becoming all ranks' inputs, one after another."""
        staged, count = Staged([output]), plain(input).numel()
        if staged.flat.numel() != count * self.ring.size:
            raise ValueError(f"{self.ring.size} inputs of {count} values do not fill {staged.flat.numel()} values")
        chunks = torch.split(staged.flat, [count] * self.ring.size)
        fill(chunks[self.ring.rank], input)
        program = collectives.allgather(*self.place, [as_bytes(chunk) for chunk in chunks])
        what = f"allgather {staged.dtype} {[count] * self.ring.size}"
        return self.start(what, program, results=[output], limit=self.limit(opts), finish=storing([staged]))

    _allgather_base = all_gather_single

    def allgather_coalesced(self, output_lists: Any, inputs: Any, opts: Any = None) -> RingWork:
        """`output_lists[r][i]` is becoming rank r's input i."""
        columns = [list(column) for column in zip(*output_lists, strict=True)]
        pairs = zip(columns, inputs, strict=True)
        return together(self.ring, [self.allgather([into], [mine], opts) for into, mine in pairs])

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> RingWork:
        """Each output is becoming all ranks' inputs of its place."""
        pairs = zip(outputs, inputs, strict=True)
        return together(self.ring, [self.all_gather_single(into, mine, opts) for into, mine in pairs])

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Limit = None) -> RingWork:
        """The root's `outputs[r]` is becoming rank r's input."""
        root = arguments.root(opts)
        mine = in_host_memory(plain(arguments.only(inputs)))
        into = arguments.only_list(outputs) if self.ring.rank == root else []
        staged = [Staged([output]) for output in into]
        if self.ring.rank == root:
            self.check_count("outputs", into)
            check_size(staged[root].flat, mine)
        program = collectives.gather(self.ring.rank, [one.data for one in staged], as_bytes(mine), root)
        what = f"gather {mine.dtype} to {root}"
        return self.start(what, program, results=into, limit=self.limit(opts, timeout), finish=storing(staged))

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Limit = None) -> RingWork:
        """The output is becoming the root's `inputs[rank]`."""
        root, into = arguments.root(opts), arguments.only(outputs)
        staged = Staged([into])
        mine = [in_host_memory(plain(one)) for one in arguments.only_list(inputs)] if self.ring.rank == root else []
        if self.ring.rank == root:
            self.check_count("inputs", mine)
            check_size(staged.flat, mine[root])
        program = collectives.scatter(self.ring.rank, [as_bytes(one) for one in mine], staged.data, root)
        what = f"scatter {staged.dtype} from {root}"
        return self.start(what, program, results=[into], limit=self.limit(opts, timeout), finish=storing([staged]))

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Limit = None) -> RingWork:
        """The output is becoming the reduction of all ranks' `inputs[rank]`; lengths may differ."""
        each = arguments.only_list(inputs)
        self.check_count("inputs", each)
        sizes = [plain(one).numel() for one in each]
        return self._reduce_scatter(arguments.only(outputs), each, sizes, opts=opts, timeout=timeout)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> RingWork:
        """The output is becoming this rank's part of the reduction of all ranks' inputs."""
        sizes = [plain(output).numel()] * self.ring.size
        if sum(sizes) != plain(input).numel():
            raise ValueError(f"{plain(input).numel()} values are not {self.ring.size} times {sizes[0]} values")
        return self._reduce_scatter(output, [input], sizes, opts=opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> RingWork:
        """Each output is becoming this rank's part of the reduction of all ranks' inputs of its place."""
        pairs = zip(outputs, inputs, strict=True)
        return together(self.ring, [self.reduce_scatter_single(into, mine, opts) for into, mine in pairs])

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Limit = None) -> RingWork:
        """`outputs[r]` is becoming rank r's `inputs[rank]`."""
        self.check_count("outputs", outputs)
        self.check_count("inputs", inputs)
        staged = [Staged([output]) for output in outputs]
        into = [one.flat for one in staged]
        program = self._all_to_all(into, [in_host_memory(plain(one)) for one in inputs])
        what, limit = f"all_to_all {into[0].dtype}", self.limit(opts, timeout)
        return self.start(what, program, results=list(outputs), limit=limit, finish=storing(staged))

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int], opts: Any = None
    ) -> RingWork:
        """Part r of `output`, along its first dimension, is becoming this rank's part of rank r's `input`."""
        staged, mine = Staged([output]), plain(input)
        into = arguments.split(staged.flat, plain(output), output_sizes, self.ring.size)
        program = self._all_to_all(into, arguments.split(in_host_memory(mine), mine, input_sizes, self.ring.size))
        what = f"all_to_all {staged.dtype}"
        return self.start(what, program, results=[output], limit=self.limit(opts), finish=storing([staged]))

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None, timeout: Limit = None) -> RingWork:
        """It ends once all ranks have come here."""
        return self.start("barrier", collectives.barrier(*self.place), results=[], limit=self.limit(opts, timeout))

    def monitored_barrier(self, timeout: Limit = None, wait_all_ranks: bool = False) -> None:
        """All ranks have come here; rank 0's error names the first that has not within the timeout, or all of them."""
        seconds = self.limit() if timeout is None else timeout.total_seconds()
        monitored_barrier(self.ring, seconds, name_all=wait_all_ranks)

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> RingWork:
        """The tensor is on its way to a rank."""
        operation = self._messages.send(Staged([arguments.only(tensors)]), dst, tag, timeout=self.limit())
        return self.kept(RingWork(self.ring, [operation], list(tensors)))

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> RingWork:
        """The tensor is becoming what the rank sends."""
        staged = Staged([arguments.only(tensors)])
        operation = self._messages.receive(staged, src, tag, timeout=self.limit())
        return self.kept(RingWork(self.ring, [operation], list(tensors), finish=storing([staged])))

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> RingWork:
        """The tensor is becoming what some rank sends; which one is decided when somebody waits for it."""
        staged = Staged([arguments.only(tensors)])
        return self.kept(ReceiveFromAny(self._messages, staged, tag, tensors=tensors, timeout=self.limit()))

    def allgather_bytes(self, payload: bytes | memoryview, *, limit: int = 1 << 30) -> BytesGather:
        """`payload`, of at most `limit` bytes, and every other rank's, is on its way to every rank."""
        return gather_bytes(self.ring, payload, limit=limit, timeout=self.limit())

    def _allreduce_sparse(self, tensor: Tensor, op: str, limit: float) -> RingWork:
        rank, size = self.place
        total = SparseSum(tensor, op, rank=rank, size=size)
        program = collectives.allgather_bytes(rank, size, total.messages, total.limit)
        return self.start(total.what, program, results=[tensor], limit=limit, finish=total.store)

    def _reduce_scatter(
        self, output: Tensor, inputs: list[Tensor], sizes: list[int], *, opts: Any, timeout: Limit = None
    ) -> RingWork:
        staged = Staged(inputs, copy=True)  # the algorithm spoils it
        cuts = [0, *accumulate(sizes)]
        into, rank = plain(output), self.ring.rank
        part = staged.flat[cuts[rank] : cuts[rank + 1]]
        check_size(part, into)
        reduction = Reduction(arguments.op(opts), staged.dtype)
        if self.ring.size == 1:
            program = collectives.allreduce(*self.place, staged.data, reduction)
        else:
            program = collectives.reduce_scatter(*self.place, staged.data, reduction, cuts)

        def store() -> None:
            into.copy_(part.view(into.shape))

        program = self._or_barrier(program, staged)
        what = f"reduce_scatter {_text(reduction, staged)} at {cuts}"
        return self.start(what, program, results=[output], limit=self.limit(opts, timeout), finish=store)

    def _all_to_all(self, into: Sequence[Tensor], parts: Sequence[Tensor]) -> Program:
        rank = self.ring.rank
        check_size(into[rank], parts[rank])
        return collectives.all_to_all(*self.place, [as_bytes(one) for one in into], [as_bytes(one) for one in parts])

    def _or_barrier(self, program: Program, staged: Staged) -> Program:
        """The program, or, without values, one that still notices who runs another."""
        return program if staged.flat.numel() else collectives.barrier(*self.place)


def _text(reduction: Reduction, staged: Staged) -> str:
    wire = f" as {reduction.wire}" if reduction.wire else ""
    return f"{reduction.op} {_shape(staged)}{wire}"


def _shape(staged: Staged) -> str:
    return f"{staged.dtype} [{staged.flat.numel()}]"
