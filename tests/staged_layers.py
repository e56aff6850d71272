"""A small network, cut into stages, and what it learns alone."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedring.pipeline.stage import Stage
from fedring.pipeline.stash import WeightStashing
from fedring.schedules.schedule import Action, Kind, Schedule
from fedring.schedules.simulation import check

OPTIMIZERS: dict[str, Callable[[Sequence[Tensor]], torch.optim.Optimizer]] = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}


def layers(*, dropout: float = 0.0) -> list[nn.Module]:
    """Return four layers of different widths, in float64 so that the order of additions hardly matters."""
    torch.manual_seed(0)
    parts = [nn.Linear(5, 8), nn.Linear(8, 7), nn.Linear(7, 6), nn.Linear(6, 3)]
    return [nn.Sequential(part, nn.Tanh(), nn.Dropout(dropout)).double() for part in parts]


def batches(count: int, size: int = 10) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 5, generator=generator, dtype=torch.float64), torch.randint(3, (size,), generator=generator))
        for _ in range(count)
    ]


def alone(parts: Sequence[nn.Module], optimizer: str, data: Sequence[tuple[Tensor, Tensor]]) -> list[float]:
    model = nn.Sequential(*parts)
    stepper = OPTIMIZERS[optimizer](list(model.parameters()))
    losses = []
    for inputs, targets in data:
        stepper.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        stepper.step()
        losses.append(loss.item())
    return losses


def steppers_of(parts: Sequence[nn.Module], schedule: Schedule, optimizer: str) -> list[torch.optim.Optimizer]:
    """Return an optimizer for the layers of each stage."""
    each = len(parts) // schedule.stages
    groups = [nn.Sequential(*parts[s * each : (s + 1) * each]) for s in range(schedule.stages)]
    return [OPTIMIZERS[optimizer](list(group.parameters())) for group in groups]


def delayed(
    parts: Sequence[nn.Module],
    schedule: Schedule,
    steppers: Sequence[torch.optim.Optimizer],
    data: Sequence[tuple[Tensor, Tensor]],
) -> list[float]:
    """Train in one process, with gradients at the schedule's older weights; copies of all versions are kept."""
    each = len(parts) // schedule.stages
    groups = [nn.Sequential(*parts[s * each : (s + 1) * each]) for s in range(schedule.stages)]
    history = [[{k: v.clone() for k, v in group.state_dict().items()}] for group in groups]
    used = {(a.stage, a.micro_batch): a.version for w in schedule.workers for a in w if a.kind is Kind.FORWARD}
    losses = [0.0] * -(-len(data) // schedule.interval)
    for m, (inputs, targets) in enumerate(data):
        for s, group in enumerate(groups):
            group.load_state_dict(history[s][used[s, m]])
        first = m // schedule.interval * schedule.interval
        share = min(schedule.interval, len(data) - first)
        loss = cross_entropy(nn.Sequential(*groups)(inputs), targets) / share
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        losses[m // schedule.interval] += loss.item()
        if (m + 1) % schedule.interval == 0 or m + 1 == len(data):
            for s, (group, stepper) in enumerate(zip(groups, steppers, strict=True)):
                group.load_state_dict(history[s][-1])
                stepper.step()
                stepper.zero_grad()
                history[s].append({k: v.clone() for k, v in group.state_dict().items()})
    return losses


def stages_of(
    parts: Sequence[nn.Module], schedule: Schedule, optimizer: str = "momentum", *, recompute: bool = False
) -> list[Stage]:
    each = len(parts) // schedule.stages
    needs = check(schedule)
    stages = []
    for number in range(schedule.stages):
        module = nn.Sequential(*parts[number * each : (number + 1) * each])
        stash = WeightStashing(OPTIMIZERS[optimizer](list(module.parameters())), bound=needs[number].versions)
        loss = cross_entropy if number == schedule.stages - 1 else None
        stages.append(Stage(module, stash, loss=loss, recompute=recompute))
    return stages


def values(parts: Sequence[nn.Module]) -> list[Tensor]:
    return [parameter.detach() for part in parts for parameter in part.parameters()]


class Recorder:
    """A watch that checks that each backward uses the same weights as its forward."""

    def __init__(self) -> None:
        self._used: dict[tuple[int, int], list[Tensor]] = {}
        self.pairs = 0

    def __call__(self, action: Action, weights: Sequence[Tensor]) -> None:
        place = action.stage, action.micro_batch
        now = [weight.detach().clone() for weight in weights]
        if action.kind is Kind.FORWARD:
            self._used[place] = now
        else:
            assert all(torch.equal(a, b) for a, b in zip(self._used.pop(place), now, strict=True))
            self.pairs += 1
