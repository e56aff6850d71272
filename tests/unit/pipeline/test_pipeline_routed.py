"""Stages with several workers, and tensors that skip stages: in one process, with the same code as in several."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from tests.staged_layers import alone, batches, layers, values
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedring.pipeline.errors import PipelineError
from fedring.pipeline.memory import measure
from fedring.pipeline.stage import Stage
from fedring.pipeline.stash import WeightStashing
from fedring.pipeline.transport import LocalTransport
from fedring.pipeline.worker import LocalPipeline, Worker
from fedring.schedules.routes import BATCH, Routes
from fedring.schedules.schedule import Schedule, ScheduleError, interleaved, make, pipedream
from fedring.schedules.simulation import check

ROUTES = Routes(
    (
        {"tokens": BATCH},
        {"embedded": 0, "mask": 0},
        {"encoded": 1, "embedded": 0},
        {"decoded": 2, "mask": 0, "encoded": 1, "noise": BATCH},
    )
)


class First(nn.Module):
    """Makes a floating tensor and a mask, which are both used by several later stages."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        """Take tokens [batch, 3] int64; return "embedded" [batch, 3, 4] and "mask" [batch, 3] bool."""
        return {"embedded": self.table(tokens), "mask": tokens > 1}


class Second(nn.Module):
    """Uses both."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, embedded: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """Return "encoded" [batch, 3, 4]."""
        return {"encoded": torch.tanh(self.linear(embedded)) * mask[..., None]}


class Third(nn.Module):
    """Does not use the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, encoded: Tensor, embedded: Tensor) -> Tensor:
        """Return one tensor without a name, [batch, 3, 4]."""
        decoded: Tensor = self.linear(encoded + embedded)
        return decoded


class Fourth(nn.Module):
    """Uses tensors of three other stages, and one of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, decoded: Tensor, mask: Tensor, encoded: Tensor, noise: Tensor) -> Tensor:
        """Return class scores [batch, 3]."""
        scores: Tensor = self.linear(((decoded + encoded) * mask[..., None] + noise[:, None, None]).sum(1))
        return scores


def modules() -> list[nn.Module]:
    torch.manual_seed(0)
    return [module.double() for module in (First(), Second(), Third(), Fourth())]


def whole(parts: Sequence[nn.Module], tokens: Tensor, noise: Tensor) -> Tensor:
    """Return what the stages compute, as one graph."""
    first, second, third, fourth = parts
    made = first(tokens)
    encoded = second(**made)["encoded"]
    scores: Tensor = fourth(third(encoded, made["embedded"]), made["mask"], encoded, noise)
    return scores


def data(steps: int, size: int = 10) -> list[tuple[Tensor, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randint(7, (size, 3), generator=generator),
            torch.randn(size, generator=generator, dtype=torch.float64),
            torch.randint(3, (size,), generator=generator),
        )
        for _ in range(steps)
    ]


def train_whole(parts: Sequence[nn.Module], steps: Sequence[tuple[Tensor, Tensor, Tensor]]) -> list[float]:
    optimizer = torch.optim.SGD([p for part in parts for p in part.parameters()], lr=0.1, momentum=0.9)
    losses = []
    for tokens, noise, targets in steps:
        optimizer.zero_grad()
        loss = cross_entropy(whole(parts, tokens, noise), targets)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        optimizer.step()
        losses.append(loss.item())
    return losses


def stages_of(
    parts: Sequence[nn.Module], schedule: Schedule, routes: Routes | None = None, **options: Any
) -> list[Stage]:
    """Return a stage for each worker that has it; replicas begin with equal weights."""
    needs, made = check(schedule, routes=routes), []
    for number, part in enumerate(parts):
        for replica in range(len(schedule.owners(number))):
            module = copy.deepcopy(part) if replica else part
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
            loss = cross_entropy if number == schedule.stages - 1 else None
            made.append(Stage(module, WeightStashing(optimizer, bound=needs[number].versions), loss=loss, **options))
    return made


def inputs_of(tokens: Tensor, noise: Tensor, count: int) -> Mapping[str, Sequence[Tensor]]:
    return {"tokens": tokens.tensor_split(count), "noise": noise.tensor_split(count)}


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("schedule", [
    make("gpipe", 4, 3), make("1f1b", 4, 4), interleaved(4, 4, workers=2), make("1f1b", 4, 5, replicas=[2, 1, 3, 2]),
    make("gpipe", 4, 2, replicas=[1, 3, 1, 1]),
], ids=["gpipe", "1f1b", "interleaved", "replicas", "fewer micro-batches than replicas"])  # fmt: skip
def test_tensors_that_skip_stages_train_as_in_one_graph(schedule: Schedule, recompute: bool) -> None:
    steps, expected, parts = data(5), modules(), modules()
    losses = train_whole(expected, steps)
    pipeline = LocalPipeline(stages_of(parts, schedule, ROUTES, recompute=recompute), schedule, routes=ROUTES)
    count = schedule.micro_batches
    found = [
        pipeline.run(inputs_of(tokens, noise, count), targets.tensor_split(count)).losses[0]
        for tokens, noise, targets in steps
    ]
    assert found == pytest.approx(losses, rel=1e-9)
    torch.testing.assert_close(values(parts), values(expected), rtol=1e-8, atol=1e-10)
    tokens, noise, _ = steps[0]
    outputs = pipeline.evaluate(inputs_of(tokens, noise, 7))
    torch.testing.assert_close(torch.cat(outputs), whole(expected, tokens, noise).detach())


def test_pipedream_works_over_skips() -> None:
    schedule = pipedream(4, 8)
    stages = stages_of(modules(), schedule, ROUTES)
    for stage in stages:
        stage.stash.optimizer.param_groups[0]["lr"] = 0.01
    pipeline = LocalPipeline(stages, schedule, routes=ROUTES)
    (step,) = data(1, 16)
    losses = [sum(pipeline.run(inputs_of(*step[:2], 8), step[2].chunk(8)).losses) for _ in range(20)]
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("replicas", [[1, 2, 1, 1], [3, 1, 2, 2], [1, 1, 1, 4]])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_replicated_stages_train_as_one_process_does(name: str, replicas: list[int]) -> None:
    parts, expected, steps = layers(), layers(), batches(4)
    losses = alone(expected, "momentum", steps)
    schedule = make(name, 4, 4, replicas=replicas)  # the sizes of the micro-batches are 3, 3, 3 and 1
    stages = stages_of(parts, schedule)
    pipeline = LocalPipeline(stages, schedule)
    found = [pipeline.run(x.chunk(4), y.chunk(4)).losses[0] for x, y in steps]
    assert found == pytest.approx(losses, rel=1e-9)
    torch.testing.assert_close(values(parts), values(expected), rtol=1e-8, atol=1e-10)
    first = 0
    for count in replicas:
        same = [values([stage.module]) for stage in stages[first : first + count]]
        assert all(torch.equal(a, b) for other in same for a, b in zip(same[0], other, strict=True))
        first += count


def test_the_memory_of_stages_with_several_tensors_is_measured() -> None:
    tokens, noise, targets = data(1, 12)[0]
    kept = measure(
        modules(), make("1f1b", 4, 3), ({"tokens": tokens, "noise": noise}, targets), loss=cross_entropy, routes=ROUTES
    )
    assert [one.in_flight for one in kept] == [3, 3, 2, 1]
    tensor = 4 * 3 * 4 * 8  # bytes of a floating tensor of a micro-batch
    assert kept[2].activations >= 2 * 2 * tensor  # two inputs of two micro-batches


def test_micro_batches_can_have_weights_of_their_own() -> None:
    """A mean over tokens, and not over samples, needs the number of tokens of each micro-batch."""
    parts, expected, ((inputs, targets),) = layers(), layers(), batches(1)
    model = nn.Sequential(*expected)
    stepper = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss = 0.75 * cross_entropy(model(inputs[:5]), targets[:5]) + 0.25 * cross_entropy(model(inputs[5:]), targets[5:])
    loss.backward()  # type: ignore[no-untyped-call]  # torch's
    stepper.step()
    schedule = make("1f1b", 4, 2)
    report = LocalPipeline(stages_of(parts, schedule), schedule).run(
        inputs.chunk(2), targets.chunk(2), weights=[30, 10]
    )
    assert report.losses == pytest.approx([loss.item()], rel=1e-9)
    torch.testing.assert_close(values(parts), values(expected), rtol=1e-8, atol=1e-10)


def mean_over_tokens(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over the targets that are not below 0; of none, it is not a number."""
    each, counted = cross_entropy(outputs, targets.clamp(min=0), reduction="none"), targets >= 0
    return (each * counted).sum() / counted.sum()


@pytest.mark.parametrize("recompute", [False, True])
def test_a_micro_batch_without_weight_changes_nothing(recompute: bool) -> None:
    ((inputs, targets),) = batches(1)
    targets[5:] = -100
    results = []
    for count in (2, 1):
        parts, schedule = layers()[:2], make("1f1b", 2, count)
        stages = stages_of(parts, schedule, recompute=recompute)
        stages[-1]._loss = mean_over_tokens
        given = [part.chunk(2)[:count] for part in (inputs, targets)]
        report = LocalPipeline(stages, schedule).run(*given, weights=[5, 0][:count])
        results.append((report.losses, values(parts)))
    torch.testing.assert_close(results[0], results[1])


def worker(stages: list[Stage], schedule: Schedule, **options: Any) -> Worker:
    return Worker({0: stages[0]}, schedule, LocalTransport(), **options)


def test_a_stage_with_replicas_needs_their_group_and_its_own_number() -> None:
    schedule = make("1f1b", 2, 4, replicas=[2, 1])
    stages = stages_of(layers()[:2], schedule)
    with pytest.raises(PipelineError, match="pass index"):
        worker(stages, schedule)
    with pytest.raises(PipelineError, match=r"stage 0 has 2 workers: pass replicas=stage_group"):
        worker(stages, schedule, index=0)
    with pytest.raises(PipelineError, match=r"stages \[0\] are not the stages of one worker"):
        worker(stages, schedule, index=2)
    with pytest.raises(PipelineError, match="2 stages were given for a schedule of 3 stages and replicas"):
        LocalPipeline(stages[:2], schedule)


def two(first: nn.Module, second: nn.Module, routes: Routes) -> LocalPipeline:
    schedule = make("1f1b", routes.stages, 2)
    return LocalPipeline(stages_of([first, second], schedule, routes), schedule, routes=routes)


class Both(nn.Module):
    """Makes two floating tensors; only some of its parameters are used for each."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        """Return "values" and "unused" [batch, 5]."""
        return {"values": self.left(inputs), "unused": self.right(inputs)}


class Picky(nn.Module):
    """Takes two tensors and uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, values: Tensor, unused: Tensor) -> Tensor:
        """Return class scores [batch, 3]."""
        scores: Tensor = self.linear(values)
        return scores


BOTH = Routes(({"inputs": BATCH}, {"values": 0, "unused": 0}))


def test_a_tensor_that_the_next_stage_does_not_use_has_no_gradient() -> None:
    first, (inputs, targets) = Both(), batches(1)[0]
    kept = first.right.weight.detach().clone()
    pipeline = two(first, Picky(), BOTH)
    before = first.left.weight.detach().clone()
    pipeline.run(inputs.float().chunk(2), targets.chunk(2))
    torch.testing.assert_close(first.right.weight, kept, rtol=0, atol=0)
    assert not torch.equal(first.left.weight, before)


class Detached(nn.Module):
    """Uses nothing of what the first stage has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, values: Tensor, unused: Tensor) -> Tensor:
        """Return class scores [batch, 3]."""
        scores: Tensor = self.linear(values.detach() + unused.detach())
        return scores


def test_a_stage_without_any_gradient_for_earlier_stages_is_refused() -> None:
    inputs, targets = batches(1)[0]
    with pytest.raises(PipelineError, match=r"stage 1 has no gradient for unused, values: its outputs do not depend"):
        two(Both(), Detached(), BOTH).run(inputs.float().chunk(2), targets.chunk(2))


class Unnamed(nn.Module):
    """Does not return what its routes promise."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        """Return "values" only."""
        return {"values": self.linear(inputs)}


def test_a_tensor_that_a_stage_does_not_make_is_an_error() -> None:
    inputs, targets = batches(1)[0]
    with pytest.raises(PipelineError, match="stage 0 returned values, but stage 1 needs unused of it"):
        two(Unnamed(), Picky(), BOTH).run(inputs.float().chunk(2), targets.chunk(2))


class Turning(nn.Module):
    """Returns floating and whole numbers by turns."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.turn = nn.Linear(5, 5), 0

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        """Return "values" and "unused" [batch, 5]."""
        self.turn += 1
        values = self.linear(inputs)
        return {"values": values, "unused": values if self.turn % 2 else values.long()}


def test_a_tensor_must_not_be_floating_in_some_micro_batches_only() -> None:
    inputs, targets = batches(1)[0]
    with pytest.raises(PipelineError, match=r"unused is torch.int64 in one micro-batch and was not in another"):
        two(Turning(), Picky(), BOTH).run(inputs.float().chunk(2), targets.chunk(2))


def test_what_is_missing_of_a_batch_is_named() -> None:
    schedule = make("1f1b", 4, 2, replicas=[2, 1, 1, 1])
    pipeline = LocalPipeline(stages_of(modules(), schedule, ROUTES), schedule, routes=ROUTES)
    tokens, noise, targets = data(1)[0]
    given = inputs_of(tokens, noise, 2)
    halves: Any = [*targets.chunk(2)]
    with pytest.raises(PipelineError, match="stage 3 needs the noise of 2 micro-batches, and got 0"):
        pipeline.run({"tokens": given["tokens"]}, halves)
    with pytest.raises(PipelineError, match="worker 1 needs the tokens of micro-batch 1 for stage 0"):
        pipeline.run({**given, "tokens": [given["tokens"][0], None]}, halves)
    with pytest.raises(PipelineError, match="stage 3 has 3 weights for 2 micro-batches"):
        pipeline.run(given, halves, weights=[1.0, 1.0, 1.0])
    for weights in ([-1.0, 2.0], [1.0, float("nan")], [0.0, 0.0]):
        with pytest.raises(
            PipelineError, match="must be finite and not negative, and the weights of an update must not"
        ):
            pipeline.run(given, halves, weights=weights)
    with pytest.raises(ScheduleError, match="routes of 4 stages"):
        LocalPipeline(stages_of(layers()[:2], make("1f1b", 2, 2)), make("1f1b", 2, 2), routes=ROUTES)
