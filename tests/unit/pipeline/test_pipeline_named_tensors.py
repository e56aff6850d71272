"""A stage with several named inputs and outputs gives the gradients that one graph of the whole model gives."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedring.pipeline.errors import PipelineError
from fedring.pipeline.stage import Stage, generator_states, repeating
from fedring.pipeline.stash import WeightStashing


class Several(nn.Module):
    """Takes a floating tensor, indices and a mask; returns tensors of all these kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.linear = nn.Linear(4, 4)

    def forward(self, values: Tensor, indices: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """Return outputs of every kind that can pass from stage to stage."""
        mixed = self.linear(values) * self.table(indices)
        return {
            "mixed": mixed,
            "again": mixed,  # one tensor under two names
            "values": values,  # an input, unchanged
            "masked": mixed.masked_fill(mask[:, None], 0.0),
            "count": mask.sum(),  # needs no gradient
            "mask": mask,
            "constant": torch.ones(3),  # a floating tensor without a graph
            "unused": self.linear(values).exp(),
        }


def stage_of(module: nn.Module, **options: Any) -> Stage:
    parameters = list(module.parameters())
    optimizer = torch.optim.SGD(parameters or [{"params": []}], lr=0.1)
    return Stage(module, WeightStashing(optimizer, compute_dtype=options.pop("compute_dtype", None)), **options)


def inputs_of() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "values": torch.randn(5, 4, generator=generator).requires_grad_(),
        "indices": torch.randint(7, (5,), generator=generator),
        "mask": torch.tensor([True, False, False, True, False]),
    }


WEIGHTS: dict[str, Callable[[], Tensor]] = {
    "mixed": lambda: torch.full((5, 4), 0.5),
    "again": lambda: torch.full((5, 4), 2.0),
    "values": lambda: torch.full((5, 4), -3.0),
    "masked": lambda: torch.full((5, 4), 0.25),
    "constant": lambda: torch.ones(3),
}


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_the_gradients_of_all_outputs_add_up(recompute: bool) -> None:
    torch.manual_seed(0)
    module, given = Several(), inputs_of()
    expected = module(**given)
    roots = [name for name in WEIGHTS if expected[name].requires_grad]
    total = torch.stack([(expected[name] * WEIGHTS[name]()).sum() for name in roots]).sum()
    wanted = torch.autograd.grad(total, [given["values"], *module.parameters()])

    stage = stage_of(module, recompute=recompute)
    outputs = stage.forward(0, given)
    torch.testing.assert_close(outputs, {name: tensor.detach() for name, tensor in expected.items()})
    assert not any(tensor.requires_grad for tensor in outputs.values())
    found = stage.backward(0, {name: make() for name, make in WEIGHTS.items()})
    assert list(found) == ["values"]
    torch.testing.assert_close(found["values"], wanted[0])
    torch.testing.assert_close([parameter.grad for parameter in module.parameters()], list(wanted[1:]))


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_an_input_that_is_passed_through_has_the_gradient_of_its_later_use(recompute: bool) -> None:
    stage = stage_of(Several(), recompute=recompute)
    stage.forward(0, inputs_of())
    found = stage.backward(0, {"values": torch.full((5, 4), 4.0)})
    torch.testing.assert_close(found, {"values": torch.full((5, 4), 4.0)})


def test_only_inputs_that_the_gradients_depend_on_have_a_gradient() -> None:
    class Apart(nn.Module):
        def forward(self, left: Tensor, right: Tensor) -> dict[str, Tensor]:
            return {"first": left * 2, "second": right * 3, "whole": (left * 2).to(torch.int64)}

    stage = stage_of(Apart())
    left, right = (torch.ones(2, requires_grad=True) for _ in range(2))
    stage.forward(0, {"left": left, "right": right})
    assert list(stage.backward(0, {"second": torch.ones(2)})) == ["right"]
    stage.forward(0, {"left": left, "right": right.detach()})
    assert list(stage.backward(0, {"first": torch.ones(2), "second": torch.ones(2)})) == ["left"]
    stage.forward(0, {"left": left, "right": right})
    assert stage.backward(0, {"whole": torch.ones(2)}) == {}
    stage.forward(0, {"left": left, "right": right})
    assert stage.backward(0, {}) == {}


def test_half_precision_applies_to_floating_tensors_only() -> None:
    stage = stage_of(Several(), compute_dtype=torch.bfloat16)
    outputs = stage.forward(0, inputs_of())
    assert {name: tensor.dtype for name, tensor in outputs.items()} == {
        **dict.fromkeys(("mixed", "again", "values", "masked", "unused"), torch.bfloat16),
        "count": torch.int64,
        "mask": torch.bool,
        "constant": torch.float32,
    }
    found = stage.backward(0, {"mixed": torch.ones(5, 4)})  # in another dtype than the output
    assert found["values"].dtype == torch.bfloat16


def test_evaluation_is_without_dropout_and_keeps_nothing() -> None:
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.drop = nn.BatchNorm1d(3), nn.Dropout(0.5)

        def forward(self, left: Tensor, right: Tensor) -> dict[str, Tensor]:
            return {"sum": self.drop(self.norm(left) + right)}

    module = Dropped()
    stage = stage_of(module, loss=nn.functional.mse_loss)
    left, right = torch.randn(4, 3), torch.randn(4, 3)
    buffers = [buffer.clone() for buffer in module.buffers()]
    first, second = (stage.evaluate({"left": left, "right": right}) for _ in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    torch.testing.assert_close(first["sum"], left / (1 + 1e-5) ** 0.5 + right)
    torch.testing.assert_close(list(module.buffers()), buffers, rtol=0, atol=0)
    assert module.training
    assert not first["sum"].requires_grad
    stage.forward(0, {"left": left, "right": right}, target=left)  # nothing of the evaluation is in flight


def test_a_module_of_one_tensor_gets_it_whatever_its_name_is() -> None:
    stage = stage_of(nn.Sequential(nn.Linear(3, 2), nn.Tanh()))
    stage.output = "stage0"
    outputs = stage.forward(0, {"inputs": torch.ones(1, 3, requires_grad=True)})
    assert list(outputs) == ["stage0"]
    assert list(stage.backward(0, {"stage0": torch.ones(1, 2)})) == ["inputs"]


def test_the_last_stage_returns_its_loss() -> None:
    class Pair(nn.Module):
        def forward(self, left: Tensor, right: Tensor) -> dict[str, Tensor]:
            return {"sum": left + right, **({"left": left} if left.shape[0] == 1 else {})}

    stage = stage_of(Pair(), loss=nn.functional.mse_loss)
    left, right = torch.ones(2, requires_grad=True), torch.full((2,), 2.0, requires_grad=True)
    outputs = stage.forward(0, {"left": left, "right": right}, target=torch.zeros(2), share=0.5)
    torch.testing.assert_close(outputs, {"loss": torch.tensor(4.5)})
    torch.testing.assert_close(stage.backward(0, {}), dict.fromkeys(("left", "right"), torch.full((2,), 1.5)))
    with pytest.raises(PipelineError, match="the last stage returned sum, left: it must return one tensor"):
        stage.forward(0, {"left": left[:1], "right": right[:1]}, target=torch.zeros(1))


class Faulty(nn.Module):
    """Does what its name for a fault says."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self._fault = fault

    def forward(self, values: Tensor, mask: Tensor) -> Any:
        """Return something that no stage may return, or change an input."""
        if self._fault == "in place":
            mask.logical_not_()
        if self._fault == "view in place":
            mask[1:].logical_not_()
        return {"list": [values], "number": {"size": values.shape[0]}}.get(self._fault, {"values": values + 1})


@pytest.mark.parametrize(("fault", "text"), [
    ("list", "returned a list: it must return a tensor or a dict"), ("number", "returned a int as 'size'"),
    ("in place", "changed its input 'mask' in place"), ("view in place", "changed its input 'mask' in place"),
])  # fmt: skip
def test_what_a_stage_must_not_do_is_refused(fault: str, text: str) -> None:
    inputs = {"values": torch.ones(2), "mask": torch.ones(2, dtype=torch.bool)}
    with pytest.raises(PipelineError, match=text):
        stage_of(Faulty(fault)).forward(0, inputs)
    with pytest.raises(PipelineError, match=text):
        stage_of(Faulty(fault)).evaluate(inputs)


@pytest.mark.parametrize(("gradients", "text"), [
    ({"nothing": torch.ones(2)}, "a gradient for 'nothing', but the stage made values"),
    ({"values": torch.ones(3)}, r"'values' has the shape \[3\], but the output has \[2\]"),
])  # fmt: skip
def test_wrong_gradients_are_refused(gradients: Mapping[str, Tensor], text: str) -> None:
    stage = stage_of(Faulty("none"))
    stage.forward(0, {"values": torch.ones(2, requires_grad=True), "mask": torch.ones(2)})
    with pytest.raises(PipelineError, match=text):
        stage.backward(0, gradients)


def test_a_module_without_arguments_of_these_names_is_refused() -> None:
    with pytest.raises(PipelineError, match="the forward of Linear must have the arguments left, right"):
        stage_of(nn.Linear(2, 2)).forward(0, {"left": torch.ones(2), "right": torch.ones(2)})


class FakeDevices:
    """Stands in for torch's module of a device type, such as torch.cuda: one generator for each device."""

    def __init__(self) -> None:
        self.generators = {index: torch.Generator().manual_seed(index) for index in range(3)}

    def get_rng_state(self, device: torch.device) -> Tensor:
        """Return the state of a device's generator."""
        return self.generators[device.index].get_state()

    def set_rng_state(self, state: Tensor, device: torch.device) -> None:
        """Set the state of a device's generator."""
        self.generators[device.index].set_state(state)

    def draw(self) -> list[float]:
        """Draw a number on the CPU and on each device."""
        each = [torch.rand(1, generator=generator) for generator in self.generators.values()]
        return torch.cat([torch.rand(1), *each]).tolist()


def test_the_generators_of_all_devices_of_a_stage_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    devices, ask = FakeDevices(), torch.get_device_module
    monkeypatch.setattr(
        torch, "get_device_module", lambda device=None: devices if "xpu" in str(device) else ask(device)
    )
    monkeypatch.setattr(torch, "xpu", devices)  # where older versions of torch look
    states = generator_states([torch.device("xpu", 0), torch.device("xpu", 2), torch.device("cpu")])
    assert set(states) == {torch.device("cpu"), torch.device("xpu", 0), torch.device("xpu", 2)}
    first, second = devices.draw(), devices.draw()
    with repeating(states):
        cpu, used, unused, other = devices.draw()
    assert [cpu, used, other] == [first[0], first[1], first[3]]
    assert unused not in (first[2], second[2])  # the stage has no tensors there
    after = devices.draw()
    with repeating(states):  # the states were restored: the same draws come again, although others came in between
        again = devices.draw()
    assert [again[0], again[1], again[3]] == [cpu, used, other]
    assert not {after[0], after[1], after[3]} & {cpu, used, other, second[0], second[1], second[3]}


def test_a_recomputing_stage_keeps_the_generators_of_its_tensors_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[set[torch.device]] = []

    def states(devices: set[torch.device]) -> dict[torch.device, Tensor]:
        asked.append(devices)
        return {}

    monkeypatch.setattr("fedring.pipeline.stage.generator_states", states)
    module = nn.Linear(2, 2)
    module.register_buffer("elsewhere", torch.empty(3, device="meta"))
    stage_of(module).forward(0, {"inputs": torch.ones(1, 2)})
    assert asked == []
    stage_of(module, recompute=True).forward(0, {"inputs": torch.ones(1, 2)})
    assert asked == [{torch.device("cpu"), torch.device("meta")}]
