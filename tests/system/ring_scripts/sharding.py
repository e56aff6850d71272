"""Trainings with torch's FullyShardedDataParallel on CPU tensors, over the default group."""

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from tests.system.ring_scripts.ddp import STEPS, batch


class Sharding(NamedTuple):
    """How a model is sharded."""

    strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD
    bf16: bool = False  # the dtype of parameters and gradients while they are used and reduced
    original: bool = False  # whether the optimizer sees the parameters themselves
    clip: bool = False
    frozen: bool = False  # whether the first layer is not trained


SHARDINGS = {
    "full": Sharding(),
    "gradients and optimizer": Sharding(ShardingStrategy.SHARD_GRAD_OP),
    "none": Sharding(ShardingStrategy.NO_SHARD),
    "bf16": Sharding(bf16=True),
    "original parameters": Sharding(original=True, clip=True),
    "frozen layer": Sharding(ShardingStrategy.SHARD_GRAD_OP, original=True, frozen=True),
}


def train_sharded(rank: int, size: int) -> dict[str, list[float]]:
    """Train a model in each way, and return its whole parameters and momentum."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*deprecated", FutureWarning)  # NO_SHARD; scripts use it still
        return {name: _train(rank, sharding) for name, sharding in SHARDINGS.items()}


def _train(rank: int, sharding: Sharding) -> list[float]:
    torch.manual_seed(5)
    layers = [nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)]
    layers[0].requires_grad_(not sharding.frozen)
    half = MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16) if sharding.bf16 else None
    model = FullyShardedDataParallel(
        nn.Sequential(*layers),
        sharding_strategy=sharding.strategy,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        mixed_precision=half,
        use_orig_params=sharding.original,
        device_id=torch.device("cpu"),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        inputs, classes = batch(step, rank)
        loss: Any = nn.functional.cross_entropy(model(inputs).float(), classes)
        loss.backward()
        if sharding.clip:
            model.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    state = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
    momentum = [state[name]["momentum_buffer"].flatten().float() for name in sorted(state)]
    with FullyShardedDataParallel.summon_full_params(model):
        parameters = [parameter.detach().flatten().float() for parameter in model.parameters()]
        whole: Tensor = torch.cat([*parameters, *momentum])
        return whole.tolist()
