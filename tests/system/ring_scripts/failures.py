"""Mistakes and failures. Each function returns the error that one rank gets."""

import json
import os
import select
import signal
import threading
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, GradBucket, Store
from torch.distributed.distributed_c10d import _get_default_store
from torch.nn.parallel import DistributedDataParallel

import fedring.ring
from fedring.ring import Endpoint, PeerLost, RingError, RingOptions, join, leave
from fedring.ring.torch import world
from tests.system.ring_scripts.ranks import error_of

Errors = dict[str, Any]


def another_shape(rank: int, size: int) -> Errors:
    return error_of(lambda: dist.all_reduce(torch.ones(4 if rank == 1 else 3)))


def another_large_shape(rank: int, size: int) -> Errors:
    return error_of(lambda: dist.all_reduce(torch.ones(700_000 + rank)))


def another_dtype(rank: int, size: int) -> Errors:
    dtype = torch.float32 if rank else torch.int32
    return error_of(lambda: dist.all_reduce(torch.ones(3, dtype=dtype)))


def another_collective(rank: int, size: int) -> Errors:
    """The root of a broadcast waits for no other rank, so it notices the mistake in the next collective."""

    def body() -> None:
        tensor = torch.ones(3)
        if rank == 0:
            dist.broadcast(tensor, 0)
        else:
            dist.all_reduce(tensor)
        dist.barrier()

    return error_of(body)


def nothing_against_something(rank: int, size: int) -> Errors:
    return error_of(lambda: dist.all_reduce(torch.ones(0 if rank == 0 else 5)))


def a_rank_that_does_not_come(rank: int, size: int) -> Errors:
    """Rank 1 waits for a message instead, and that wait fails, too."""
    if rank != 1:
        dist.group.WORLD.set_timeout(timedelta(seconds=2))  # type: ignore[union-attr]
        return error_of(lambda: dist.all_reduce(torch.ones(3)))
    dist.group.WORLD.set_timeout(timedelta(seconds=60))  # type: ignore[union-attr]
    return error_of(lambda: dist.recv(torch.ones(3), 0))


def a_barrier_that_is_not_reached(rank: int, size: int) -> Errors:
    if rank != 1:
        return error_of(lambda: dist.barrier(timeout=timedelta(seconds=1)))
    return error_of(lambda: dist.recv(torch.ones(3), 0))


def a_monitored_barrier_that_some_do_not_reach(rank: int, size: int, *, name_all: bool) -> Errors:
    """Ranks 1 and 3 wait for a message instead."""
    _wait_for_all(_get_default_store(), "arrived", rank, size)
    if rank in (1, 3):
        dist.group.WORLD.set_timeout(timedelta(seconds=60))  # type: ignore[union-attr]
        return error_of(lambda: dist.recv(torch.ones(3), 0))
    return error_of(
        lambda: dist.group.WORLD.monitored_barrier(timedelta(seconds=3), wait_all_ranks=name_all)  # type: ignore[union-attr]
    )


def a_monitored_barrier_that_a_rank_has_left(rank: int, size: int) -> Errors:
    if rank == 1:
        dist.destroy_process_group()
        return {"kind": "", "text": "", "rank": None}
    return error_of(lambda: dist.group.WORLD.monitored_barrier(timedelta(seconds=60)))  # type: ignore[union-attr]


def another_sparse_shape(rank: int, size: int) -> Errors:
    return error_of(lambda: dist.all_reduce(torch.ones(4 if rank == 1 else 3).to_sparse()))


def a_message_that_nobody_sends(rank: int, size: int) -> Errors:
    if rank == 0:
        dist.group.WORLD.set_timeout(timedelta(seconds=2))  # type: ignore[union-attr]
        return error_of(lambda: dist.recv(torch.ones(3)))
    dist.group.WORLD.set_timeout(timedelta(seconds=60))  # type: ignore[union-attr]
    return error_of(lambda: dist.recv(torch.ones(3), 0))


def a_wait_that_ends_early(rank: int, size: int) -> Errors:
    if rank == 1:
        return error_of(lambda: dist.recv(torch.ones(3), 0))
    work: Any = dist.all_reduce(torch.ones(3), async_op=True)
    return error_of(lambda: work.wait(timedelta(seconds=0.5)))


def a_failing_callback(rank: int, size: int) -> Errors:
    work: Any = dist.all_reduce(torch.ones(3), async_op=True)
    failed = work.get_future().then(lambda done: done.value()[7])
    after = failed.then(lambda done: done.value() + 1)
    error = error_of(after.wait)
    dist.barrier()  # the group can still be used
    return error


def failing_backward(rank: int, size: int, *, hook: bool) -> Errors:
    """DDP's C++ code uses a group that has failed, in its own all_reduce or in a hook."""
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    if hook:
        model.register_comm_hook(None, _sum)
    loss = model(torch.ones(3, 4)).sum()
    _wait_for_all(_get_default_store(), "made", rank, size)  # DistributedDataParallel sends something when it is made
    if rank == 1:
        dist.group.WORLD.abort()  # type: ignore[union-attr]
        return {"kind": "PeerLost"}
    return error_of(loss.backward)


def _wait_for_all(store: Store, place: str, rank: int, size: int) -> None:
    """Wait until all ranks have come to a place in the code, without the group."""
    store.set(f"{place}/{rank}", "")
    store.wait([f"{place}/{other}" for other in range(size)])


def a_failing_hook(rank: int, size: int) -> Errors:
    def hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        def fail(done: Any) -> torch.Tensor:
            raise LookupError("the hook has failed")

        work: Any = dist.all_reduce(bucket.buffer(), async_op=True)
        future: torch.futures.Future[torch.Tensor] = work.get_future().then(fail)
        return future

    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    model.register_comm_hook(None, hook)
    return error_of(model(torch.ones(3, 4)).sum().backward)


def what_is_not_supported(rank: int, size: int) -> list[Errors]:
    errors = [
        error_of(lambda: dist.all_reduce(torch.ones(3, dtype=torch.bool), dist.ReduceOp.AVG)),
        error_of(lambda: dist.all_reduce(torch.ones(3), dist.ReduceOp.BXOR)),
        error_of(lambda: dist.all_reduce(torch.ones(3).to_sparse(), dist.ReduceOp.MAX)),
        error_of(lambda: dist.broadcast(torch.ones(3).to_sparse(), 0)),
        error_of(lambda: dist.all_reduce(torch.ones(3, dtype=torch.uint16))),
    ]
    tensor = torch.ones(3)
    dist.all_reduce(tensor)  # the group can still be used
    return [*errors, {"sum": tensor.sum().item()}]


def forked(rank: int, size: int, *, folder: str, local_transport: bool) -> dict[str, Any]:
    """Rank 0 has a fork, which tries everything; nothing of it may reach the other ranks."""
    dist.init_process_group(
        "fedring",
        init_method=f"file://{folder}/group",
        rank=rank,
        world_size=size,
        pg_options=RingOptions(local_transport=local_transport),
    )
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    store, tensor = _get_default_store(), torch.full((3,), 1.0 + rank)
    dist.all_reduce(tensor)
    children: list[Errors] = []
    pending = torch.full((70_000,), 1.0 + rank)
    if rank == 0:
        works: list[Any] = [dist.all_reduce(pending, async_op=True)]  # the others have not begun
        children = _in_a_fork(lambda: _try_everything(model, works[0], folder))
        store.set("forked", "")
    else:
        store.wait(["forked"])
        works = [dist.all_reduce(pending, async_op=True)]
    works[0].wait()
    sums = [sorted(set(pending.tolist()))]
    for _ in range(3):
        tensor = torch.full((3,), 1.0 + rank)
        dist.all_reduce(tensor)
        sums.append(sorted(set(tensor.tolist())))
    return {"children": children, "sums": sums}


def _try_everything(model: DistributedDataParallel, pending: Any, folder: str) -> list[Errors]:
    large = torch.full((100_000,), 100.0)  # so that it would go through shared memory
    errors = [
        error_of(lambda: dist.all_reduce(torch.full((3,), 100.0))),
        error_of(lambda: dist.all_reduce(large)),
        error_of(pending.wait),
        error_of(lambda: pending.get_future().wait()),
        error_of(lambda: dist.send(large, 1)),
        error_of(lambda: dist.recv(large)),
        error_of(lambda: dist.barrier()),
        error_of(lambda: fedring.ring.monitored_barrier()),
        error_of(lambda: fedring.ring.allgather_bytes(b"fork")),
        error_of(lambda: dist.new_group()),
        error_of(model(torch.ones(3, 4)).sum().backward),
    ]
    dist.group.WORLD.abort()  # type: ignore[union-attr]
    dist.destroy_process_group()
    again = f"file://{folder}/forked"
    errors.append(error_of(lambda: dist.init_process_group("fedring", init_method=again, rank=0, world_size=1)))
    errors.append(error_of(lambda: Endpoint()))
    world._leave_at_exit()
    return errors


def _in_a_fork(body: Callable[[], Any]) -> Any:
    """Run `body` in a fork of this process, and return its result; a fork that hangs is killed."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from Python 3.12 on, for forks of processes with threads
        pid = os.fork()
    if pid == 0:
        try:
            os.write(writing, json.dumps(body()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    ready, _, _ = select.select([reading], [], [], 60)
    if not ready:
        os.kill(pid, signal.SIGKILL)
    with os.fdopen(reading, "rb") as results:
        text = results.read()
    os.waitpid(pid, 0)
    return json.loads(text)


def beside_another_backend(rank: int, size: int, *, folder: str) -> list[Errors]:
    """Form groups of two backends, by devices."""

    def init(backend: str, place: str) -> Errors:
        init_method = f"file://{folder}/{place}"
        return error_of(lambda: dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=size))

    errors = [init("cpu:fedring,cuda:gloo", "one"), init("cpu:gloo,cuda:fedring", "two")]
    assert not dist.is_initialized()
    errors.append(init("cpu:fedring,cuda:fedring", "three"))
    errors.append(error_of(lambda: dist.new_group(backend="cpu:fedring,cuda:gloo")))
    beside = dist.new_group(backend="gloo")
    tensor = torch.ones(())
    dist.all_reduce(tensor, group=beside)
    dist.all_reduce(tensor)
    return [*errors, {"sum": tensor.item()}]


_MAX: Any = "max"  # a mistake that its users make

# What rank 1 does wrong, through torch's functions, with the kind of its error over the ring.
_WRONG: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "broadcast": ("ValueError", lambda pair: dist.broadcast(torch.ones(2), 99)),
    "broadcast from a negative rank": ("ValueError", lambda pair: dist.broadcast(torch.ones(2), -1)),
    "broadcast in a subgroup": ("ValueError", lambda pair: dist.broadcast(torch.ones(2), 2, group=pair)),
    "broadcast from a rank of a subgroup": (
        "ValueError",
        lambda pair: dist.broadcast(torch.ones(2), group=pair, group_src=2),
    ),
    "reduce": ("ValueError", lambda pair: dist.reduce(torch.ones(2), 99)),
    "reduce of a complex maximum": (
        "NotSupported",
        lambda pair: dist.reduce(torch.ones(2, dtype=torch.complex64), 0, dist.ReduceOp.MAX),
    ),
    "all_reduce of a complex maximum": (
        "ValueError",
        lambda pair: dist.all_reduce(torch.ones(2, dtype=torch.complex64), dist.ReduceOp.MAX),
    ),
    "gather": ("ValueError", lambda pair: dist.gather(torch.ones(2), dst=99)),
    "gather of another length": (
        "ValueError",
        lambda pair: dist.gather(torch.ones(2), [torch.ones(2), torch.ones(2), torch.ones(3)], dst=1),
    ),
    "scatter": ("ValueError", lambda pair: dist.scatter(torch.ones(2), src=99)),
    "scatter of two tensors": ("ValueError", lambda pair: dist.scatter(torch.ones(2), [torch.ones(2)] * 2, src=1)),
    "all_gather to two tensors": ("ValueError", lambda pair: dist.all_gather([torch.ones(2)] * 2, torch.ones(2))),
    "all_gather to nothing": ("ValueError", lambda pair: dist.all_gather([], torch.ones(2))),
    "all_to_all": (
        "ValueError",
        lambda pair: dist.all_to_all_single(torch.ones(3), torch.ones(3), [4, -1, 0], [1, 1, 1]),
    ),
    "send with a negative tag": ("ValueError", lambda pair: dist.send(torch.ones(2), 0, tag=-1)),
    "receive with a negative tag": ("ValueError", lambda pair: dist.recv(torch.ones(2), 0, tag=-1)),
    "receive with a negative tag from any rank": ("ValueError", lambda pair: dist.recv(torch.ones(2), tag=-1)),
    "not a reduction": ("TypeError", lambda pair: dist.all_reduce(torch.ones(2), _MAX)),
    "not a tensor": ("TypeError", lambda pair: dist.all_reduce([torch.ones(2)])),
    "meta tensor": ("NotSupported", lambda pair: dist.all_reduce(torch.ones(2, device="meta"))),
    "float8": ("NotSupported", lambda pair: dist.all_reduce(torch.ones(2).to(torch.float8_e4m3fn))),
}
WRONG = {name: kind for name, (kind, _) in _WRONG.items()}


def wrong_arguments(rank: int, size: int) -> tuple[dict[str, Errors], list[float]]:
    """Call each of them on rank 1, and after each a collective with right arguments on all ranks."""
    errors, sums = {}, []
    pair: Any = dist.new_group([0, 1])
    for name, (_, wrong) in _WRONG.items():
        errors[name] = error_of(partial(wrong, pair)) if rank == 1 else {"kind": ""}
        tensor = torch.ones(())
        dist.all_reduce(tensor)
        sums.append(tensor.item())
    return errors, sums


def generations(rank: int, size: int, *, folder: str) -> list[Any]:
    """Form groups one after another in one process, from a thread that is not the main one. One loses a member."""
    results: list[Any] = []

    def body() -> None:
        store = FileStore(f"{folder}/addresses", size)
        for generation in range(1, 5):
            ranks = size if generation < 4 else size - 1
            results.append(_generation(store, generation, rank, size, ranks=ranks))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    return results


def _generation(store: Store, generation: int, rank: int, size: int, *, ranks: int) -> Any:
    """Publish the addresses of all `size` ranks; then `ranks` of them join."""
    endpoint = Endpoint(generation=generation)
    store.set(f"{generation}/{rank}", endpoint.address)
    members = [store.get(f"{generation}/{other}").decode() for other in range(size)]
    if rank >= ranks:
        endpoint.close()
        return "stayed away"
    try:
        join(endpoint, rank=rank, members=members, timeout=60 if ranks == size else 1)
        tensor = torch.full((1000,), float(generation))
        dist.all_reduce(tensor)
        if generation == 1:
            assert error_of(lambda: join(endpoint, rank=rank, members=members, timeout=1))["kind"] == "RingError"
            dist.all_reduce(torch.ones(1))  # the group can still be used
        if generation == 2:
            _wait_for_all(store, "2/reduced", rank, size)
        if generation == 2 and rank == 0:
            endpoint.fail(PeerLost("rank 1 is lost", rank=1))
        if generation == 2:
            return error_of(lambda: dist.recv(tensor, (rank + 1) % size))
        return tensor[0].item()
    except RingError as error:
        return type(error).__name__
    finally:
        leave()
        leave()  # the second time does nothing
        assert not dist.is_initialized()


def _sum(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    work: Any = dist.all_reduce(bucket.buffer(), async_op=True)
    future: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda done: done.value()[0])
    return future
