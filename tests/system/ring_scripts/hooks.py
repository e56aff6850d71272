"""Trainings with communication hooks and with settings of DistributedDataParallel, each over fedring and over Gloo."""

import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

from fedring.ddp.hooks import hook_by_name

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch's, of torch.jit
    from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
    from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

STEPS, ROWS = 4, 4
MANY = 0.0002  # MiB: each parameter is a bucket


class Flags(NamedTuple):
    """The settings of a training."""

    options: Mapping[str, Any] = MappingProxyType({})  # of DistributedDataParallel
    accumulate: int = 1  # batches per step; all but the last one without synchronisation
    head: str = (
        "one"  # the head that is used: "one" (the other is frozen), "static", "ranks" (each its own), "changing"
    )
    frozen: bool = False
    reentrant: bool | None = None  # how the body is checkpointed; None = not at all
    sparse: bool = False
    uneven: bool = False  # rank 0 has more batches than the others


FLAGS = {
    "plain": Flags(),
    "many buckets": Flags({"bucket_cap_mb": MANY}),
    "static graph": Flags({"static_graph": True}),
    "static graph, unused": Flags({"static_graph": True}, head="static"),
    "unused": Flags({"find_unused_parameters": True}, head="ranks"),
    "unused, changing": Flags({"find_unused_parameters": True, "bucket_cap_mb": MANY}, head="changing"),
    "views": Flags({"gradient_as_bucket_view": True}),
    "views, many buckets": Flags({"gradient_as_bucket_view": True, "bucket_cap_mb": MANY}, accumulate=2),
    "no sync": Flags(accumulate=3),
    "own buffers": Flags({"broadcast_buffers": False}),
    "buffers of the forward pass": Flags({"forward_sync_buffers": True}),
    "small gradients together": Flags({"batched_grad_copy": True}),
    "without unused": Flags({"find_unused_parameters": True, "skip_all_reduce_unused_params": True}, head="static"),
    "mixed precision": Flags({"mixed_precision": _MixedPrecision(torch.bfloat16, torch.bfloat16)}),
    "checkpointed": Flags({"static_graph": True}, reentrant=True),
    "checkpointed anew": Flags(reentrant=False),
    "frozen": Flags(frozen=True),
    "sparse": Flags(sparse=True),
    "uneven": Flags(uneven=True),
    "uneven, many buckets": Flags({"bucket_cap_mb": MANY}, uneven=True),
}

Register = Callable[[DistributedDataParallel, dist.ProcessGroup], None]


def _torch_hook(hook: Any, state: Callable[[dist.ProcessGroup], Any] = lambda group: group) -> Register:
    return lambda model, group: model.register_comm_hook(state(group), hook)


def _power(group: dist.ProcessGroup) -> powerSGD_hook.PowerSGDState:
    return powerSGD_hook.PowerSGDState(
        group, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=1
    )


def _local(group: dist.ProcessGroup) -> post_localSGD_hook.PostLocalSGDState:
    return post_localSGD_hook.PostLocalSGDState(group, group, start_localSGD_iter=2)  # type: ignore[no-untyped-call]  # torch's


def _builtin(kind: BuiltinCommHookType) -> Register:
    return lambda model, group: model._register_builtin_comm_hook(kind)  # type: ignore[no-untyped-call]  # torch's


def _own(text: str) -> Register:
    return lambda model, group: model.register_comm_hook(*hook_by_name(text, model.module.named_parameters(), group))


def _overlapped(model: DistributedDataParallel, group: dist.ProcessGroup) -> None:
    """Step with the optimizer inside of the hook, as soon as a bucket is reduced."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's, of torch.jit
        model._register_fused_optim(torch.optim.SGD, 0.05)


HOOKS: dict[str, Register] = {
    "none": lambda model, group: None,
    "torch allreduce": _torch_hook(default_hooks.allreduce_hook),
    "torch fp16": _torch_hook(default_hooks.fp16_compress_hook),
    "torch bf16": _torch_hook(default_hooks.bf16_compress_hook),
    "torch power": _torch_hook(powerSGD_hook.powerSGD_hook, _power),
    "torch batched power": _torch_hook(powerSGD_hook.batched_powerSGD_hook, _power),
    "torch fp16(power)": _torch_hook(default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook), _power),
    "torch local SGD": _torch_hook(post_localSGD_hook.post_localSGD_hook, _local),
    "torch quantization": _torch_hook(quantization_hooks.quantization_pertensor_hook),
    "torch quantization by channel": _torch_hook(quantization_hooks.quantization_perchannel_hook),
    "torch noop": _torch_hook(noop_hook),
    "C++ allreduce": _builtin(BuiltinCommHookType.ALLREDUCE),
    "C++ fp16": _builtin(BuiltinCommHookType.FP16_COMPRESS),
    "optimizer in the hook": _overlapped,
    **{name: _own(name) for name in ("fp16", "bf16", "int8", "powersgd", "batched_powersgd", "noop")},
    "topk": _own("topk(ratio=0.3)"),
    "dgc": _own("dgc(ratio=0.3, warmup_epochs=0)"),
}


LOCAL = ("torch local SGD", "torch noop", "noop")
"""Hooks with which ranks may end with different parameters."""
TRAINED = 270
"""The number of parameters of a Network, which are the first of the values that `train` returns."""


class Network(nn.Module):
    """An embedding, a body with a BatchNorm, and two heads of which a batch may use one."""

    def __init__(self, flags: Flags) -> None:
        super().__init__()
        self.words = nn.Embedding(12, 6, sparse=flags.sparse)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8))
        self.heads = nn.ModuleList([nn.Linear(8, 3), nn.Linear(8, 3)])
        self.flags = flags
        if flags.frozen:
            self.body[0].requires_grad_(False)
        if flags.head == "one":
            self.heads[1].requires_grad_(False)

    def forward(self, words: Tensor, head: int) -> Tensor:
        """Logits [rows, 3] of words [rows]."""
        features = self.words(words)
        if self.flags.reentrant is None:
            features = self.body(features)
        else:
            features = checkpoint(self.body, features, use_reentrant=self.flags.reentrant)
        logits: Tensor = self.heads[head](features.relu())
        return logits


def train(hook: str, flags: Flags, group: dist.ProcessGroup) -> Tensor:
    """Train over the group, and return the parameters and the buffers."""
    rank = group.rank()
    torch.manual_seed(3)
    network = Network(flags)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's, of broadcast_buffers
        model = DistributedDataParallel(network, process_group=group, **flags.options)
    HOOKS[hook](model, group)
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.05)
    steps = STEPS + 2 if flags.uneven and rank == 0 else STEPS
    with model.join() if flags.uneven else nullcontext():
        for step in range(steps):
            optimizer.zero_grad()
            for part in range(flags.accumulate):
                generator = torch.Generator().manual_seed(1000 * step + 10 * part + rank)
                words = torch.randint(0, 12, (ROWS,), generator=generator)
                head = {"one": 0, "static": 0, "ranks": rank % 2}.get(flags.head, (step + rank) % 2)
                with nullcontext() if part == flags.accumulate - 1 else model.no_sync():
                    torch.autograd.backward(functional.cross_entropy(model(words, head).float(), words % 3))
            if hook != "optimizer in the hook":
                optimizer.step()
    values = [*network.parameters(), *network.buffers()]
    return torch.cat([value.detach().flatten().double() for value in values])


def compare(rank: int, size: int, *, cases: Sequence[tuple[str, str]], gloo: bool = True) -> list[list[Any]]:
    """Train in each case over both backends.

    Args:
        rank: This rank.
        size: The number of ranks.
        cases: Names of a hook and of flags.
        gloo: Whether to train over Gloo, too.

    Returns:
        For each case and backend: the error, or "", and the parameters and buffers.
    """
    groups = [dist.group.WORLD, dist.new_group(backend="gloo")]
    results = []
    for hook, name in cases:
        results.append([_attempt(hook, FLAGS[name], group) for group in groups[: 1 + gloo]])
    return results


def _attempt(hook: str, flags: Flags, group: Any) -> tuple[str, list[float]]:
    try:
        return "", train(hook, flags, group).tolist()
    except Exception as error:  # noqa: BLE001  # Gloo's may be any
        return f"{type(error).__name__}: {str(error)[:200]}", []


def share(rank: int, size: int) -> tuple[str, list[list[float]]]:
    """Train a module in two models by turns, and register a second hook.

    Return the error, and all parameters of each rank.
    """
    torch.manual_seed(1)
    shared = nn.Linear(3, 3)
    models = [DistributedDataParallel(nn.Sequential(shared, nn.Linear(3, 2))) for _ in range(2)]
    parameters = [parameter for model in models for parameter in model.parameters()]
    optimizer = torch.optim.SGD(set(parameters), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for model in models:
            inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank))
            torch.autograd.backward(model(inputs).square().sum())
        optimizer.step()
    models[0].register_comm_hook(None, default_hooks.allreduce_hook)
    error = ""
    try:
        models[0].register_comm_hook(None, default_hooks.fp16_compress_hook)
    except RuntimeError as refused:
        error = str(refused)
    return error, _of_all(parameters)


def average(rank: int, size: int) -> list[float]:
    """Train by local SGD, where pairs of ranks average often and all ranks average rarely."""
    torch.manual_seed(1)
    network = nn.Linear(4, 2)
    model = DistributedDataParallel(network)
    untyped: Any = dist
    make_state: Any = post_localSGD_hook.PostLocalSGDState
    state = make_state(None, untyped.new_subgroups(2)[0], start_localSGD_iter=2)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    make_averager: Any = HierarchicalModelAverager
    averager = make_averager(OrderedDict([(2, 2), (4, 4)]), warmup_steps=2)
    optimizer: Any = PostLocalSGDOptimizer(torch.optim.SGD(network.parameters(), lr=0.1), averager)
    for step in range(2 * STEPS + 3):  # the last step averages over all
        optimizer.zero_grad()
        inputs = torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * step + rank))
        torch.autograd.backward(model(inputs).square().sum())
        optimizer.step()
    periodic = PeriodicModelAverager(period=2)
    for _ in range(2):
        periodic.average_parameters(network.parameters())
    return torch.cat([parameter.detach().flatten() for parameter in network.parameters()]).tolist()


def shard(rank: int, size: int, *, overlapped: bool = False) -> list[float]:
    """Train with an optimizer whose state is sharded; with `overlapped`, it steps while gradients are reduced."""
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    model = DistributedDataParallel(network, bucket_cap_mb=MANY, gradient_as_bucket_view=overlapped)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of functional optimizers
        optimizer = ZeroRedundancyOptimizer(
            network.parameters(), torch.optim.Adam, lr=0.01, overlap_with_ddp=overlapped
        )
    if overlapped:
        hook = hook_with_zero_step(default_hooks.allreduce_hook, model, optimizer)
        model.register_comm_hook(None, hook)
    for step in range(2 * STEPS + 2 * overlapped):  # the overlapped one has seen its buckets after two steps
        optimizer.zero_grad()
        inputs = torch.randn(4, 4, generator=torch.Generator().manual_seed(max(0, step - 2 * overlapped) + 10 * rank))
        torch.autograd.backward(model(inputs).square().sum())
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in network.parameters()]).tolist()


def _of_all(parameters: Sequence[Tensor]) -> list[list[float]]:
    mine = torch.cat([parameter.detach().flatten() for parameter in parameters])
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return [one.tolist() for one in every]
