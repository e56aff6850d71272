"""The steps of `tests.bench.pipeline` on each rank.

They are steps of two stages, and trainings with several schedules.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from fedring.ctl.local.rank import Rank
from fedring.offers import named
from fedring.pipeline.cut import cut_by_counts
from fedring.pipeline.stage import Stage
from fedring.pipeline.stash import WeightStashing
from fedring.pipeline.transport import GroupTransport
from fedring.pipeline.worker import LocalPipeline, Worker
from fedring.schedules.schedule import one_forward_one_backward
from fedring.schedules.simulation import check
from fedring.train.batches import size_of
from fedring.train.evaluation import evaluate
from fedring.train.jobs.pipeline_table import Pipeline
from fedring.train.losses import cross_entropy
from fedring.train.names.offered import Offered, collect
from fedring.train.names.seam import build_model
from fedring.workers.cutting import count_layers, cut_model
from fedring.workers.shards import GroupRank, epoch_order, micro_batches, shares
from tests.bench.lab.groups import join_groups, largest
from tests.bench.lab.turns import alternate, time_call

ALONE, FEDRING, TORCH = "one device", "fedring", "torch"
_BATCH, _MOMENTUM = 64, 0.9

Step = Callable[[], None]


def split_sizes(
    rank: Rank, model: str, shape: Sequence[int], splits: Sequence[int], turns: int
) -> list[dict[str, Any]]:
    """Measure steps of a model cut into one stage per rank.

    Batches are split in several ways. Each rank stands for a device, and has one thread. The whole model on one of them
    takes turns with the stages over the ring and, for comparison, with torch.distributed.pipelining over Gloo.

    Args:
        rank: Which rank this process is.
        model: The function that makes the model, as module:name.
        shape: Shape of a batch of inputs.
        splits: Samples of a micro-batch; each divides the batch.
        turns: Turns to measure.

    Returns:
        For each way and split size: `way`, `split` and the `seconds` of a step in each turn, on the slowest rank.
    """
    ring = join_groups(rank).fedring
    inputs, targets = torch.randn(*shape), torch.randint(10, (shape[0],))
    counts = _counts(rank, model, inputs[: min(splits)])
    ours = our_steps(rank, _stage(rank, model, counts), ring)
    theirs = torch_steps(rank, _stage(rank, model, counts))
    ways: dict[tuple[str, int], Step] = {(ALONE, shape[0]): _alone(rank, model, inputs, targets)}
    for split in splits:
        ways[FEDRING, split] = ours(torch.split(inputs, split), torch.split(targets, split))
        if shape[0] // split >= rank.count:  # torch's schedule needs at least as many micro-batches as stages
            ways[TORCH, split] = theirs(inputs, targets, shape[0] // split)
    measures = {f"{way} {split}": partial(_measured, rank, step) for (way, split), step in ways.items()}
    for number, measure in enumerate(measures.values()):
        measure()  # the first steps allocate memory and exchange shapes
        rank.report(number + 1, len(measures) * (1 + turns))
    seconds: dict[str, list[float]] = {name: [] for name in measures}
    for turn in range(turns):
        for name, spent in alternate(measures, 1).items():
            seconds[name] += spent
        rank.report(2 + turn, 1 + turns)
    rank.leave()
    return [{"way": way, "split": split, "seconds": seconds[f"{way} {split}"]} for way, split in ways]


def _measured(rank: Rank, step: Step) -> float:
    dist.barrier()
    return largest(time_call(step))


def _counts(rank: Rank, model: str, sample: Tensor) -> list[int]:
    """Return the number of layers of each stage.

    Rank 0 has measured them.
    """
    counts = torch.zeros(rank.count, dtype=torch.int64)
    if rank.number == 0:
        table = Pipeline.model_validate({"stages": rank.count, "cut": "time"})
        network = build_model(model, {}, 0, collect(named(model=model)))
        counts = torch.tensor(count_layers(network, table, lambda: sample))
    dist.broadcast(counts, 0)
    return counts.tolist()


def _stage(rank: Rank, model: str, counts: Sequence[int]) -> nn.Module:
    return cut_by_counts(build_model(model, {}, 0, collect(named(model=model))), counts)[rank.number]


def _alone(rank: Rank, name: str, inputs: Tensor, targets: Tensor) -> Step:
    """Return a step of the whole model on rank 0.

    The other ranks wait meanwhile.
    """
    model = build_model(name, {}, 0, collect(named(model=name)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        if rank.number == 0:
            torch.autograd.backward(cross_entropy(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()

    return step


def our_steps(
    rank: Rank, module: nn.Module, group: dist.ProcessGroup
) -> Callable[[Sequence[Tensor], Sequence[Tensor]], Step]:
    """Return a maker of steps of this rank's stage with our pipeline.

    It makes a step from micro-batches.
    """
    stash = WeightStashing(torch.optim.SGD(module.parameters(), lr=1e-3))
    stage = Stage(module, stash, loss=cross_entropy if rank.number == rank.count - 1 else None)
    transport = GroupTransport(group)

    def make(inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> Step:
        worker = Worker({rank.number: stage}, one_forward_one_backward(rank.count, len(inputs)), transport)

        def step() -> None:
            worker.run(inputs, targets)

        return step

    return make


def torch_steps(
    rank: Rank, module: nn.Module, group: dist.ProcessGroup | None = None
) -> Callable[[Tensor, Tensor, int], Step]:
    """Return a maker of steps of this rank's stage with torch.distributed.pipelining.

    It makes a step from a batch, over the default group if none is given.
    """
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)

    def make(inputs: Tensor, targets: Tensor, count: int) -> Step:
        stage = PipelineStage(module, rank.number, rank.count, torch.device("cpu"), group=group)
        schedule: Any = Schedule1F1B(stage, count, cross_entropy)

        def step() -> None:
            given = [inputs] if rank.number == 0 else []
            schedule.step(*given, **({"target": targets} if rank.number == rank.count - 1 else {}))
            optimizer.step()
            optimizer.zero_grad()

        return step

    return make


def trainings(
    rank: Rank,
    model: str,
    model_args: dict[str, Any],
    data: str,
    data_root: str | None,
    *,
    runs: Sequence[Sequence[int]],
    tables: Sequence[dict[str, Any]],
    samples: int,
    lr: float,
) -> list[float]:
    """Train a pipeline that is in one process in several ways.

    The ranks share the trainings.

    Args:
        rank: Which rank this process is.
        model: The function that makes the model, as module:name.
        model_args: Its keyword arguments.
        data: The function that returns the samples, as module:name.
        data_root: Folder of the data sets.
        runs: For each training, the number of its table and its seed.
        tables: Tables `pipeline` of jobs.
        samples: Samples of a training, which sees each of them once; 0 = all.
        lr: Learning rate, with momentum 0.9.

    Returns:
        The accuracy of each training on the test samples, from 0 to 1.
    """
    rank.join("gloo")
    split = collect(named(data=data)).get("data", data)(Path(data_root) if data_root else None, False)
    accuracies = torch.zeros(len(runs), dtype=torch.float64)
    for index in range(rank.number, len(runs), rank.count):
        number, seed = runs[index]
        network = build_model(model, model_args, seed, collect(named(model=model)))
        _train(network, Pipeline.model_validate(tables[number]), split.train, samples, lr=lr, seed=seed)
        counts = evaluate(network, split.test, loss=cross_entropy, device=torch.device("cpu"))
        accuracies[index] = counts.accuracy or 0.0
        rank.report(index + 1, len(runs))
    dist.all_reduce(accuracies)
    rank.leave()
    return accuracies.tolist()


def _train(model: nn.Module, table: Pipeline, samples: Any, wanted: int, *, lr: float, seed: int) -> None:
    """Train the model for one epoch of `wanted` samples."""
    stages = _stages(model, table, lr)
    steps = shares(epoch_order(size_of(samples), seed=seed, epoch=0, wanted=wanted), 0, GroupRank(), _BATCH)
    every = int(table.micro_batches) if table.schedule == "pipedream" else 1  # batches of one run of the schedule
    while taken := list(islice(steps, every)):
        parts = [
            part
            for share in taken
            for part in micro_batches(share.indices, size=_BATCH // table.interval, most=table.interval)
        ]
        batches = [samples.batch(part) for part in parts]
        pipeline = LocalPipeline(stages, table.schedule_of(len(batches)))
        pipeline.run([inputs for inputs, _ in batches], [labels for _, labels in batches])


def _stages(model: nn.Module, table: Pipeline, lr: float) -> list[Stage]:
    modules = cut_model(model, table, count_layers(model, table, torch.empty), Offered())
    needs = check(table.schedule_of(int(table.micro_batches)))
    stages = []
    for number, (module, need) in enumerate(zip(modules, needs, strict=True)):
        stash = WeightStashing(torch.optim.SGD(module.parameters(), lr=lr, momentum=_MOMENTUM), bound=need.versions)
        stages.append(Stage(module, stash, loss=cross_entropy if number == len(modules) - 1 else None))
    return stages
