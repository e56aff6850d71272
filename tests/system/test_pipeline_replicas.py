"""Replicated stages and tensors that skip stages, in separate processes, over Gloo and over the ring."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedring.ddp.hooks.by_name import HOOKS, hook_by_name
from fedring.ddp.hooks.summing import HookedSum
from fedring.pipeline.messages import HEADER_BYTES, Key, StageMessage, header
from fedring.pipeline.replicas import stage_group
from fedring.pipeline.stage import Stage
from fedring.pipeline.stash import WeightStashing
from fedring.pipeline.transport import GroupTransport, LocalTransport, tag_of
from fedring.pipeline.worker import LocalPipeline, Worker
from fedring.schedules.routes import chain
from fedring.schedules.schedule import Kind, Versions, make, pipedream
from fedring.schedules.simulation import check
from fedring.schedules.traffic import Traffic
from tests.staged_layers import alone, batches, delayed, layers, values
from tests.system.ring_scripts import ranks
from tests.unit.pipeline import test_pipeline_routed as routed

BACKENDS = ("gloo", "fedring")
WRAPPED = ("fp16(none)", "bf16(powersgd)", "fp16(int8)", "fp16(topk)")
REPLICAS, STEPS, COUNT = [1, 2, 1], 50, 5
LAST = 7  # samples of a smaller last batch


def network() -> list[nn.Module]:
    """Return three stages."""
    first, second, third, fourth = layers()
    return [first, nn.Sequential(second, third), fourth]


def steps() -> list[tuple[Tensor, Tensor]]:
    return [*batches(STEPS - 1, 20), *batches(1, LAST)]


def train_replicated(rank: int, size: int) -> dict[str, Any]:
    """Do this rank's part of all steps; the last one has fewer micro-batches than its stage has replicas."""
    schedules = {count: make("1f1b", 3, count, replicas=REPLICAS) for count in (COUNT, 1)}
    schedule = schedules[COUNT]
    (number,) = schedule.stages_of(rank)
    module = network()[number]
    stash = WeightStashing(torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9))
    stage = Stage(module, stash, loss=cross_entropy if number == 2 else None)
    group, transport = stage_group(schedule), GroupTransport(credits=1)
    workers = {
        count: Worker({number: stage}, schedule, transport, index=rank, replicas=group)
        for count, schedule in schedules.items()
    }
    losses = []
    for inputs, targets in steps():
        count = COUNT if len(inputs) > LAST else 1
        mine: list[Tensor | None] = list(inputs.tensor_split(count))
        losses += workers[count].run(mine if number == 0 else None, targets.tensor_split(count)).losses
    return {
        "stage": number,
        "losses": losses,
        "weights": [value.flatten().tolist() for value in values([module])],
        "forwards": sum(schedule.workers[rank][at].kind is Kind.FORWARD for at in range(len(schedule.workers[rank]))),
    }


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_stage_with_two_workers_trains_as_one_process_does(backend: str, tmp_path: Path) -> None:
    results = ranks.run(train_replicated, sum(REPLICAS), tmp_path, backend=backend)
    assert [result["stage"] for result in results] == [0, 1, 1, 2]
    assert [result["forwards"] for result in results] == [5, 3, 2, 5]
    expected = network()
    losses = alone(expected, "momentum", steps())
    assert results[3]["losses"] == pytest.approx(losses, rel=1e-6)
    for result in results:
        found = [torch.tensor(value, dtype=torch.float64) for value in result["weights"]]
        wanted = [value.flatten() for value in values([expected[result["stage"]]])]
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    assert results[1]["weights"] == results[2]["weights"]


ASYNCHRONOUS = 13


def train_asynchronously(rank: int, size: int, *, versions: str) -> dict[str, Any]:
    """Do this rank's part of two runs of PipeDream with a replicated stage."""
    schedule = pipedream(3, ASYNCHRONOUS, versions=Versions(versions), replicas=REPLICAS)
    (number,) = schedule.stages_of(rank)
    module = network()[number]
    bound = check(schedule)[number].versions
    stash = WeightStashing(torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9), bound=bound)
    stage = Stage(module, stash, loss=cross_entropy if number == 2 else None)
    group, transport = stage_group(schedule), GroupTransport(credits=1)
    worker = Worker({number: stage}, schedule, transport, index=rank, replicas=group)
    losses = []
    for seed in range(2):
        inputs, targets = zip(*batches(2 * ASYNCHRONOUS)[seed::2], strict=True)
        losses += worker.run(list(inputs) if number == 0 else None, list(targets)).losses
    weights = [value.flatten().tolist() for value in values([module])]
    return {"stage": number, "losses": losses, "weights": weights, "kept": stash.most_kept}


@pytest.mark.parametrize(("backend", "versions"), [("gloo", "stashed"), *(("fedring", one) for one in Versions)])
def test_replicated_stages_of_pipedream_train_as_its_simulation_does(
    backend: str, versions: str, tmp_path: Path
) -> None:
    results = ranks.run(partial(train_asynchronously, versions=versions), sum(REPLICAS), tmp_path, backend=backend)
    schedule = pipedream(3, ASYNCHRONOUS, versions=Versions(versions), replicas=REPLICAS)
    expected = network()
    steppers = [torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9) for part in expected]
    losses = []
    for seed in range(2):
        losses += delayed(expected, schedule, steppers, batches(2 * ASYNCHRONOUS)[seed::2])
    assert results[3]["losses"] == pytest.approx(losses, rel=1e-9)
    for result in results:
        found = [torch.tensor(value, dtype=torch.float64) for value in result["weights"]]
        wanted = [value.flatten() for value in values([expected[result["stage"]]])]
        torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-10)
    assert results[1]["weights"] == results[2]["weights"]
    assert max(result["kept"] for result in results) > 1


def sum_with_every_hook(rank: int, size: int) -> dict[str, Any]:
    """Add up gradients with each hook, in several buckets, and return its sums and those without a hook."""
    sums: dict[str, Any] = {}
    for name in (*HOOKS, *WRAPPED):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 40))
        parameters = list(module.parameters())
        add_up = HookedSum(hook_by_name(name, module.named_parameters()), parameters, bucket_bytes=3000)
        gradients = [torch.full_like(parameter, rank + 1.0) for parameter in parameters]
        found = [gradient.clone() for gradient in gradients]
        for _ in range(3):  # what a hook leaves out of one step, it may send in the next one
            for value, gradient in zip(found, gradients, strict=True):
                value.copy_(gradient)
            add_up(found)
        sums[name] = [[gradient.min().item(), gradient.max().item()] for gradient in found]
    return sums


def test_replicas_can_add_up_their_gradients_with_any_hook(tmp_path: Path) -> None:
    first, second = ranks.run(sum_with_every_hook, 2, tmp_path)
    for name in {*HOOKS, *WRAPPED} - {"noop"}:
        assert first[name] == second[name], name
    for name in ("none", "fp16", "bf16", "powersgd", "fp16(none)", "bf16(powersgd)", "fp16(int8)"):
        for least, most in first[name]:
            assert (least, most) == (pytest.approx(3.0, rel=1e-2), pytest.approx(3.0, rel=1e-2)), name


def train_with_hook(rank: int, size: int) -> dict[str, Any]:
    """Train a replicated stage whose gradients travel as float16."""
    schedule = make("1f1b", 2, 4, replicas=[2, 1])
    (number,) = schedule.stages_of(rank)
    module, group = layers()[number], stage_group(schedule)
    stash = WeightStashing(torch.optim.SGD(module.parameters(), lr=0.1))
    if number:
        stage = Stage(module, stash, loss=cross_entropy)
    else:
        ready = hook_by_name("fp16", module.named_parameters(), group)
        stage = Stage(module, stash, average=HookedSum(ready, stash.parameters))
    worker = Worker({number: stage}, schedule, GroupTransport(), index=rank, replicas=group)
    for inputs, targets in batches(3, 8):
        worker.run(list(inputs.chunk(4)) if number == 0 else None, list(targets.chunk(4)))
    return {"weights": [value.flatten().tolist() for value in values([module])]}


def test_a_replicated_stage_trains_with_a_hook(tmp_path: Path) -> None:
    first, second, _ = ranks.run(train_with_hook, 3, tmp_path)
    assert first == second
    expected = layers()[:2]
    model = nn.Sequential(*expected)
    stepper = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in batches(3, 8):
        stepper.zero_grad()
        cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]  # torch's
        stepper.step()
    found = [torch.tensor(value, dtype=torch.float64) for value in first["weights"]]
    wanted = [value.flatten() for value in values([expected[0]])]
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-3)
    assert not torch.equal(found[0], wanted[0])  # float16 has been on the wire


def evaluate_replicated(rank: int, size: int) -> dict[str, Any]:
    """Train with replicas of the first and of the last stage, each of which reads its own micro-batches only."""
    schedule = make("1f1b", 2, 4, replicas=[2, 2])
    (number,) = schedule.stages_of(rank)
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)).double(), nn.Linear(4, 3).double()]
    stash = WeightStashing(torch.optim.SGD(parts[number].parameters(), lr=0.1))
    stage = Stage(parts[number], stash, loss=cross_entropy if number else None)
    group = stage_group(schedule)
    worker = Worker({number: stage}, schedule, GroupTransport(), index=rank, replicas=group)
    ((inputs, targets),) = batches(1, 14)
    mine = schedule.micro_batches_of(number, rank)
    read = [part if m in mine else None for m, part in enumerate((targets if number else inputs).tensor_split(4))]
    report = worker.run(None if number else read, read if number else None, weights=[4, 4, 3, 3])
    before = [buffer.flatten().tolist() for buffer in parts[0].buffers()]
    outputs = worker.evaluate(list(inputs.tensor_split(5)) if number == 0 else None, micro_batches=5)
    # An error lets all workers fail that share the transport.
    other = Worker({number: stage}, schedule, LocalTransport(), index=rank, replicas=group)
    missing = ranks.error_of(lambda: other.run(read, read)) if number else None
    return {
        "losses": report.losses,
        "before": before,
        "after": [buffer.flatten().tolist() for buffer in parts[0].buffers()],
        "outputs": None if outputs is None else [output.tolist() for output in outputs],
        "missing": missing,
        "state": [tensor.tolist() for tensor in parts[number].state_dict().values()],
    }


def test_replicas_read_their_own_micro_batches_and_evaluate_with_the_buffers_of_replica_0(tmp_path: Path) -> None:
    results = ranks.run(evaluate_replicated, 4, tmp_path)
    first, second, third, fourth = results
    assert first["before"] != second["before"]
    assert first["after"] == second["after"] == first["before"]
    model = nn.Sequential(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)), nn.Linear(4, 3)).double().eval()
    state = [torch.tensor(value) for value in first["state"] + third["state"]]
    model.load_state_dict(dict(zip(model.state_dict(), state, strict=True)))
    ((inputs, _),) = batches(1, 14)
    outputs = [
        third["outputs"][0],
        fourth["outputs"][0],
        third["outputs"][1],
        fourth["outputs"][1],
        third["outputs"][2],
    ]
    found = torch.tensor([row for output in outputs for row in output], dtype=torch.float64)
    torch.testing.assert_close(found, model(inputs).detach(), rtol=1e-6, atol=1e-6)
    assert "pass the weights of all micro-batches" in third["missing"]["text"]


def train_routed(rank: int, size: int, *, name: str) -> dict[str, Any]:
    """Do this rank's part of a training whose tensors skip stages."""
    schedule = pipedream(4, 6) if name == "pipedream" else make(name, 4, 4, workers=size if size < 4 else 0)
    stages = dict(enumerate(routed.stages_of(routed.modules(), schedule, routed.ROUTES)))
    mine = {number: stage for number, stage in stages.items() if rank in schedule.owners(number)}
    transport = GroupTransport(credits=1)
    worker = Worker(mine, schedule, transport, routes=routed.ROUTES)
    losses = []
    for tokens, noise, targets in routed.data(4, 12):
        inputs = routed.inputs_of(tokens, noise, schedule.micro_batches)
        losses += worker.run(inputs, list(targets.tensor_split(schedule.micro_batches))).losses
    return {
        "losses": losses,
        "sent": transport.sent_bytes,
        "weights": {n: [v.flatten().tolist() for v in values([stage.module])] for n, stage in mine.items()},
    }


@pytest.mark.parametrize(("name", "workers", "backend"), [
    ("1f1b", 4, "fedring"), ("1f1b", 4, "gloo"), ("gpipe", 4, "fedring"), ("interleaved_1f1b", 2, "fedring"),
    ("pipedream", 4, "fedring"),
])  # fmt: skip
def test_tensors_go_straight_to_the_stages_that_use_them(name: str, workers: int, backend: str, tmp_path: Path) -> None:
    results = ranks.run(partial(train_routed, name=name), workers, tmp_path, backend=backend)
    parts, steps = routed.modules(), routed.data(4, 12)
    if name == "pipedream":
        schedule = pipedream(4, 6)
        pipeline = LocalPipeline(routed.stages_of(parts, schedule, routed.ROUTES), schedule, routes=routed.ROUTES)
        losses = []
        for tokens, noise, targets in steps:
            losses += pipeline.run(routed.inputs_of(tokens, noise, 6), list(targets.tensor_split(6))).losses
    else:
        losses = routed.train_whole(parts, steps)
    assert results[3 % workers]["losses"] == pytest.approx(losses, rel=1e-9)
    found = {int(number): weights for result in results for number, weights in result["weights"].items()}
    for number, part in enumerate(parts):
        flat = [torch.tensor(value, dtype=torch.float64) for value in found[number]]
        torch.testing.assert_close(flat, [value.flatten() for value in values([part])], rtol=1e-8, atol=1e-10)
    if workers == 4:
        tensor, mask = 4 * 12 * 3 * 4 * 8, 4 * 12 * 3  # bytes of a floating tensor and of the mask, in four steps
        # What stages make, times those that use it, and the gradients; the mask has none, and passes nobody by.
        sent = [2 * tensor + 2 * mask, 2 * tensor + tensor, tensor + 2 * tensor, 2 * tensor]
        assert [result["sent"] for result in results] == sent


def as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def receive_from_an_older_release(rank: int, size: int) -> dict[str, Any]:
    """Rank 1 is a stage; rank 0 sends the first frame that a stage of an older release would send."""
    schedule = make("1f1b", 2, 2)
    if rank == 1:
        stage = Stage(layers()[1], WeightStashing(torch.optim.SGD([{"params": []}], lr=0.1)), loss=cross_entropy)
        worker = Worker({1: stage}, schedule, GroupTransport())
        return ranks.error_of(lambda: worker.run(None, [torch.zeros(1, dtype=torch.int64)] * 2))
    frame = as_tensor(header(StageMessage(Key(0, Kind.FORWARD, 0, 0), 0, torch.ones(1, 8)))).view(torch.int64)
    frame[0], frame[3] = 0x46524E47, 1  # the older magic number, and the stage that receives the message
    assert frame.nbytes == HEADER_BYTES
    torch.distributed.send(frame.view(torch.uint8), 1, tag=6)
    return {"tag": tag_of(Kind.FORWARD, 0)}


def forget_the_inputs(rank: int, size: int) -> dict[str, Any]:
    """Run a pipeline whose first worker does not pass the micro-batches."""
    module = layers()[rank]
    stash = WeightStashing(torch.optim.SGD(module.parameters(), lr=0.1))
    stage = Stage(module, stash, loss=cross_entropy if rank else None)
    worker = Worker({rank: stage}, make("1f1b", 2, 2), GroupTransport())
    return ranks.error_of(lambda: worker.run(None, [torch.zeros(1, dtype=torch.int64)] * 2))


def test_a_worker_without_its_inputs_does_not_keep_the_others_waiting(tmp_path: Path) -> None:
    first, second = ranks.run(forget_the_inputs, 2, tmp_path, timeout=600)
    assert "stage 0 needs the inputs of 2 micro-batches, and got 0" in first["text"]
    assert second["kind"]


def receive_bytes_that_are_no_booleans(rank: int, size: int) -> list[int]:
    """Rank 0 sends a mask of bytes of any value; rank 1 returns the bytes of the mask that it gets."""
    key, given = Key(0, Kind.FORWARD, 0, 0), torch.tensor([0, 1, 2, 255], dtype=torch.uint8)
    if rank == 0:
        torch.distributed.send(as_tensor(header(StageMessage(key, 0, given.bool()))), 1, tag=6)
        torch.distributed.send(given, 1, tag=8)
        return []
    transport = GroupTransport()
    transport.open(Traffic(make("1f1b", 2, 1), chain(2)), 1, 0)
    mask = transport.receive(key).tensor
    assert mask.dtype is torch.bool
    found: list[int] = mask.view(torch.uint8).tolist()
    return found


def test_a_mask_holds_booleans_whatever_a_peer_sends(tmp_path: Path) -> None:
    assert ranks.run(receive_bytes_that_are_no_booleans, 2, tmp_path)[1] == [0, 1, 1, 1]


def test_a_worker_of_an_older_release_is_refused_clearly(tmp_path: Path) -> None:
    sender, receiver = ranks.run(receive_from_an_older_release, 2, tmp_path)
    assert sender["tag"] == 6
    assert "a peer runs an older release of fedring" in receiver["text"]
