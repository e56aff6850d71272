"""What torch builds on a group: compiled trainings, checkpoints, profiles, and collectives with gradients.

Each function returns what does not depend on the backend, so that a test can compare it with Gloo's.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.autograd.profiler import record_function
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse, async_save, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _device_capability, _get_default_group
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import fedring.ring
from tests.system.ring_scripts.collectives import started
from tests.system.ring_scripts.ranks import error_of

differentiable: Any = torch.distributed.nn.functional  # without types
CPU = torch.device("cpu")


@contextmanager
def torch_may_warn() -> Iterator[None]:
    """Let torch warn of its own parts, which elsewhere is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 8))


def train(model: Any, parameters: Any, rank: int, *, rows: tuple[int, ...] = (4,)) -> list[float]:
    """Train for four steps, and return the loss of each."""
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    losses = []
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + rank)
        loss = model(torch.randn(rows[step % len(rows)], 8, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_compiled(rank: int, size: int, *, compiler: str, hook: str = "", python_reducer: bool = False) -> Any:
    """Train with DDP in many buckets and with changing shapes. Return losses and parameters; no compiler if ""."""
    dist._DEFAULT_FIRST_BUCKET_BYTES = 256  # type: ignore[attr-defined]
    if python_reducer:
        torch._dynamo.config.optimize_ddp = "python_reducer"
        torch._dynamo.config.compiled_autograd = True
    with torch_may_warn():
        model = DistributedDataParallel(network(), bucket_cap_mb=0.0005)
        if hook:
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        compiled = torch.compile(model, backend=compiler) if compiler else model
        losses = train(compiled, model.parameters(), rank, rows=(4,) if python_reducer else (4, 7, 5))
    return losses, [parameter.flatten().tolist() for parameter in model.parameters()]


def train_sharded(rank: int, size: int, *, compiler: str = "") -> Any:
    """Train with FSDP2, and return losses and parameters."""
    with torch_may_warn():
        model = network()
        mesh = init_device_mesh("cpu", (size,))
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
        compiled = torch.compile(model, backend=compiler) if compiler else model
        losses = train(compiled, model.parameters(), rank)
        return losses, [value.full_tensor().flatten().tolist() for value in model.state_dict().values()]


def collectives_with_gradients(rank: int, size: int) -> Any:
    """Return the results and the gradients of the collectives of torch.distributed.nn, and of functional ones."""
    group = _get_default_group()
    functions: dict[str, Callable[[Tensor], Any]] = {
        "broadcast": lambda given: differentiable.broadcast(given, 0),
        "gather": lambda given: differentiable.gather(given, 0),
        "scatter": lambda given: differentiable.scatter([given, 2 * given], 0),
        "reduce": lambda given: differentiable.reduce(given, 0),
        "reduce_scatter": lambda given: differentiable.reduce_scatter(torch.empty(4), [given, 2 * given]),
        "all_gather": differentiable.all_gather,
        "all_to_all": lambda given: differentiable.all_to_all([torch.empty(4), torch.empty(4)], [given, 2 * given]),
        "all_to_all_single": lambda given: differentiable.all_to_all_single(torch.empty(4), given),
        "all_reduce": differentiable.all_reduce,
        "functional all_gather": lambda given: functional.all_gather_tensor_autograd(given, 0, group),
        "functional reduce_scatter": lambda given: functional.reduce_scatter_tensor_autograd(given, "sum", 0, group),
        "functional all_to_all": lambda given: functional.all_to_all_single_autograd(given, None, None, group),
    }
    results = {}
    with torch_may_warn():
        for name, function in functions.items():
            given = (torch.arange(4.0) + 10 * rank).requires_grad_()
            outputs = function(given)
            outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
            weights = torch.arange(1.0 + rank, 3.0 + rank)  # not a scalar: Gloo's scatter misreads expanded gradients
            torch.stack([(output.view(-1, 2) * weights).sum() for output in outputs]).sum().backward()  # type: ignore[no-untyped-call]
            here = rank == 0 or name not in ("reduce", "gather")  # on other ranks than the root, Gloo writes anything
            results[name] = [output.tolist() for output in outputs if here], given.grad
    return {name: (outputs, grad.tolist()) for name, (outputs, grad) in results.items() if grad is not None}


def functional_collectives(rank: int, size: int, *, compiler: str = "") -> Any:
    """Return the results of functional collectives, of those in place, and of those that Dynamo makes functional."""
    group = _get_default_group()

    def function(given: Tensor) -> list[Tensor]:
        copy = given * 2
        dist.all_reduce(copy)
        work = dist.all_gather_into_tensor(gathered := given.new_empty(8, 4), given, async_op=True)
        started(work).wait()
        return [
            copy + 0,
            gathered + 0,
            functional.all_reduce(given, "avg", group) + 0,
            functional.broadcast(given, 1, group) + 0,
            functional.all_gather_tensor(given, 1, group) + 0,
            functional.reduce_scatter_tensor(given, "sum", 0, group) + 0,
            functional.all_to_all_single(given, None, None, group) + 0,
            *[one + 0 for one in functional.all_reduce_coalesced([given, copy], "sum", group)],
            *[one + 0 for one in functional.all_gather_into_tensor_coalesced([given, copy], group)],
            *[one + 0 for one in functional.reduce_scatter_tensor_coalesced([given, copy], "sum", [0, 0], group)],
        ]

    with torch_may_warn():
        run = torch.compile(function, backend=compiler) if compiler else function
        return [one.tolist() for one in run(torch.arange(16.0).view(4, 4) + rank)]


def distributed_tensors(rank: int, size: int) -> Any:
    """Return values of DTensors that are placed anew, a training with tensor parallelism, and one with a pipeline."""
    mesh = init_device_mesh("cpu", (size,))
    placements = (Shard(0), Shard(1), Replicate())
    results: list[Any] = []
    with torch_may_warn():
        for before in placements:
            tensor = distribute_tensor(torch.arange(16.0).view(4, 4), mesh, [before])
            results += [tensor.redistribute(mesh, [after]).full_tensor().tolist() for after in placements]
        for reduction in ("sum", "avg", "max"):
            partial = DTensor.from_local(torch.full((4,), float(rank)), mesh, [Partial(reduction)])
            results += [partial.redistribute(mesh, [Shard(0)]).full_tensor().tolist()]
        model = network()
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        results.append(train(model, model.parameters(), rank=0))
        stage = PipelineStage(network()[:2] if rank == 0 else network()[2:], rank, size, CPU)
        schedule = ScheduleGPipe(stage, 4, loss_fn=nn.functional.mse_loss)
        given = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
        losses: list[Tensor] = []
        schedule.step(given) if rank == 0 else schedule.step(target=given, losses=losses)
        results.append([loss.item() for loss in losses])
    return results


def checkpoints(rank: int, size: int, *, folder: str, process: bool = False) -> Any:
    """Save and load, at once and in the background while the default group computes; return what is loaded."""
    mesh = init_device_mesh("cpu", (size,))
    background: Any = dist.new_group(list(range(size)))

    def state(value: float) -> dict[str, Any]:
        sharded = distribute_tensor(torch.arange(8.0).view(4, 2) * value, mesh, [Shard(0)])
        return {"plain": torch.full((3,), value), "sharded": sharded, "value": value}

    def loaded(path: Path) -> Any:
        found = state(0.0)
        load(found, checkpoint_id=path)
        return found["plain"].tolist(), found["sharded"].full_tensor().tolist(), found["value"]

    with torch_may_warn():
        save(state(1.0), checkpoint_id=Path(folder) / "1")
        save(state(2.0), checkpoint_id=Path(folder) / "2", process_group=background)
        kind = AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD
        group = None if process else background
        saving = async_save(
            state(3.0), checkpoint_id=Path(folder) / "3", process_group=group, async_checkpointer_type=kind
        )
        total = torch.ones(3)
        for _ in range(5):
            dist.all_reduce(total)
        (saving.upload_completion if isinstance(saving, AsyncSaveResponse) else saving).result()
        return [loaded(Path(folder) / str(number)) for number in (1, 2, 3)], total.tolist()


def properties(rank: int, size: int) -> Any:
    """Return what torch's functions say of the group."""
    group = _get_default_group()
    pair: Any = dist.new_group([0, 1], group_desc="pair")
    with torch_may_warn():
        planes = init_device_mesh("cpu", (size, 1), mesh_dim_names=("data", "tensor"))
        return {
            "devices": sorted(_device_capability()),
            "bound": group.bound_device_id,
            "hooks": group._has_hooks(),
            "described": pair.group_desc,
            "subgroup": dist.new_subgroups(1)[0].size(),  # type: ignore[no-untyped-call]
            "planes": [planes[name].size() for name in ("data", "tensor")],
            "allocates": group._get_backend(CPU).supports_tensor_alloc(CPU),
        }


def refusals(rank: int, size: int) -> Any:
    """Return the errors of the methods of a group in which torch itself would crash."""
    group: Any = _get_default_group()
    return [
        error_of(lambda: group.split_group([0, 1])),
        error_of(lambda: group.merge_remote_group(HashStore(), size, timedelta(seconds=1))),
    ]


def barrier_that_all_reach(rank: int, size: int) -> Any:
    pair = dist.new_group([0, 1])

    def body() -> None:
        fedring.ring.monitored_barrier()
        fedring.ring.monitored_barrier(pair, timedelta(seconds=60), wait_all_ranks=True)  # rank 2 is not in it
        fedring.ring.monitored_barrier()

    return error_of(body)


def barrier_without_rank_1(rank: int, size: int) -> Any:
    if rank == 1:
        return error_of(lambda: dist.recv(torch.ones(1), 0))
    return error_of(lambda: fedring.ring.monitored_barrier(None, timedelta(seconds=1), wait_all_ranks=True))


def profile(body: Callable[[], None]) -> Any:
    """Run `body` under the profiler, and return the events."""
    with (
        torch_may_warn(),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler,
    ):
        body()
    return profiler.events()


def names_of_records(rank: int, size: int) -> Any:
    """Return the shapes in every record of the backend, by its name."""

    def body() -> None:
        ones = torch.ones(2)
        dist.all_reduce(torch.ones(3, 4))
        dist.broadcast(ones, 0)
        dist.reduce(ones, 0)
        dist.all_gather([torch.ones(2), torch.ones(2)], ones)
        dist.reduce_scatter_tensor(torch.ones(2), torch.ones(4))
        dist.gather(ones, [torch.ones(2), torch.ones(2)] if rank == 0 else None)
        dist.scatter(torch.ones(2), [ones, ones] if rank == 0 else None)
        dist.all_to_all_single(torch.ones(2), ones)
        dist.barrier()
        fedring.ring.allgather_bytes(b"1").wait()
        if rank == 0:
            dist.send(ones, 1)
            dist.recv(ones)
        else:
            dist.recv(ones, 0)
            dist.send(ones, 0)

    return {event.name: event.input_shapes for event in profile(body) if event.name.startswith("fedring:")}


def length_of_a_record(rank: int, size: int) -> Any:
    """Return whether rank 0's record of an all-reduce has begun and ended before rank 0 lets rank 1 take part."""

    def body() -> None:
        if rank == 0:
            work = dist.all_reduce(torch.ones(3), async_op=True)
            with record_function("letting"):
                dist.send(torch.ones(1), 1)
            started(work).wait()
        else:
            dist.recv(torch.ones(1), 0)
            dist.all_reduce(torch.ones(3))

    times = {event.name: event.time_range for event in profile(body)}
    if rank:
        return None
    reducing, letting = times["fedring:all_reduce"], times["letting"].start
    return reducing.start < letting, reducing.end < letting


def record_of_a_failure(rank: int, size: int) -> Any:
    """Return the error, and whether the record has ended when the caller has the error."""
    errors = []

    def body() -> None:
        errors.append(error_of(lambda: dist.all_reduce(torch.ones(3 + rank))))
        with record_function("after"):
            pass

    times = {event.name: event.time_range for event in profile(body)}
    return errors[0]["kind"], times["fedring:all_reduce"].end <= times["after"].start


def records_of_a_training(rank: int, size: int) -> Any:
    """Return how many all-reduces the two profilers of torch see in four steps of DDP."""
    with torch_may_warn():
        model = DistributedDataParallel(network())
        profiler = torch.autograd.profiler.profile()
        with profiler:
            train(model, model.parameters(), rank)
        legacy = [event.name for event in profiler.function_events or []]
        events = [event.name for event in profile(lambda: [train(model, model.parameters(), rank)].clear())]
    return [names.count("fedring:all_reduce") for names in (legacy, events)]
