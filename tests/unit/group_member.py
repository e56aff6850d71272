"""One member of a gloo group. test_workers_data_parallel.py runs each member in its own process."""

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.utils.data import Dataset

from fedring.client.group.checkpoints import JobCheckpoints
from fedring.client.group.hooks import JobHook, make_hook
from fedring.data import Samples
from fedring.ddp.hooks.summing import Bucket
from fedring.offers import offers
from fedring.train.errors import SeamError, TrainError
from fedring.train.jobs.data_parallel_table import HOOKS, DataParallel
from fedring.train.loop import random_state
from fedring.train.losses import cross_entropy
from fedring.train.names.offered import collect
from fedring.train.plan import Plan
from fedring.workers.data_parallel_epochs import DataParallelSetup, DataParallelTraining
from fedring.workers.replica import Progress, Replica, all_equal, synchronize
from fedring.workers.training import Watcher

SIZE = 70


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def samples() -> Samples:
    generator = torch.Generator().manual_seed(1)
    return Samples(torch.randn(SIZE, 6, generator=generator), torch.randint(3, (SIZE,), generator=generator))


class Halves(Dataset[Any]):
    """The same samples, with two inputs that have names."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        inputs, label = samples()[index]
        return {"left": inputs[:3], "right": inputs[3:]}, label


class Named(nn.Module):
    """A model of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.net(torch.cat((left, right), dim=1))
        return outputs


def setup_of(plan: Plan, **table: Any) -> DataParallelSetup:
    parsed = DataParallel.model_validate(table)
    return DataParallelSetup(samples(), plan, parsed, cross_entropy, torch.device("cpu"), total_epochs=plan.epochs)


def replica_of(model: nn.Module, momentum: float = 0.9) -> Replica:
    return Replica(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum))


def train(replica: Replica, setup: DataParallelSetup, watcher: Watcher | None = None) -> DataParallelTraining:
    hook = make_hook(setup.table, setup.plan, replica.model.named_parameters(), collect([__name__]))
    hook.enter(0, replica.progress.steps)
    training = DataParallelTraining(replica, setup, hook, watcher or Watcher())
    training.run()
    return training


def result_of(replica: Replica, training: DataParallelTraining, **more: Any) -> dict[str, Any]:
    """Return what tests compare between members."""
    buffers = [float(buffer.double().sum()) for buffer in replica.model.buffers()]
    return {
        "digest": replica.digest().hex(),
        "steps": replica.progress.steps,
        "weights": [float(p.detach().double().sum()) for p in replica.model.parameters()],
        "buffers": buffers,
        "usage": training.usage.metrics,
        "momentum": [
            float(s["momentum_buffer"].sum())
            for s in replica.optimizer.state.values()
            if s.get("momentum_buffer") is not None
        ],
        **more,
    }


def plain(rank: int, *, subset_size: int = 0, **table: Any) -> dict[str, Any]:
    """Train two epochs, with equal models at the start."""
    replica = replica_of(net(), 0.0 if table.get("hook") == "dgc" else 0.9)
    setup = setup_of(Plan(epochs=2, batch_size=8, seed=5, momentum=0.9, subset_size=subset_size), **table)
    return result_of(replica, train(replica, setup), equal=all_equal(replica))


def failing(rank: int) -> dict[str, Any]:
    """Train with a hook of the user's own that needs a state and has none; return the error."""
    replica, setup = replica_of(net()), setup_of(Plan(batch_size=8), hook="tests.unit.group_member:needs_a_state")
    try:
        train(replica, setup)
    except SeamError as error:
        return {"reason": error.reason, "error": str(error)}
    return {}


def without_samples(rank: int) -> dict[str, Any]:
    """Train on no samples; return the error."""
    replica, setup = replica_of(net()), setup_of(Plan(batch_size=8))
    try:
        train(replica, replace(setup, samples=samples().subset(np.arange(0))))
    except TrainError as error:
        return {"reason": error.reason}
    return {}


class Slowing(torch.optim.SGD):
    """An optimizer that keeps the number of its steps in its groups, as some do, and takes smaller ones."""

    def step(self, closure: Any = None) -> Any:
        """Take a step, and count it."""
        for group in self.param_groups:
            group["taken"] = group.get("taken", 0) + 1
            group["weight_decay"] = 0.1 / group["taken"]
        return super().step(closure)


class Estimating(torch.optim.SGD):
    """An optimizer that keeps an estimate in its groups as a tensor, as some do, and takes smaller steps by it."""

    def step(self, closure: Any = None) -> Any:
        """Add the squares of the gradients to the estimate, and take a step."""
        for group in self.param_groups:
            gradients = [parameter.grad for parameter in group["params"] if parameter.grad is not None]
            group["seen"] = group.get("seen", torch.zeros(2)) + sum(float(g.square().sum()) for g in gradients)
            for gradient in gradients:
                gradient.div_(1 + group["seen"][1])
        return super().step(closure)


def newcomer(rank: int, optimizer: type[torch.optim.SGD] = torch.optim.SGD) -> dict[str, Any]:
    """Join with another model and without momentum, while rank 0 is in the middle of an epoch."""
    model = net()
    replica = Replica(model, optimizer(model.parameters(), lr=0.05, momentum=0.9))
    if rank == 0:
        for _ in range(3):
            replica.optimizer.zero_grad()
            model(samples().inputs).sum().backward()
            replica.optimizer.step()
        replica.progress.steps, replica.progress.taken = 3, 24
    else:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(rank)
    source = synchronize(replica)
    again = synchronize(replica)
    training = train(replica, setup_of(Plan(epochs=1, batch_size=8, seed=5)))
    return result_of(replica, training, source=source, again=again, equal=all_equal(replica))


def broken_newcomer(rank: int) -> dict[str, Any]:
    """Join as rank 0, in a group that fails before rank 1 has sent all of its state, and then in one that does not."""
    replica = replica_of(net())
    if rank == 1:
        for _ in range(3):
            replica.optimizer.zero_grad()
            replica.model(samples().inputs).sum().backward()
            replica.optimizer.step()
        replica.progress.steps, replica.progress.taken = 3, 24
    before, broadcast, left = replica.digest(), dist.broadcast, 4  # the progress, and three tensors of the model

    def until_it_fails(*arguments: Any, **options: Any) -> Any:
        nonlocal left
        if not left:
            raise RuntimeError("a worker is lost")
        left -= 1
        return broadcast(*arguments, **options)

    dist.broadcast = until_it_fails
    try:
        with pytest.raises(RuntimeError, match="a worker is lost"):
            synchronize(replica)
    finally:
        dist.broadcast = broadcast
    kept = replica.digest() == before
    source = synchronize(replica)
    return {
        "before": before.hex(),
        "kept": kept,
        "source": source,
        "digest": replica.digest().hex(),
        "taken": replica.progress.taken,
    }


def named_inputs(rank: int) -> dict[str, Any]:
    """Go on within a round from a checkpoint, with a model whose inputs have names."""
    setup = replace(setup_of(Plan(epochs=1, batch_size=8, seed=5)), samples=Halves())
    replica = replica_of(Named())
    hook = make_hook(setup.table, setup.plan, replica.model.named_parameters(), collect([__name__]))
    hook.enter(0, 1)
    replica.progress = Progress(steps=1, round_steps=1, taken=16)
    training = DataParallelTraining(replica, setup, hook, random=random_state(torch.device("cpu")))
    training.run()
    return result_of(replica, training, equal=all_equal(replica))


def newcomer_to(rank: int, hook: str, **table: Any) -> dict[str, Any]:
    """Replace rank 1 after an epoch by a worker without any state, and train another epoch."""
    setup = setup_of(Plan(epochs=1, batch_size=8, seed=5), hook=hook, start_iteration=2, ratio=0.2, **table)
    replica, hook_state = _member(setup)
    hook_state.enter(0, 0)
    DataParallelTraining(replica, setup, hook_state).run()
    if rank == 1:
        replica, hook_state = _member(setup)
    hook_state.leave()
    source = synchronize(replica)
    hook_state.enter(0 if rank == 1 else 2, replica.progress.steps)
    replica.begin_round()
    training = DataParallelTraining(replica, setup, hook_state)
    training.run()
    hook_state.leave()
    shared = {name: tensor.double().sum().item() for name, tensor in replica.shared.items()}
    return result_of(replica, training, source=source, equal=all_equal(replica), shared=shared)


def broken_off(rank: int, hook: str, *, completed: bool, missed: bool = False, **table: Any) -> dict[str, Any]:
    """Break off a step on rank 1 once all has left, and form the group again; return how far the law is off.

    Rank 0 completes the step, or breaks off as well. With `missed`, rank 1 is not in the next group, which takes two.
    """
    layer = nn.Linear(32, 24, bias=False)
    parsed = DataParallel.model_validate({"hook": hook, "start_iteration": 2, "ratio": 0.1, **table})
    job_hook = make_hook(parsed, Plan(), layer.named_parameters(), collect([]))
    replica = replica_of(layer)
    replica.shared = job_hook.shared

    def gradient(step: int) -> torch.Tensor:
        return torch.randn(24, 32, generator=torch.Generator().manual_seed(2 * step + rank))

    def exchange(step: int) -> torch.Tensor:
        bucket: Any = Bucket([layer.weight], [gradient(step)], 0, last=True)
        return job_hook.function(job_hook.state, bucket).wait().clone()

    def form_again(steps: int) -> None:
        job_hook.leave()
        replica.progress.steps = max(replica.progress.steps, steps if rank == 0 else 0)
        synchronize(replica)
        job_hook.enter(2, replica.progress.steps)

    job_hook.enter(0, 0)
    for step in range(4):
        exchange(step)
        job_hook.end_step()
    replica.progress.steps = 4
    owed = job_hook.state.owed()["weight"].clone()
    result = torch.zeros(24 * 32)
    if rank == 0 and completed:
        result += exchange(4)
        job_hook.end_step()
    else:
        with _breaking_off(job_hook), pytest.raises(RuntimeError, match="a worker is lost"):
            exchange(4)
    form_again(6 if missed else 4 + completed)
    law = job_hook.state.owed()["weight"] + result * (2 - 2 * rank) - owed - gradient(4).flatten() * completed
    dist.all_reduce(law)
    return {"off": float(law.abs().max()), "size": float(owed.abs().max())}


@contextmanager
def _breaking_off(hook: JobHook) -> Iterator[None]:
    """Raise an error after the last message of a step, before this worker knows the others'."""
    turns = hook.state.turns
    waits = 1 if hook.state.kind == "topk" else 2

    def finish() -> None:
        nonlocal waits
        while True:
            waits -= 1
            for bucket in turns._buckets:  # as Turns does, but for the end
                result = bucket.collective.work.wait()
                if not waits:
                    raise RuntimeError("a worker is lost")
                bucket.collective = bucket.steps.send(result)

    turns._finish = finish  # type: ignore[method-assign]
    try:
        yield
    finally:
        del turns._finish


def two_histories(rank: int, *, same_round: bool, other: int = 10) -> dict[str, Any]:
    """Go on from checkpoints of the same step that two groups have taken, or one if `other` is 0."""
    replica, hook = _member(setup_of(Plan(batch_size=8), hook="topk"))
    for step in range(3):
        replica.optimizer.zero_grad()
        torch.manual_seed(step + other * rank)
        replica.model(torch.randn(8, 6)).square().sum().backward()
        replica.optimizer.step()
    replica.progress.steps = 3
    for buffer in replica.model.buffers():  # BatchNorm's statistics differ between the workers of one group, too.
        buffer.add_(rank)
    with TemporaryDirectory() as folder:
        JobCheckpoints(Path(folder), "job").take(replica, hook, {}, round_=1)
        checkpoints = JobCheckpoints(Path(folder), "job")
        replica, hook = _member(setup_of(Plan(batch_size=8), hook="topk"))
        found = checkpoints.resume(replica, hook, live=False, round_=1 if same_round else 2)
    synchronize(replica)
    momentum = [float(state["momentum_buffer"].sum()) for state in replica.optimizer.state.values()]
    return {"on_all": found and found.on_all, "equal": all_equal(replica), "momentum": momentum}


def _member(setup: DataParallelSetup) -> tuple[Replica, JobHook]:
    replica = replica_of(net())
    hook = make_hook(setup.table, setup.plan, replica.model.named_parameters(), collect([__name__]))
    replica.shared = hook.shared
    return replica, hook


SCENARIOS: dict[str, Any] = {
    "none": lambda rank: plain(rank),
    "fp16": lambda rank: plain(rank, hook="fp16"),
    "bf16": lambda rank: plain(rank, hook="bf16"),
    "dgc": lambda rank: plain(rank, hook="dgc", ratio=0.05),
    "accumulated": lambda rank: plain(rank, accumulation_steps=2),
    "wrapped": lambda rank: plain(rank, hook="fp16(powersgd)", start_iteration=2),
    "own": lambda rank: plain(rank, hook="tests.unit.group_member:own_hook"),
    "own with state": lambda rank: plain(rank, hook="tests.unit.group_member:own_with_state"),
    "cosine": lambda rank: plain(rank, lr_schedule="cosine"),
    "cosine of a large subset": lambda rank: plain(rank, lr_schedule="cosine", subset_size=2 * SIZE),
    "late buffers": lambda rank: plain(rank, buffers="before_evaluation"),
    "some buffers": lambda rank: plain(rank, buffers=1),
    "failing": failing,
    "without samples": without_samples,
    "newcomer": newcomer,
    "newcomer to an optimizer with values in groups": partial(newcomer, optimizer=Slowing),
    "newcomer to an optimizer with tensors in groups": partial(newcomer, optimizer=Estimating),
    "broken newcomer": broken_newcomer,
    "named inputs": named_inputs,
    "two histories": partial(two_histories, same_round=True),
    "one history": partial(two_histories, same_round=True, other=0),
    "two histories in another round": partial(two_histories, same_round=False),
    **{hook: partial(plain, hook=hook, ratio=0.2, start_iteration=2) for hook in HOOKS[3:-1]},
    **{f"newcomer to {hook}": partial(newcomer_to, hook=hook) for hook in HOOKS[3:-1]},
    **{
        f"{hook} {end}": partial(broken_off, hook=hook, completed=end == "completed elsewhere", missed=end == "missed")
        for hook in ("topk", "powersgd", "int8")
        for end in ("completed elsewhere", "repeated", "missed")
    },
    "newcomer to int8 ef21": partial(newcomer_to, hook="int8", feedback="ef21"),
    "newcomer to topk ef21": partial(newcomer_to, hook="topk", feedback="ef21"),
}


@offers("optimizer")
def nadam(parameters: Any, lr: float, momentum: float) -> torch.optim.Optimizer:
    """Return an optimizer that ignores the momentum that a job gives it."""
    return torch.optim.NAdam(parameters, lr)


@offers("hook")
def own_hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Exchange gradients like a user's own hook: it returns the sum instead of the mean."""
    work: Any = dist.all_reduce(bucket.buffer(), async_op=True)
    future: torch.futures.Future[Any] = work.get_future()
    return future.then(lambda done: done.value()[0])


class OwnSums:
    """The state of `own_with_state`: the steps, and the sum of all gradients of each parameter."""

    def __init__(self, named_parameters: list[tuple[str, torch.Tensor]]) -> None:
        self.buckets = 0
        self.sums = {name: torch.zeros_like(parameter) for name, parameter in named_parameters}
        self.names = {id(parameter): name for name, parameter in named_parameters}

    def state_dict(self) -> dict[str, Any]:
        return {"buckets": self.buckets, "sums": self.sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.buckets, self.sums = state["buckets"], {name: sum_.clone() for name, sum_ in state["sums"].items()}


@offers("hook")
def own_with_state(named_parameters: list[tuple[str, torch.Tensor]]) -> Any:
    """Return a state and a hook, as users' functions do: its momentum depends on the state."""

    def hook(state: OwnSums, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        state.buckets += 1
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            gradient.add_(state.sums[state.names[id(parameter)]].add_(gradient), alpha=0.1)
        return own_hook(None, bucket)

    return OwnSums(named_parameters), hook


@offers("hook")
def needs_a_state(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Fail like a hook with a state, if it gets none."""
    return own_hook(state.group, bucket)


def main(rank: int, size: int, folder: Path) -> None:
    """Run all scenarios, and write their results to FOLDER/RANK.json."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    results = {name: scenario(rank) for name, scenario in SCENARIOS.items()}
    dist.barrier()
    dist.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps(results))
