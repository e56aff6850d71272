"""The collectives, as programs of one rank (see `program`). No I/O.

Ring algorithms (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations") move 2
(n - 1) / n of the data per rank, in parts: while one is added, the next is on its way. Small data go directly to every
rank: more bytes, but one step. Either way each value is reduced in one order on one rank, or in rank order on all, so
that all ranks end with the same bits.

In all programs `rank` is this rank in the group, `size` the number of ranks, and memoryviews are of bytes. Where a
docstring says "at the end", that is when the program has ended on this rank.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence

from fedring.ring.engine.program import Expect, Program, Receive, Send
from fedring.ring.engine.reduction import Reduction
from fedring.ring.errors import BadFrame
from fedring.ring.transport.frames import MAX_PAYLOAD, Bytes

DIRECT_BYTES = 256 << 10
"""Data go directly to every rank if each rank sends at most this many bytes in all."""
DIRECT_BYTES_OF_TWO = 1 << 20
"""Two ranks send more directly: beyond this it is faster to add one part while the next is on its way."""
DIRECT_RANKS = 16
"""With more ranks than this nothing goes directly to all: every rank would need a stream to every other."""
PART_BYTES = 1 << 20
"""Bytes of the smallest part of what is sent in one step. Each part costs 0.3 ms of work, but the last one is added
when nothing is on its way any more, so that large parts cost time, too."""

_SIZE = 8  # bytes of a length, little endian


def is_direct(size: int, total: int) -> bool:
    """Return whether all ranks exchange data directly instead of in a ring.

    Args:
        size: The number of ranks.
        total: The bytes that the group exchanges.
    """
    if size == 2:  # no more bytes than in two steps of half the size
        return total <= DIRECT_BYTES_OF_TWO
    return size <= DIRECT_RANKS and total * (size - 1) <= DIRECT_BYTES


def allreduce(rank: int, size: int, data: memoryview, reduction: Reduction) -> Program:
    """Reduce `data` over all ranks, in place, on every rank."""
    total = _on_the_wire(data, reduction)
    if is_direct(size, len(data)):
        yield _expect(dict.fromkeys(_others(rank, size), total))
        yield from _allreduce_direct(rank, size, data, reduction)
    else:
        yield _expect({(rank - 1) % size: 2 * total}, steps=2 * (size - 1))
        cuts = even_cuts(len(data) // reduction.itemsize, size)
        yield from _reduce_scatter(rank, size, data, reduction, cuts, spread=True)
        yield from _allgather_reduced(rank, size, data, reduction, cuts)


def reduce_scatter(rank: int, size: int, data: memoryview, reduction: Reduction, cuts: Sequence[int]) -> Program:
    """Reduce `data` over all ranks, and leave each rank its part.

    At the end, the values of `data` in [cuts[rank], cuts[rank + 1]) are reduced.

    The other values are overwritten.
    """
    yield _expect({(rank - 1) % size: _on_the_wire(data, reduction)}, steps=size - 1)
    yield from _reduce_scatter(rank, size, data, reduction, cuts)


def reduce(rank: int, size: int, data: memoryview, reduction: Reduction, root: int) -> Program:
    """Reduce `data` over all ranks into the root's `data`.

    The data of the other ranks is overwritten.
    """
    cuts, before = even_cuts(len(data) // reduction.itemsize, size), (rank - 1) % size
    chunks = [_chunk(data, reduction, cuts, index) for index in range(size)]
    each = {source: _on_the_wire(chunks[source], reduction) if rank == root else 0 for source in _others(rank, size)}
    yield _expect({**each, before: _on_the_wire(data, reduction) + each.get(before, 0)}, steps=size)
    yield from _reduce_scatter(rank, size, data, reduction, cuts)
    if rank != root:
        yield from _send_values(root, chunks[rank], reduction, tag=size)
        return
    width = reduction.itemsize
    for source in _others(rank, size):
        for part, begin, end in parts(len(chunks[source]) // width, reduction.wire_itemsize):
            came = yield Receive(source, (end - begin) * reduction.wire_itemsize, size, part)
            reduction.store(chunks[source][begin * width : end * width], came)


def allgather(rank: int, size: int, outputs: Sequence[memoryview]) -> Program:
    """Gather the outputs of all ranks on every rank.

    At first `outputs[rank]` holds this rank's data; at the end, `outputs[r]` holds that of rank r. All ranks know
    all lengths.
    """
    if is_direct(size, sum(map(len, outputs))):
        yield _expect({source: len(outputs[source]) for source in _others(rank, size)})
        for to in _others(rank, size):
            yield Send(to, outputs[rank])
        for source in _others(rank, size):
            outputs[source][:] = yield Receive(source, len(outputs[source]))
        return
    yield _expect({(rank - 1) % size: sum(map(len, outputs))}, steps=size - 1)
    yield from _send((rank + 1) % size, outputs[rank])
    for step in range(size - 1):
        into = outputs[(rank - step - 1) % size]
        for part, begin, end in parts(len(into), 1):
            came = yield Receive((rank - 1) % size, end - begin, step, part)
            into[begin:end] = came
            if step + 2 < size:
                yield Send((rank + 1) % size, came, step + 1, part)


def allgather_bytes(rank: int, size: int, outputs: list[memoryview], limit: int) -> Program:
    """Gather messages of unknown lengths on every rank.

    At the end, `outputs[r]` is the message of rank r, of at most `limit` bytes.

    At first only `outputs[rank]` is there. No rank knows the others' lengths: the first part of a message tells it.
    """
    if is_direct(size, limit):
        yield _expect(dict.fromkeys(_others(rank, size), _SIZE + limit))
        for to in _others(rank, size):
            yield from _send_message(to, outputs[rank], tag=0)
        for source in _others(rank, size):
            outputs[source] = yield from _receive_message(source, limit, tag=0)
        return
    yield _expect({(rank - 1) % size: (size - 1) * (_SIZE + limit)}, steps=size - 1)
    yield from _send_message((rank + 1) % size, outputs[rank], tag=0)
    for step in range(size - 1):
        onward = (rank + 1) % size if step + 2 < size else None
        index = (rank - step - 1) % size
        outputs[index] = yield from _receive_message((rank - 1) % size, limit, tag=step, forward_to=onward)


def broadcast(rank: int, size: int, data: memoryview, root: int) -> Program:
    """Copy the root's `data` into that of every rank."""
    before = root if is_direct(size, len(data)) else (rank - 1) % size
    yield _expect({} if rank == root else {before: len(data)})
    if is_direct(size, len(data)):
        if rank != root:
            data[:] = yield Receive(root, len(data))
            return
        for to in _others(rank, size):
            yield Send(to, data)
        return
    forward = (rank + 1) % size != root
    for part, begin, end in parts(len(data), 1):
        if rank != root:
            data[begin:end] = yield Receive(before, end - begin, 0, part)
        if forward:
            yield Send((rank + 1) % size, data[begin:end], 0, part)


def gather(rank: int, outputs: Sequence[memoryview], mine: memoryview, root: int) -> Program:
    """Gather the data of all ranks on the root.

    At the end, the root's `outputs[r]` is rank r's `mine`. Other ranks have no outputs.
    """
    yield _expect({source: len(into) for source, into in enumerate(outputs) if source != root})
    if rank != root:
        yield from _send_all(root, mine, told=True)
        return
    for source, into in enumerate(outputs):
        if source == root:
            into[:] = mine
        else:
            yield from _receive_all(source, into)


def scatter(rank: int, inputs: Sequence[memoryview], mine: memoryview, root: int) -> Program:
    """Scatter the root's inputs over all ranks.

    At the end, `mine` is the root's `inputs[rank]`. Other ranks have no inputs.
    """
    yield _expect({} if rank == root else {root: len(mine)})
    if rank != root:
        yield from _receive_all(root, mine)
        return
    for to, data in enumerate(inputs):
        if to == root:
            mine[:] = data
        else:
            yield from _send_all(to, data, told=True)


def all_to_all(rank: int, size: int, outputs: Sequence[memoryview], inputs: Sequence[memoryview]) -> Program:
    """Exchange one part between each pair of ranks.

    At the end, `outputs[r]` is `inputs[rank]` of rank r.
    """
    yield _expect({source: len(outputs[source]) for source in _others(rank, size)})
    for to in _others(rank, size):
        yield from _send_all(to, inputs[to], told=True)
    outputs[rank][:] = inputs[rank]
    for source in _others(rank, size):
        yield from _receive_all(source, outputs[source])


def barrier(rank: int, size: int) -> Program:
    """Wait for all: at the end, every rank has reached the barrier."""
    if size <= DIRECT_RANKS:
        yield _expect(dict.fromkeys(_others(rank, size), 0))
        for to in _others(rank, size):
            yield Send(to, b"")
        for source in _others(rank, size):
            yield Receive(source, 0)
        return
    yield _expect({(rank - 1) % size: 0}, steps=2)
    for lap in range(2):  # after the first lap all have arrived, after the second all know it
        if rank == 0:
            yield Send(1, b"", lap)
            yield Receive(size - 1, 0, lap)
        else:
            yield Receive(rank - 1, 0, lap)
            yield Send((rank + 1) % size, b"", lap)


def monitored_barrier(rank: int, size: int) -> Program:
    """Let all ranks pass once rank 0 has heard from each.

    Rank 0 waits for the other ranks in their order, so that it can name the first one that is missing.
    """
    yield _expect(dict.fromkeys([0] if rank else range(1, size), 0))
    if rank:
        yield Send(0, b"")
        yield Receive(0, 0, tag=1)
        return
    for source in range(1, size):
        yield Receive(source, 0)
    for to in range(1, size):
        yield Send(to, b"", tag=1)


def send(to: int, data: memoryview) -> Program:
    """Send `data` to a rank."""
    yield _expect({})
    yield from _send_all(to, data)


def receive(source: int, data: memoryview) -> Program:
    """Receive `data` from a rank."""
    yield _expect({source: len(data)})
    yield from _receive_all(source, data)


def even_cuts(count: int, size: int) -> list[int]:
    """Return the size + 1 places that divide `count` values evenly."""
    return [index * count // size for index in range(size + 1)]


def parts(count: int, width: int) -> Iterator[tuple[int, int, int]]:
    """Cut `count` values of `width` bytes on the wire into parts.

    Returns:
        Each part's number, its first value, and its end.
    """
    total = count * width
    most = min(max(PART_BYTES, total // 6), MAX_PAYLOAD)
    number = -(-total // (most - most % width))
    step = max(
        1, -(-count // max(1, number))
    )  # so that no small part is left, which would cost as much work as the others
    return ((part, begin, min(begin + step, count)) for part, begin in enumerate(range(0, count, step)))


def _expect(data: Mapping[int, int], *, steps: int = 1) -> Expect:
    """Return the expectation of a program.

    Args:
        data: The most bytes, by the rank that sends them.
        steps: In how many steps a rank sends them, each cut into `parts`.
    """
    return Expect(data, max(data.values(), default=0) // PART_BYTES + steps)


def _on_the_wire(data: memoryview, reduction: Reduction) -> int:
    """Return the size of `data` as it is sent, in bytes."""
    return len(data) // reduction.itemsize * reduction.wire_itemsize


def _allreduce_direct(rank: int, size: int, data: memoryview, reduction: Reduction) -> Program:
    mine = bytes(reduction.outgoing(data))  # a copy: `data` may change before it is sent
    for to in _others(rank, size):
        yield Send(to, mine)
    came: dict[int, Bytes] = {rank: mine}
    for source in _others(rank, size):
        came[source] = yield Receive(source, len(mine))
    reduction.store(data, memoryview(came[0]))
    for source in range(1, size):
        reduction.combine(data, memoryview(came[source]))
    reduction.finish(data, size)


def _reduce_scatter(
    rank: int, size: int, data: memoryview, reduction: Reduction, cuts: Sequence[int], *, spread: bool = False
) -> Program:
    """Reduce and finish this rank's chunk of `data`.

    With `spread`, each part is sent on as soon as it is reduced, so that no line is idle between this and the
    allgather.
    """
    if size == 1:  # there is no other rank
        reduction.finish(data, size)
        return
    first = _chunk(data, reduction, cuts, (rank - 1) % size)
    yield from _send_values((rank + 1) % size, first, reduction, tag=0)
    width = reduction.itemsize
    for step in range(size - 1):
        chunk = _chunk(data, reduction, cuts, (rank - step - 2) % size)
        for part, begin, end in parts(len(chunk) // width, reduction.wire_itemsize):
            came = yield Receive((rank - 1) % size, (end - begin) * reduction.wire_itemsize, step, part)
            into = chunk[begin * width : end * width]
            reduction.combine(into, came)
            if step + 2 < size:
                yield Send((rank + 1) % size, reduction.outgoing(into), step + 1, part)
            else:
                reduction.finish(into, size)
                if spread:
                    yield Send((rank + 1) % size, reduction.outgoing(into), size, part)


def _allgather_reduced(rank: int, size: int, data: memoryview, reduction: Reduction, cuts: Sequence[int]) -> Program:
    """Gather the reduced chunks on every rank.

    Each chunk begins at the rank that has reduced it, and that has sent it already.
    """
    width = reduction.itemsize
    for step in range(size - 1):
        chunk = _chunk(data, reduction, cuts, (rank - step - 1) % size)
        for part, begin, end in parts(len(chunk) // width, reduction.wire_itemsize):
            came = yield Receive((rank - 1) % size, (end - begin) * reduction.wire_itemsize, size + step, part)
            reduction.store(chunk[begin * width : end * width], came)
            if step + 2 < size:
                yield Send((rank + 1) % size, came, size + step + 1, part)


def _chunk(data: memoryview, reduction: Reduction, cuts: Sequence[int], index: int) -> memoryview:
    return data[cuts[index] * reduction.itemsize : cuts[index + 1] * reduction.itemsize]


def _others(rank: int, size: int) -> list[int]:
    """Return all other ranks, beginning with the next one.

    The order differs between ranks, so that not all send to one rank at once.
    """
    return [(rank + distance) % size for distance in range(1, size)]


def _send_values(to: int, values: memoryview, reduction: Reduction, *, tag: int) -> Program:
    width = reduction.itemsize
    for part, begin, end in parts(len(values) // width, reduction.wire_itemsize):
        yield Send(to, reduction.outgoing(values[begin * width : end * width]), tag, part)


def _send_all(to: int, data: memoryview, *, told: bool = False) -> Program:
    """Send `data` to a rank.

    Of no bytes, too, there is a frame: a rank that waits for some, or for none, would not notice the difference.

    Args:
        to: The rank.
        data: The bytes.
        told: Whether the rank is told their number, since the operation's description does not say it.
    """
    if not data:
        yield Send(to, data)
    yield from _send(to, data, len(data) if told else 0)


def _receive_all(source: int, data: memoryview) -> Program:
    if not data:
        yield Receive(source, 0)
    for part, begin, end in parts(len(data), 1):
        data[begin:end] = yield Receive(source, end - begin, 0, part)


def _send(to: int, data: memoryview, total: int = 0) -> Program:
    for part, begin, end in parts(len(data), 1):
        yield Send(to, data[begin:end], 0, part, 0 if part else total)


def _send_message(to: int, message: memoryview, *, tag: int) -> Program:
    """Send bytes whose length the receiver does not know."""
    head = message[: MAX_PAYLOAD - _SIZE]
    yield Send(to, len(message).to_bytes(_SIZE, "little") + head, tag, 0)
    for part, begin in enumerate(range(len(head), len(message), MAX_PAYLOAD), 1):
        yield Send(to, message[begin : begin + MAX_PAYLOAD], tag, part)


def _receive_message(
    source: int, limit: int, *, tag: int, forward_to: int | None = None
) -> Generator[Send | Receive, memoryview, memoryview]:
    """Receive and return a message that `_send_message` sends.

    With `forward_to`, each part is sent on to that rank as it comes.
    """
    came = yield Receive(source, -1, tag, 0)
    total = int.from_bytes(came[:_SIZE], "little")
    if len(came) < _SIZE or total > limit or len(came) != _SIZE + min(total, MAX_PAYLOAD - _SIZE):
        raise BadFrame(f"rank {source} sent a message of {total} bytes; the limit is {limit}", rank=source)
    if forward_to is not None:
        # Each part goes on before the next one comes, so that a long message is on all lines of the ring at once.
        yield Send(forward_to, came, tag + 1, 0)
    message = came[_SIZE:]
    if len(message) == total:
        return message
    whole = memoryview(bytearray(total))
    whole[: len(message)] = message
    for part, begin in enumerate(range(len(message), total, MAX_PAYLOAD), 1):
        came = yield Receive(source, min(MAX_PAYLOAD, total - begin), tag, part)
        whole[begin : begin + len(came)] = came
        if forward_to is not None:
            yield Send(forward_to, came, tag + 1, part)
    return whole
