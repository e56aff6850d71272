"""Stages in one process: every schedule gives the same result as training without a pipeline."""

import copy
from collections.abc import Sequence

import pytest
import torch
from tests.staged_layers import OPTIMIZERS, Recorder, alone, batches, delayed, layers, stages_of, steppers_of, values
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedring.pipeline.errors import PipelineError
from fedring.pipeline.stage import Stage
from fedring.pipeline.stash import WeightStashing
from fedring.pipeline.worker import LocalPipeline
from fedring.schedules.schedule import Versions, make, pipedream
from fedring.schedules.simulation import check


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("name", "stages", "workers"), [
    ("gpipe", 2, 2), ("gpipe", 4, 4), ("1f1b", 2, 2), ("1f1b", 4, 4), ("1f1b", 1, 1), ("interleaved_1f1b", 4, 2),
])  # fmt: skip
def test_flushed_schedules_train_as_one_process_does(
    name: str, stages: int, workers: int, optimizer: str, recompute: bool
) -> None:
    parts, data = layers(), batches(5)
    expected = layers()
    losses = alone(expected, optimizer, data)
    schedule = make(name, stages, 4, workers=workers)
    pipeline = LocalPipeline(stages_of(parts, schedule, optimizer, recompute=recompute), schedule)
    found = [pipeline.run(x.chunk(4), y.chunk(4)).losses[0] for x, y in data]  # of 3, 3, 3 and 1 samples
    assert found == pytest.approx(losses, rel=1e-9)
    torch.testing.assert_close(values(parts), values(expected), rtol=1e-8, atol=1e-10)


def test_recomputation_repeats_the_random_numbers_and_keeps_no_activations() -> None:
    results = []
    for recompute in (False, True):
        parts = layers(dropout=0.4)
        schedule = make("1f1b", 2, 5)
        pipeline = LocalPipeline(stages_of(parts, schedule, recompute=recompute), schedule)
        torch.manual_seed(7)
        for x, y in batches(3):
            pipeline.run(x.chunk(5), y.chunk(5))
        results.append(values(parts))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


def test_running_averages_use_each_micro_batch_once_even_if_recomputed() -> None:
    counts = []
    for recompute in (False, True):
        torch.manual_seed(0)
        parts = [nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)).double(), nn.Linear(4, 3).double()]
        schedule = make("gpipe", 2, 5)
        LocalPipeline(stages_of(parts, schedule, recompute=recompute), schedule).run(
            *(part.chunk(5) for part in batches(1)[0])
        )
        counts.append([buffer.clone() for buffer in parts[0].buffers()])
    assert counts[0][2] == 5
    torch.testing.assert_close(counts[0], counts[1], rtol=0, atol=0)


def test_recomputation_begins_with_the_buffers_of_the_first_forward() -> None:
    """Spectral normalisation divides by a norm that each forward estimates from the estimate of the one before."""
    results = []
    for recompute in (False, True):
        first, *others = layers()
        torch.manual_seed(0)
        parts = [nn.utils.parametrizations.spectral_norm(nn.Linear(5, 5).double()), nn.Sequential(first, *others)]
        schedule = make("gpipe", 2, 5)
        pipeline = LocalPipeline(stages_of(parts, schedule, recompute=recompute), schedule)
        for x, y in batches(3):
            pipeline.run(x.chunk(5), y.chunk(5))
        results.append([*values(parts), *parts[0].buffers()])
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("versions", Versions)
@pytest.mark.parametrize("stages", [2, 4])
def test_pipedream_gives_the_result_of_delayed_gradients(stages: int, versions: Versions, optimizer: str) -> None:
    data = batches(12)
    parts, expected = layers(), layers()
    schedule = pipedream(stages, len(data), versions=versions)
    recorder = Recorder()
    built = stages_of(parts, schedule, optimizer)
    report = LocalPipeline(built, schedule, watch=recorder).run([x for x, _ in data], [y for _, y in data])
    losses = delayed(expected, schedule, steppers_of(expected, schedule, optimizer), data)
    assert recorder.pairs == stages * len(data)
    assert report.losses == pytest.approx(losses, rel=1e-9)
    torch.testing.assert_close(values(parts), values(expected), rtol=1e-8, atol=1e-10)
    for stage, need in zip(built, check(schedule), strict=True):
        assert stage.stash.most_kept == need.versions
        assert stage.most_in_flight == need.activations
        assert stage.stash.versions == [stage.stash.version]


@pytest.mark.parametrize("versions", Versions)
@pytest.mark.parametrize(("replicas", "interval"), [([1, 2], 0), ([2, 1], 4), ([2, 2, 1, 1], 0), ([1, 3, 1, 2], 6)])
def test_replicated_stages_of_pipedream_give_the_result_of_delayed_gradients(
    replicas: list[int], interval: int, versions: Versions
) -> None:
    optimizer = "momentum"
    data = batches(15)
    parts, expected = layers(), layers()
    schedule = pipedream(len(replicas), len(data), versions=versions, interval=interval, replicas=replicas)
    each = len(parts) // schedule.stages
    stages, modules = [], []
    for number, (count, need) in enumerate(zip(replicas, check(schedule), strict=True)):
        for _ in range(count):
            module = copy.deepcopy(nn.Sequential(*parts[number * each : (number + 1) * each]))
            stash = WeightStashing(OPTIMIZERS[optimizer](list(module.parameters())), bound=need.versions)
            stages.append(Stage(module, stash, loss=cross_entropy if number == schedule.stages - 1 else None))
            modules.append((number, module))
    recorder = Recorder()
    report = LocalPipeline(stages, schedule, watch=recorder).run([x for x, _ in data], [y for _, y in data])
    losses = delayed(expected, schedule, steppers_of(expected, schedule, optimizer), data)
    assert recorder.pairs == len(replicas) * len(data)
    assert report.losses == pytest.approx(losses, rel=1e-9)
    for number, module in modules:
        wanted = values(expected[number * each : (number + 1) * each])
        torch.testing.assert_close(values([module]), wanted, rtol=1e-8, atol=1e-10)
    for one in stages:
        assert one.stash.versions == [one.stash.version]
    if versions is Versions.STASHED and sum(replicas) > max(replicas) + 1:
        assert any(one.stash.most_kept > 1 for one in stages)  # older weights were used


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("name", ["gpipe", "pipedream"])
@pytest.mark.parametrize("frozen", ["0.weight", "0.bias"])
def test_frozen_parameters_stay_as_they_are(frozen: str, name: str, recompute: bool) -> None:
    parts, expected, data = layers(), layers(), batches(3)
    for some in (parts, expected):
        for part in some:
            part.get_parameter(frozen).requires_grad_(False)
    before = values(expected)[0 if frozen == "0.weight" else 1].clone()
    schedule = make(name, 4, 1)
    pipeline = LocalPipeline(stages_of(parts, schedule, recompute=recompute), schedule)
    losses = [pipeline.run([x], [y]).losses[0] for x, y in data]
    assert losses == pytest.approx(alone(expected, "momentum", data), rel=1e-9)
    torch.testing.assert_close(values(parts), values(expected), rtol=1e-8, atol=1e-10)
    assert torch.equal(parts[0].get_parameter(frozen), before)


def test_frozen_parameters_of_replicas_do_not_decay() -> None:
    part, *_ = layers()
    part.get_parameter("0.bias").requires_grad_(False)
    stash = WeightStashing(torch.optim.SGD(part.parameters(), lr=0.1, weight_decay=0.5))
    stage = Stage(part, stash, loss=lambda output, target: output.sum(), average=lambda gradients: None)
    before = [value.clone() for value in values([part])]
    stage.forward(0, {"inputs": batches(1)[0][0]}, target=torch.zeros(10))
    stage.backward(0, {})
    stage.update()
    assert [torch.equal(now, then) for now, then in zip(values([part]), before, strict=True)] == [False, True]


def test_shapes_may_change_from_micro_batch_to_micro_batch() -> None:
    schedule = make("1f1b", 2, 3)
    parts, expected, ((inputs, targets),) = layers(), layers(), batches(1)
    sizes = ((0, 1), (1, 8), (8, 10))
    pipeline = LocalPipeline(stages_of(parts, schedule), schedule)
    report = pipeline.run([inputs[a:b] for a, b in sizes], [targets[a:b] for a, b in sizes])
    assert report.losses == pytest.approx(alone(expected, "momentum", [(inputs, targets)]), rel=1e-9)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_a_batch_may_have_fewer_samples_than_there_are_micro_batches(recompute: bool) -> None:
    schedule = make("1f1b", 4, 4)
    parts, expected, data = layers(), layers(), batches(2, size=3)
    pipeline = LocalPipeline(stages_of(parts, schedule, recompute=recompute), schedule)
    losses = [pipeline.run(x.tensor_split(4), y.tensor_split(4)).losses[0] for x, y in data]
    assert losses == pytest.approx(alone(expected, "momentum", data), rel=1e-9)
    torch.testing.assert_close(values(parts), values(expected), rtol=1e-8, atol=1e-10)


def test_an_evaluation_runs_the_whole_model_in_evaluation_mode_and_changes_nothing() -> None:
    torch.manual_seed(0)
    parts = [
        nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).double(),
        nn.Linear(4, 3).double(),
    ]
    schedule = make("1f1b", 2, 5)
    pipeline = LocalPipeline(stages_of(parts, schedule), schedule)
    (inputs, targets), (others, _) = batches(2)
    pipeline.run(inputs.chunk(5), targets.chunk(5))
    before = [tensor.clone() for part in parts for tensor in part.state_dict().values()]
    outputs = pipeline.evaluate(
        torch.split(others, 3)
    )  # of 3, 3, 3 and 1 samples; BatchNorm refuses to train on a single one
    assert all(module.training for part in parts for module in part.modules())
    torch.testing.assert_close([tensor for part in parts for tensor in part.state_dict().values()], before)
    torch.testing.assert_close(torch.cat(outputs), nn.Sequential(*parts).eval()(others).detach())
    assert not any(output.requires_grad for output in outputs)


def test_a_stage_is_in_training_mode_again_after_an_evaluation_that_failed() -> None:
    schedule, parts = make("1f1b", 2, 2), layers()
    pipeline = LocalPipeline(stages_of(parts, schedule), schedule)
    with pytest.raises(RuntimeError) as caught:
        pipeline.evaluate([torch.ones(2, 99)])
    assert caught.value.__notes__ == ["in the forward of micro-batch 0 in stage 0"]
    assert all(module.training for part in parts for module in part.modules())


def test_a_failed_run_does_not_change_the_next_one() -> None:
    schedule = make("gpipe", 2, 2)
    parts, expected, ((inputs, targets),) = layers(), layers(), batches(1)
    pipeline = LocalPipeline(stages_of(parts, schedule), schedule)
    with pytest.raises(IndexError):
        pipeline.run(inputs.chunk(2), (targets[:5], targets[5:] + 9))  # there are no such classes
    losses = pipeline.run(inputs.chunk(2), targets.chunk(2)).losses
    assert losses == pytest.approx(alone(expected, "momentum", [(inputs, targets)]), rel=1e-9)
    torch.testing.assert_close(values(parts), values(expected), rtol=1e-8, atol=1e-10)


def test_a_stage_that_returns_no_tensor_is_refused() -> None:
    class Pair(nn.Module):
        def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
            return inputs, inputs

    stage = Stage(Pair(), WeightStashing(torch.optim.SGD([{"params": []}], lr=0.1)))
    with pytest.raises(PipelineError, match="returned a tuple"):
        stage.forward(0, {"inputs": torch.ones(2)})


def test_replicas_of_a_stage_average_their_gradients_before_the_update() -> None:
    def halve(gradients: Sequence[Tensor]) -> None:
        for gradient in gradients:
            gradient.div_(2)

    (part, *_), (other, *_) = layers(), layers()
    for module, average in ((part, halve), (other, None)):
        stash = WeightStashing(torch.optim.SGD(module.parameters(), lr=0.2 if average else 0.1))
        stage = Stage(module, stash, loss=lambda output, target: output.sum(), average=average)
        stage.forward(0, {"inputs": batches(1)[0][0]}, target=torch.zeros(10))
        stage.backward(0, {})
        stage.update()
    torch.testing.assert_close(values([part]), values([other]))
