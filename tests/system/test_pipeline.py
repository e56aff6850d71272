"""Stages in separate processes, over Gloo and over the ring."""

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fedring.pipeline.stage import Stage
from fedring.pipeline.stash import WeightStashing
from fedring.pipeline.transport import GroupTransport
from fedring.pipeline.worker import LocalPipeline, Worker
from fedring.ring import total_traffic
from fedring.schedules.schedule import Kind, Schedule, Versions, make, pipedream
from tests.staged_layers import Recorder, alone, batches, layers, stages_of, values
from tests.system.ring_scripts import ranks

BACKENDS = ("gloo", "fedring")
STEPS = 4
NOTICED = 30.0  # seconds, with room for a busy machine; half of the time that workers wait for a silent stage


def schedule_of(name: str, stages: int, workers: int) -> Schedule:
    if name in list(Versions):
        return pipedream(stages, 12, versions=Versions(name))
    return make(name, stages, 4, workers=workers)


def train(rank: int, size: int, *, name: str, stages: int, optimizer: str, credits: int = 2) -> dict[str, Any]:
    """Do this rank's part of the training, and return its losses and the parameters of its stages."""
    schedule = schedule_of(name, stages, size)
    parts = layers()
    built = stages_of(parts, schedule, optimizer, recompute=name == "gpipe")
    mine = {number: stage for number, stage in enumerate(built) if rank in schedule.owners(number)}
    recorder, transport = Recorder(), GroupTransport(credits=credits)
    worker = Worker(mine, schedule, transport, watch=recorder)
    losses = []
    for inputs, targets in micro_batches(schedule):
        losses += worker.run(inputs if 0 in mine else None, targets if stages - 1 in mine else None).losses
    tensors = {number: [value.flatten().tolist() for value in values([mine[number].module])] for number in mine}
    return {"losses": losses, "parameters": tensors, "sent": transport.sent_bytes, "pairs": recorder.pairs}


def micro_batches(schedule: Schedule) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Return the inputs and targets of each run; shapes differ within a run."""
    if schedule.name == "pipedream":
        data = [batches(schedule.micro_batches, size) for size in (4, 6)]
        return [([x for x, _ in run], [y for _, y in run]) for run in data]
    return [(list(x.chunk(4)), list(y.chunk(4))) for x, y in batches(STEPS)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("name", "stages", "workers", "optimizer"), [
    ("gpipe", 2, 2, "momentum"), ("gpipe", 4, 4, "adam"), ("1f1b", 2, 2, "adam"), ("1f1b", 4, 4, "momentum"),
    ("interleaved_1f1b", 4, 2, "momentum"),
])  # fmt: skip
def test_stages_in_processes_train_as_one_process_does(
    name: str, stages: int, workers: int, optimizer: str, backend: str, tmp_path: Path
) -> None:
    body = partial(train, name=name, stages=stages, optimizer=optimizer)
    results = ranks.run(body, workers, tmp_path, backend=backend)
    expected = layers()
    losses = alone(expected, optimizer, batches(STEPS))
    last = results[(stages - 1) % workers]
    assert last["losses"] == pytest.approx(losses, rel=1e-9)
    _compare(results, expected, stages)
    assert all(result["sent"] > 0 for result in results)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("versions", Versions)
def test_pipedream_in_several_processes_gives_the_result_of_one_process(
    versions: Versions, backend: str, tmp_path: Path
) -> None:
    body = partial(train, name=str(versions), stages=4, optimizer="momentum", credits=1)
    results = ranks.run(body, 4, tmp_path, backend=backend)
    schedule, parts = schedule_of(versions, 4, 4), layers()
    pipeline = LocalPipeline(stages_of(parts, schedule), schedule)
    losses = [loss for inputs, targets in micro_batches(schedule) for loss in pipeline.run(inputs, targets).losses]
    assert results[3]["losses"] == pytest.approx(losses, rel=1e-9)
    _compare(results, parts, 4)
    assert [result["pairs"] for result in results] == [24] * 4


def evaluate_between_runs(rank: int, size: int) -> dict[str, Any]:
    """Train and evaluate by turns, and evaluate more micro-batches than a run or a lane has."""
    schedule, parts = make("interleaved_1f1b", 4, 4, workers=size), layers(dropout=0.3)
    built = stages_of(parts, schedule, recompute=True)
    mine = {number: stage for number, stage in enumerate(built) if rank in schedule.owners(number)}
    transport = GroupTransport(credits=1)
    worker, outputs = Worker(mine, schedule, transport), []
    for inputs, targets in batches(2, 22):
        worker.run(inputs.chunk(4) if 0 in mine else None, targets.chunk(4) if 3 in mine else None)
        found = worker.evaluate(torch.split(inputs, 3) if 0 in mine else None, micro_batches=8)
        outputs.append(None if found is None else [output.tolist() for output in found])
    return {
        "outputs": outputs,
        "weights": [[tensor.tolist() for tensor in values([stage.module])] for stage in mine.values()],
    }


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_model_that_no_worker_holds_can_be_evaluated_between_runs(backend: str, tmp_path: Path) -> None:
    first, last = ranks.run(evaluate_between_runs, 2, tmp_path, backend=backend)
    assert first["outputs"] == [None, None]
    assert [len(output) for output in last["outputs"][1]] == [3] * 7 + [1]
    model = nn.Sequential(*layers(dropout=0.3)).eval()
    weights = [
        tensor for pair in zip(first["weights"], last["weights"], strict=True) for stage in pair for tensor in stage
    ]
    for parameter, value in zip(model.parameters(), weights, strict=True):
        parameter.data = torch.tensor(value, dtype=torch.float64)
    ((_, _), (inputs, _)) = batches(2, 22)
    found = torch.tensor([row for output in last["outputs"][1] for row in output], dtype=torch.float64)
    torch.testing.assert_close(found, model(inputs).detach())


def evaluate_nothing(rank: int, size: int) -> dict[str, Any]:
    """Evaluate no inputs where the first stage is.

    The other rank does nothing: what fails here ends the group, and with it all that is still on its way there.
    """
    schedule = make("interleaved_1f1b", 4, 4, workers=size)
    mine = {n: stage for n, stage in enumerate(stages_of(layers(), schedule)) if rank in schedule.owners(n)}
    worker = Worker(mine, schedule, GroupTransport())
    return ranks.error_of(lambda: worker.evaluate([], micro_batches=8)) if 0 in mine else {}


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_evaluation_tells_that_it_has_too_few_micro_batches(backend: str, tmp_path: Path) -> None:
    first, _ = ranks.run(evaluate_nothing, 2, tmp_path, backend=backend)
    assert "stage 0 needs the inputs of 8 micro-batches, and got 0" in first["text"]


def wait_for_the_socket() -> None:
    """Exchange frames until all ranks of this host have agreed on a socket, for which they need some."""
    moved = torch.zeros(1)
    while not moved:
        moved.fill_(total_traffic().socket_frames > 0)
        dist.all_reduce(moved, dist.ReduceOp.MIN)


def count_frames(rank: int, size: int) -> list[int]:
    """Count the frames that this rank sends in each of several runs, with 3 and 8 micro-batches by turns."""
    schedules = {count: make("1f1b", size, count) for count in (3, 8)}
    stage = stages_of(layers(), schedules[3])[rank]
    transport = GroupTransport(credits=2)
    workers = {count: Worker({rank: stage}, schedule, transport) for count, schedule in schedules.items()}
    (data,) = batches(1, 19)  # a size that neither 3 nor 8 divides
    wait_for_the_socket()
    frames = []
    for count in (3, 8, 3, 8, 3, 0, 3):
        before = total_traffic().sent_frames
        inputs, targets = (tensor.tensor_split(max(1, count)) for tensor in data)
        if count:
            workers[count].run(inputs if rank == 0 else None, targets if rank == size - 1 else None)
        else:  # an evaluation of other sizes
            evaluated = [part[:1] for part in inputs] * 3
            workers[3].evaluate(evaluated if rank == 0 else None, micro_batches=3)
        frames.append(total_traffic().sent_frames - before)
    return frames


def test_a_message_of_known_size_is_one_frame_and_no_message_of_1f1b_needs_a_receipt(tmp_path: Path) -> None:
    three, eight = 3, 8  # messages
    for frames in ranks.run(count_frames, 2, tmp_path):
        assert frames == [three + 3, eight + 8, three, eight, three, frames[5], three]


class Order(nn.Module):
    """Makes whole numbers, which have no gradients."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.argsort(1)


def count_frames_without_gradients(rank: int, size: int) -> int:
    """Count the frames that this rank sends in a run whose first stage gets no answers."""
    schedule = make("1f1b", size, 8)
    module = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(15, 3)).double() if rank else Order()
    stash = WeightStashing(torch.optim.SGD([{"params": list(module.parameters())}], lr=0.1))
    stage = Stage(module, stash, loss=nn.functional.cross_entropy if rank else None)
    worker = Worker({rank: stage}, schedule, GroupTransport(credits=2))
    (data,) = batches(1, 16)
    wait_for_the_socket()
    counts = [total_traffic().sent_frames]
    for _ in range(2):
        worker.run(data[0].chunk(8) if rank == 0 else None, data[1].chunk(8) if rank else None)
        counts.append(total_traffic().sent_frames)
    return counts[2] - counts[1]


def test_a_message_without_gradients_gets_a_receipt_if_its_credit_is_needed(tmp_path: Path) -> None:
    assert ranks.run(count_frames_without_gradients, 2, tmp_path) == [8, 6]


def _compare(results: list[dict[str, Any]], parts: list[torch.nn.Module], stages: int) -> None:
    found = {int(number): values for result in results for number, values in result["parameters"].items()}
    flat = [torch.tensor(value, dtype=torch.float64) for number in range(stages) for value in found[number]]
    wanted = [value.flatten() for value in values(parts)]
    torch.testing.assert_close(flat, wanted, rtol=1e-8, atol=1e-10)


def train_until_the_end(rank: int, size: int, *, folder: str, victim: int) -> dict[str, Any]:
    """Train until `victim` kills itself, in its third run, between a forward and its backward."""
    schedule = make("1f1b", size, 8)
    transport = GroupTransport()
    seen = 0

    def watch(action: Any, weights: Any) -> None:
        nonlocal seen
        seen += action.kind is Kind.FORWARD
        if rank == victim and seen == 20:
            Path(folder, "died").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)

    parts = layers()
    worker = Worker({rank: stages_of(parts, schedule)[rank]}, schedule, transport, watch=watch)
    (data,) = batches(1, 16)

    def body() -> None:
        while True:
            worker.run(data[0].chunk(8) if rank == 0 else None, data[1].chunk(8) if rank == size - 1 else None)

    error = ranks.error_of(body)
    Path(folder, f"{rank}.raised").write_text(str(time.time()))
    dist.destroy_process_group()
    return error | {"steps": worker.step}


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_when_a_stage_is_killed_all_others_raise_in_time(victim: int, tmp_path: Path) -> None:
    with pytest.raises(ranks.RankFailed, match=f"rank {victim} ended with -9"):
        ranks.run(partial(train_until_the_end, folder=str(tmp_path), victim=victim), 3, tmp_path)
    died = float((tmp_path / "died").read_text())
    for rank in {0, 1, 2} - {victim}:
        assert float((tmp_path / f"{rank}.raised").read_text()) - died < NOTICED
        assert '"kind": "PeerLost"' in (tmp_path / f"{rank}.json").read_text()


def fail_in_the_middle(rank: int, size: int) -> dict[str, Any]:
    """Run stages of which the last one fails in its loss, while the others wait for its gradients."""
    schedule = make("1f1b", size, 4)
    worker = Worker({rank: stages_of(layers(), schedule)[rank]}, schedule, GroupTransport())
    ((inputs, targets),) = batches(1)
    wrong = [*targets.chunk(4)[:2], torch.full((3,), 9), targets[9:]]
    return ranks.error_of(lambda: worker.run(inputs.chunk(4) if rank == 0 else None, wrong if rank == 3 else None))


def test_all_stages_fail_when_one_stage_raises(tmp_path: Path) -> None:
    errors = ranks.run(fail_in_the_middle, 4, tmp_path)
    assert errors[3]["kind"] == "IndexError"
    told = "rank 3 has aborted the group: stage 3 has failed: IndexError: Target 9 is out of bounds."
    for error in errors[:3]:
        assert (error["kind"], error["rank"]) == ("RingError", 3), error
        assert error["text"].startswith(told), error
        assert error["text"].endswith("in the forward of micro-batch 2 in stage 3"), error
