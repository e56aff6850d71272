"""The states of communication hooks, in a group of one worker."""

import copy
import io
import itertools
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ring_groups import ring_groups
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

from fedring.codec.precision import Precision
from fedring.compress.correction import ErrorFeedback, Feedback
from fedring.ddp import DGC, hooks
from fedring.ddp.gradients import Gradients
from fedring.ddp.hooks.by_name import HOOKS
from fedring.ddp.hooks.summing import HookedSum
from fedring.ddp.local_sgd import LocalSGD
from fedring.ddp.state import HookState
from fedring.ddp.turns import run
from fedring.train.errors import SeamError

Make = Callable[..., HookState]

MAKERS: dict[str, tuple[Make, Any]] = {
    "powersgd": (lambda **names: hooks.PowerSGDState(None, start_powerSGD_iter=2, **names), hooks.powerSGD_hook),
    "int8": (lambda **names: hooks.Int8State(None, **names), hooks.int8_hook),
    "topk": (lambda **names: hooks.TopKState(None, **names), hooks.topk_hook),
}


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(24, 16)


def train(net: nn.Module, state: Any, hook: Any, *, steps: int, values: Tensor | None = None) -> Tensor:
    """Take some steps, and return the weight's gradient of the last one."""
    ddp = DistributedDataParallel(net)
    ddp.register_comm_hook(state, hook)
    for step in range(steps):
        net.zero_grad()
        inputs = torch.randn(4, 24, generator=torch.Generator().manual_seed(step)) if values is None else values
        (ddp(inputs) ** 2).sum().backward()
    grad = next(net.parameters()).grad
    assert grad is not None
    return grad


@pytest.mark.parametrize("kind", MAKERS)
def test_a_state_without_names_says_why_it_has_no_state_dict(kind: str) -> None:
    make, hook = MAKERS[kind]
    state = make()
    train(model(), state, hook, steps=4)
    with pytest.raises(ValueError, match=r"named_parameters=model\.named_parameters"):
        state.state_dict()
    with pytest.raises(ValueError, match=r"named_parameters=model\.named_parameters"):
        state.load_state_dict({})


WITH_DGC: dict[str, tuple[Make, Any]] = MAKERS | {
    "dgc": (lambda **names: hooks.DGCState(None, DGC(ratio=0.1), **names), hooks.dgc_hook),
}


@pytest.mark.parametrize("kind", WITH_DGC)
def test_a_state_dict_can_be_saved_to_a_file_and_loaded(kind: str) -> None:
    make, hook = WITH_DGC[kind]
    net = model()
    state = make(named_parameters=net.named_parameters())
    train(net, state, hook, steps=4)
    file = io.BytesIO()
    torch.save(state.state_dict(), file)
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    other = make(named_parameters=model().named_parameters())
    other.load_state_dict(loaded)
    assert str(other.state_dict()) == str(state.state_dict())
    assert "weight" in str(state.state_dict())


@pytest.mark.parametrize("kind", WITH_DGC)
def test_a_state_of_another_kind_or_of_another_model_is_refused(kind: str) -> None:
    make, hook = WITH_DGC[kind]
    net = model()
    state = make(named_parameters=net.named_parameters())
    train(net, state, hook, steps=4)
    saved = state.state_dict()
    with pytest.raises(ValueError, match="cannot be read"):
        state.load_state_dict(saved | {"kind": "another"})
    other = make(named_parameters=nn.Linear(3, 4).named_parameters())
    with pytest.raises(ValueError, match=rf"the {kind} state has 384 entries of weight, not 12"):
        other.load_state_dict(saved)


@pytest.mark.parametrize("kind", WITH_DGC)
def test_a_state_copied_as_an_object_leaves_out_its_group_and_says_so(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    make, hook = WITH_DGC[kind]
    net = model()
    state = make(named_parameters=net.named_parameters())
    state.process_group = dist.group.WORLD
    train(net, state, hook, steps=4)
    with caplog.at_level(logging.WARNING):
        other = copy.deepcopy(state)
    assert "not serializable and excluded" in caplog.text
    assert "set to the default group" in caplog.text
    assert other.process_group is dist.group.WORLD
    assert "process_group" not in state.__getstate__()
    other.bind(net.named_parameters())
    assert str(other.state_dict()) == str(state.state_dict())


@pytest.mark.parametrize("options", [{}, {"warm_start": False}, {"use_error_feedback": False}])
def test_power_sgd_refuses_to_start_before_ddp_has_rebuilt_its_buckets(options: dict[str, bool]) -> None:
    with pytest.raises(ValueError, match="start_powerSGD_iter"):
        hooks.PowerSGDState(None, start_powerSGD_iter=1, **options)  # type: ignore[arg-type]
    hooks.PowerSGDState(None, start_powerSGD_iter=0, use_error_feedback=False, warm_start=False)


def test_power_sgd_logs_the_compression_rate(caplog: pytest.LogCaptureFixture) -> None:
    state = hooks.PowerSGDState(None, start_powerSGD_iter=2, compression_stats_logging_frequency=2)
    with caplog.at_level(logging.INFO, "fedring.ddp.hooks.powersgd_state"):
        train(model(), state, hooks.powerSGD_hook, steps=6)
    rate, before, after = state.compression_stats()
    assert (before, after) == (4 * 400, 4 * (40 + 16))
    assert rate == pytest.approx(before / after)
    assert [record.args[0] for record in caplog.records if record.args] == [2, 4]  # type: ignore[index]


ALL: dict[str, tuple[Make, Any]] = MAKERS | {
    "int8 ef21": (lambda **names: hooks.Int8State(None, feedback="ef21", **names), hooks.int8_hook),
    "topk ef21": (lambda **names: hooks.TopKState(None, feedback="ef21", **names), hooks.topk_hook),
}


@pytest.mark.parametrize("kind", ALL)
def test_a_broken_step_can_be_undone_completely(kind: str) -> None:
    make, hook = ALL[kind]
    net = model()
    state = make(named_parameters=net.named_parameters())
    state.undo()  # there is nothing yet
    train(net, state, hook, steps=4)
    state.end_step()
    before, shared = copy.deepcopy(state.state_dict()), copy.deepcopy(state.shared())
    train(net, state, hook, steps=1, values=torch.ones(4, 24))
    assert not same(state.state_dict(), before)
    assert same(state.shared(), shared)
    state.undo()
    assert same(state.state_dict(), before)


def test_a_state_reports_what_it_owes_and_the_share_that_it_sends() -> None:
    for kind, (make, hook) in ALL.items():
        net = model()
        state = make(named_parameters=net.named_parameters())
        assert state.residual_norm == 0
        train(net, state, hook, steps=4)
        assert (state.residual_norm > 0) == ("ef21" not in kind), kind
        assert state.ratio == pytest.approx({"topk": 0.01, "powersgd": 56 / 400}.get(kind.split()[0], 1.0)), kind


@pytest.mark.parametrize("kind", ALL)
def test_a_new_worker_takes_over_what_all_workers_share(kind: str) -> None:
    make, hook = ALL[kind]
    net, other = model(), model()
    state, other_state = make(named_parameters=net.named_parameters()), make(named_parameters=other.named_parameters())
    layout = {name: (tensor.shape, tensor.dtype) for name, tensor in other_state.shared().items()}
    train(net, state, hook, steps=4)
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in state.shared().items()} == layout
    other_state.regroup(state.shared(), steps=4)
    state.regroup(state.shared(), steps=4)
    assert same(other_state.shared(), state.shared())
    if layout:  # a new worker knows enough then to do the same as the others
        for state_ in (state, other_state):
            state_.load_state_dict(state_.state_dict() | {"error": {}})
        assert torch.equal(train(net, state, hook, steps=1), train(other, other_state, hook, steps=1))


def test_after_a_gradient_of_zeros_a_matrix_is_sent_again() -> None:
    net = model()
    state = hooks.PowerSGDState(
        None, start_powerSGD_iter=2, use_error_feedback=False, named_parameters=net.named_parameters()
    )
    train(net, state, hooks.powerSGD_hook, steps=4)
    assert not train(net, state, hooks.powerSGD_hook, steps=1, values=torch.zeros(4, 24)).any()
    assert train(net, state, hooks.powerSGD_hook, steps=1).any()


def same(one: Any, other: Any) -> bool:
    """Return whether both hold equal tensors and values."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


@pytest.mark.parametrize("kind", ALL)
def test_a_step_that_is_not_finite_does_not_affect_later_steps(kind: str) -> None:
    make, hook = ALL[kind]
    net = model()
    state = make(named_parameters=net.named_parameters())
    train(net, state, hook, steps=4)
    assert not train(net, state, hook, steps=1, values=torch.full((4, 24), float("inf"))).isfinite().all()
    assert train(net, state, hook, steps=1).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", ALL)
def test_a_gradient_of_any_float_dtype_comes_back_as_what_it_was(kind: str, dtype: torch.dtype) -> None:
    make, hook = ALL[kind]
    net = model().to(dtype)
    inputs = torch.randn(4, 24, dtype=dtype, generator=torch.Generator().manual_seed(0))
    grad = train(net, make(named_parameters=net.named_parameters()), hook, steps=4, values=inputs)
    assert grad.dtype == dtype
    assert grad.any()
    assert grad.isfinite().all()


@pytest.mark.parametrize(
    ("bad", "feedback", "precision"),
    [
        (float("nan"), "ef", "fp32"),
        (float("inf"), "ef", "fp16"),
        (float("-inf"), "ef", "sign"),
        (float("inf"), "ef21", "fp16"),
        (float("nan"), "none", "fp16"),
    ],
)
def test_a_step_of_topk_that_is_not_finite_comes_back_as_nan_on_all_workers(
    bad: float, feedback: Feedback, precision: Precision
) -> None:
    """As in a mean without compression, so that GradScaler skips the step."""
    sizes = [torch.Size([400]), torch.Size([5])]
    with ring_groups(2) as groups, ThreadPoolExecutor(2) as pool:
        states = [hooks.TopKState(group, ratio=0.1, feedback=feedback, precision=precision) for group in groups]

        def exchanged(step: int, spoilt: float | None = None) -> list[Tensor]:
            buffers = [torch.randn(405, generator=torch.Generator().manual_seed(2 * step + rank)) for rank in (0, 1)]
            if spoilt is not None:
                buffers[1][7] = spoilt
            grads = [Gradients(["weight", "bias"], sizes, buffer) for buffer in buffers]
            return list(pool.map(run, [state.steps(one) for state, one in zip(states, grads, strict=True)]))

        exchanged(0)
        before = [copy.deepcopy(state.kept) for state in states]
        assert all(buffer.isnan().all() for buffer in exchanged(1, bad))
        for state, kept in zip(states, before, strict=True):
            assert all(same(vars_of(state.kept[name]), vars_of(kept[name])) for name in kept)
            assert not state.pending
        first, second = exchanged(2)
        assert torch.equal(first, second)
        assert first.isfinite().all()


@pytest.mark.parametrize("name", [name for name in HOOKS if name != "noop"] + ["fp16(topk)", "bf16(topk)"])
def test_grad_scaler_skips_a_step_with_infinity_with_every_hook(name: str) -> None:
    net = model()
    ddp = DistributedDataParallel(net)
    ddp.register_comm_hook(*hooks.hook_by_name(name, net.named_parameters()))
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=1e-3), torch.amp.GradScaler("cpu", init_scale=8.0)
    weights = [net.weight.detach().clone()]
    for step in range(6):
        optimizer.zero_grad()
        inputs = torch.randn(4, 24, generator=torch.Generator().manual_seed(step))
        loss = ddp(inputs).square().sum() * (float("inf") if step == 4 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        weights.append(net.weight.detach().clone())
    changed = [not torch.equal(one, other) for one, other in itertools.pairwise(weights)]
    assert changed == [True] * 4 + [False, True]
    assert scaler.get_scale() == 4.0
    assert weights[-1].isfinite().all()


def test_a_step_of_topk_that_is_not_finite_and_broke_here_changes_nothing() -> None:
    net = model()
    state = hooks.TopKState(None, named_parameters=net.named_parameters())
    train(net, state, hooks.topk_hook, steps=4)
    before = copy.deepcopy(state.state_dict())
    grads = Gradients(["weight", "bias"], [torch.Size([16, 24]), torch.Size([16])], torch.full((400,), torch.nan))
    next(state.steps(grads))
    state.complete(state.shared())  # another worker has all of its messages
    assert same(state.state_dict(), before)


def vars_of(kept: ErrorFeedback) -> dict[str, Tensor]:
    return {"own": kept.own, "shared": kept.shared}


class Waves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(24, 16)
        self.weight = nn.Parameter(torch.ones(16, 3, dtype=torch.complex64))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.first(inputs).to(torch.complex64) @ self.weight
        return outputs.abs()


@pytest.mark.parametrize("kind", WITH_DGC)
def test_complex_parameters_are_refused_at_once(kind: str) -> None:
    make, _ = WITH_DGC[kind]
    net = Waves()
    with pytest.raises(SeamError, match=r"parameter weight is of torch\.complex64") as raised:
        make(named_parameters=net.named_parameters())
    assert raised.value.reason == "unsupported_dtype"
    net.weight.requires_grad_(False)
    make(named_parameters=net.named_parameters())


@pytest.mark.parametrize("kind", MAKERS)
def test_complex_parameters_without_names_are_refused_in_their_bucket(kind: str) -> None:
    make, hook = MAKERS[kind]
    with pytest.raises(Exception, match=r"is of torch\.complex64, whose gradients this hook cannot send"):
        train(Waves(), make(), hook, steps=1)


def test_a_parameter_without_a_name_is_refused() -> None:
    state = hooks.Int8State(None, named_parameters=[])
    with pytest.raises(Exception, match=r"shape \(16, 24\) is not among the named_parameters|shape \(16,\)"):
        train(model(), state, hooks.int8_hook, steps=1)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: hooks.TopKState(None, ratio=0), "ratio"),
        (lambda: hooks.Int8State(None, chunk=0), "chunk"),
        (lambda: hooks.Int8State(None, feedback="most"), "feedback"),  # type: ignore[arg-type]
        (lambda: hooks.PowerSGDState(None, matrix_approximation_rank=0), "rank"),
        (lambda: LocalSGD(None, [], every=0), "every"),
    ],
)
def test_arguments_that_cannot_work_are_refused(make: Callable[[], object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()


@pytest.mark.parametrize("compressed", [False, True])
def test_local_sgd_moves_parameters_of_several_dtypes(compressed: bool) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2).bfloat16())
    compression = hooks.Int8State(None, named_parameters=net.named_parameters()) if compressed else None
    local = LocalSGD(
        None,
        net.named_parameters(),
        every=1,
        outer=lambda anchors: torch.optim.SGD(anchors, lr=1.0),
        compression=compression,
    )
    for parameter in net.parameters():
        parameter.data.fill_(0.5)
    assert local.step()
    assert [parameter.dtype for parameter in net.parameters()] == [torch.float32] * 2 + [torch.bfloat16] * 2
    for parameter in net.parameters():
        assert torch.allclose(parameter.float(), torch.tensor(0.5), atol=0.02)


@pytest.mark.parametrize("other", [nn.Linear(1, 1), nn.Linear(4, 2), nn.Linear(4, 1, bias=False)], ids=str)
def test_local_sgd_refuses_the_state_of_other_parameters(other: nn.Module) -> None:
    state = LocalSGD(None, other.named_parameters(), every=2).state_dict()
    local = LocalSGD(None, nn.Linear(4, 1).named_parameters(), every=2)
    before = local.anchors["weight"].clone()
    with pytest.raises(ValueError, match="of other parameters"):
        local.load_state_dict(state)
    assert torch.equal(local.anchors["weight"], before)


class WithEmpty(nn.Module):
    """A model one of whose parameters has no entries, and a bucket of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.full, self.empty = nn.Linear(40, 40), nn.Parameter(torch.zeros(0, 5, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.full(inputs)
        return outputs + self.empty.sum().float()


@pytest.mark.parametrize("name", [name for name in HOOKS if name != "noop"])
def test_parameters_without_entries_may_have_a_bucket_of_their_own(name: str) -> None:
    net = WithEmpty()
    ddp = DistributedDataParallel(net)
    state, hook = hooks.hook_by_name(name, net.named_parameters())
    ddp.register_comm_hook(state, hook)
    for _ in range(4):
        ddp(torch.randn(3, 40)).square().sum().backward()
        state.end_step()
    assert net.full.weight.grad is not None
    assert net.full.weight.grad.isfinite().all()


@pytest.mark.parametrize("name", [name for name in HOOKS if name != "noop"])
def test_a_step_may_have_nothing_to_exchange(name: str) -> None:
    empty = nn.Parameter(torch.zeros(0, 5))
    ready = hooks.hook_by_name(name, [("empty", empty)])
    add_up = HookedSum(ready, [empty])
    for _ in range(4):
        add_up([torch.zeros(0, 5)])
    assert ready.state.residual_norm == 0


class Sometimes(nn.Module):
    """A model one of whose parameters is not used in some steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always, self.sometimes = nn.Linear(40, 40, bias=False), nn.Linear(40, 40, bias=False)

    def forward(self, inputs: Tensor, used: bool) -> Tensor:
        outputs: Tensor = self.always(inputs)
        return outputs + self.sometimes(inputs) if used else outputs


@pytest.mark.parametrize("name", ["int8", "topk(ratio=0.1)", "powersgd", "dgc(ratio=0.1, warmup_epochs=0, momentum=0)"])
def test_nothing_is_lost_in_steps_that_do_not_use_a_parameter(name: str) -> None:
    """DistributedDataParallel drops the results of a parameter that no worker has used."""
    net = Sometimes()
    ddp = DistributedDataParallel(net, find_unused_parameters=True)
    ready = hooks.hook_by_name(name, net.named_parameters())
    ddp.register_comm_hook(*ready)
    total, applied = torch.zeros(40, 40), torch.zeros(40, 40)
    for step, used in enumerate([True, True, True, True, False, False, True]):
        net.zero_grad()
        inputs = torch.randn(8, 40, generator=torch.Generator().manual_seed(step))
        ddp(inputs, used).square().sum().backward()
        if used:
            outputs = (net.always(inputs) + net.sometimes(inputs)).detach()
            total += 2 * outputs.T @ inputs
        if net.sometimes.weight.grad is not None:
            applied += net.sometimes.weight.grad
    owed = ready.state.owed()["sometimes.weight"].view(40, 40)
    assert torch.allclose(applied + owed, total, rtol=1e-3, atol=1e-3 * float(total.abs().max()))
