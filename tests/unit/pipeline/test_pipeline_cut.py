"""Cutting models: the stages together compute what the model computes, and have its parameters under its names."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fedring import vision
from fedring.pipeline.cut import as_cut, balanced, cut_at, cut_by_counts, cut_evenly
from fedring.pipeline.errors import CutError
from fedring.pipeline.layers import Layers
from fedring.pipeline.stage import Stage
from fedring.pipeline.stash import WeightStashing
from fedring.pipeline.worker import LocalPipeline
from fedring.schedules.schedule import one_forward_one_backward
from fedring.train.models import cifar_cnn, mnist_cnn


def check(model: nn.Module, stages: list[nn.Module], inputs: Tensor) -> None:
    names = [name for stage in stages for name, _ in stage.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    owned = {id(p) for stage in stages for p in stage.parameters()}
    assert owned == {id(p) for p in model.parameters()}
    buffers = [name for stage in stages for name, _ in stage.named_buffers()]
    assert sorted(buffers) == sorted(name for name, _ in model.named_buffers())
    model.eval()
    value = inputs
    for stage in stages:
        value = stage.eval()(value)
    torch.testing.assert_close(value, model(inputs), rtol=0, atol=0)


@pytest.fixture(scope="module")
def resnet() -> nn.Module:
    vision.load()
    from torchvision.models import resnet18

    torch.manual_seed(0)
    model: nn.Module = resnet18()
    return model


@pytest.mark.parametrize("count", [1, 2, 4])
def test_resnet_is_cut_evenly_although_it_is_not_sequential(resnet: nn.Module, count: int) -> None:
    stages = cut_evenly(resnet, count)
    assert len(stages) == count
    check(resnet, stages, torch.randn(2, 3, 32, 32))
    sizes = [sum(p.numel() for p in stage.parameters()) for stage in stages]
    assert max(sizes) <= max(4_720_640, sum(sizes) / count * 1.5)  # the largest block is indivisible


@pytest.mark.parametrize("count", [2, 4])
def test_resnet_trains_in_stages_which_each_keep_less(resnet: nn.Module, count: int) -> None:
    schedule = one_forward_one_backward(count, 2)
    modules = cut_evenly(resnet.train(), count)
    stashes = [WeightStashing(torch.optim.Adam(module.parameters())) for module in modules]
    losses = [None] * (count - 1) + [nn.functional.cross_entropy]
    stages = [Stage(module, stash, loss=loss) for module, stash, loss in zip(modules, stashes, losses, strict=True)]
    before = [parameter.detach().clone() for parameter in resnet.parameters()]
    report = LocalPipeline(stages, schedule).run(torch.randn(4, 3, 32, 32).chunk(2), torch.randint(9, (4,)).chunk(2))
    assert 0 < report.losses[0] < 20
    moved = [not torch.equal(a, b) for a, b in zip(before, resnet.parameters(), strict=True)]
    assert all(moved)
    states = [sum(t.nbytes for s in stash.optimizer.state.values() for t in s.values()) for stash in stashes]
    assert max(states) < 0.8 * sum(states)


def test_a_layer_that_works_in_place_begins_no_stage() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 2), nn.ReLU(inplace=True))
    assert Layers(model).names == ["0", "2"]


def test_stages_begin_at_the_named_layers(resnet: nn.Module) -> None:
    stages = cut_at(resnet, ["layer2", "layer4.1", "fc"])
    check(resnet, stages, torch.randn(2, 3, 32, 32))
    firsts = [next(iter(dict(stage.named_parameters()))) for stage in stages]
    assert firsts == ["conv1.weight", "layer2.0.conv1.weight", "layer4.1.conv1.weight", "fc.weight"]


def test_a_model_whose_forward_calls_functions_can_be_cut() -> None:
    model = mnist_cnn()
    check(model, cut_at(model, ["conv2", "fc2"]), torch.randn(3, 1, 28, 28))


def test_a_sequential_can_be_cut_by_counts_of_layers() -> None:
    model = cifar_cnn()
    assert Layers(model).names == [str(number) for number in range(13)]
    check(model, cut_by_counts(model, [4, 4, 5]), torch.randn(2, 3, 32, 32))


def test_the_layers_of_a_sequential_need_not_be_traceable() -> None:
    class Odd(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            return inputs if inputs.sum() > 0 else -inputs

    model = nn.Sequential(nn.Linear(3, 3), Odd(), nn.Linear(3, 2))
    check(model, cut_by_counts(model, [1, 2]), torch.randn(2, 3))
    with pytest.raises(CutError, match="Odd cannot be cut automatically"):
        Layers(Odd())


def test_a_sample_balances_stages_by_time_and_does_not_change_buffers() -> None:
    class Slow(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            for _ in range(300):
                inputs = inputs + 0.0
            return inputs

    model = nn.Sequential(nn.BatchNorm1d(4), nn.Identity(), nn.Identity(), Slow(), nn.Identity())
    stages = cut_evenly(model, 2, sample=torch.randn(8, 4))
    assert not any(isinstance(module, Slow) for module in stages[0].modules()) or len(list(stages[1].children())) == 1
    assert model[0].num_batches_tracked == 0
    assert Layers(model).measured(torch.randn(8, 4))[3] > Layers(model).measured(torch.randn(8, 4))[1]


@pytest.mark.parametrize(("costs", "parts", "expected"), [
    ([1, 1, 1, 1], 2, [2, 2]), ([9, 1, 1, 1], 2, [1, 3]), ([1, 1, 1, 9], 3, [1, 2, 1]), ([5], 1, [1]),
    ([0, 0, 7, 0], 4, [1, 1, 1, 1]),
])  # fmt: skip
def test_the_most_expensive_part_is_as_cheap_as_possible(costs: list[float], parts: int, expected: list[int]) -> None:
    found = balanced(costs, parts)
    places = [sum(found[:i]) for i in range(parts + 1)]
    wanted = [sum(expected[:i]) for i in range(parts + 1)]

    def largest(cuts: list[int]) -> float:
        return max(sum(costs[a:b]) for a, b in pairwise(cuts))

    assert largest(places) == largest(wanted)
    assert min(found) >= 1


def test_tied_weights_are_refused_in_two_stages_and_allowed_in_one() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.middle, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
            self.last.weight = self.first.weight

        def forward(self, inputs: Tensor) -> Tensor:
            result: Tensor = self.last(self.middle(self.first(inputs)))
            return result

    with pytest.raises(CutError, match=r"first\.weight of stage 0 and last\.weight of stage 1 are one tensor"):
        cut_at(Tied(), ["middle"])
    assert len(cut_by_counts(Tied(), [3])) == 1


def test_a_users_own_stages_are_not_changed() -> None:
    stages = [nn.Linear(2, 3), nn.Linear(3, 1)]
    assert as_cut(stages) == stages
    assert as_cut(nn.ModuleList(stages)) == stages
    with pytest.raises(CutError, match="list of torch"):
        as_cut(nn.Linear(2, 3))
    with pytest.raises(CutError, match="one tensor"):
        as_cut([stages[0], stages[0]])


def test_a_cut_inside_a_residual_block_passes_two_tensors(resnet: nn.Module) -> None:
    first, second = stages = cut_at(resnet.eval(), ["layer1.0.conv2"])
    assert list(stages.routes.consumers(0)) == ["layer1_0_relu", "maxpool"]
    inputs = torch.randn(2, 3, 32, 32)
    (outputs,) = second(**first(inputs)).values()
    torch.testing.assert_close(outputs, resnet(inputs), rtol=0, atol=0)


@pytest.mark.parametrize(("names", "text"), [
    (["2", "1"], "order"), (["0"], "first"), (["nine"], "no layer begins at 'nine'"),
])  # fmt: skip
def test_wrong_names_are_refused(names: list[str], text: str) -> None:
    with pytest.raises(CutError, match=text):
        cut_at(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), names)


@pytest.mark.parametrize("counts", [[1, 1], [3, 0], [], [4]])
def test_wrong_counts_are_refused(counts: list[int]) -> None:
    with pytest.raises(CutError, match="add up to"):
        cut_by_counts(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), counts)
    with pytest.raises(CutError, match="cannot make 4 stages"):
        cut_evenly(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), 4)


def test_a_name_that_would_be_code_is_refused_before_the_model_is_traced(tmp_path: Path) -> None:
    """torch.fx writes names into Python as they are, and keys of an nn.ModuleDict may come from a job's arguments."""
    mark = tmp_path / "called"
    name = f'a") or open({str(mark)!r}, "w") or getattr(self, "a'.replace(".", "")

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.heads = nn.Linear(2, 2), nn.ModuleDict({"a": nn.Linear(2, 2), name: nn.Linear(2, 2)})

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.heads[name](self.heads["a"](self.first(inputs)))  # type: ignore[no-any-return]

    with pytest.raises(CutError, match="other characters"):
        cut_evenly(Heads(), 2)
    assert not mark.exists()
