"""Deep gradient compression of one tensor: momentum correction, accumulation, masking, clipping, warm-up."""

import dataclasses
import inspect
import re

import pytest
import torch
from torch import Tensor

from fedring.codec.gradient import Entries
from fedring.codec.precision import Precision
from fedring.compress.dgc import (
    DGC,
    Memory,
    accumulate,
    clip_together,
    clipped,
    forget,
    kept_count,
    put_back,
    ratio_at,
)
from fedring.compress.dgc_select import select
from fedring.ddp.parts import DGCStep, apply_parts, make_part

SIZE = 64
PLAIN = DGC(momentum=0, min_numel_to_compress=0, precision="fp32")


def gradients(steps: int, size: int = SIZE) -> list[Tensor]:
    """Return gradients of small whole numbers, whose sums are exact."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(-8, 8, (size,), generator=generator).float() for _ in range(steps)]


def empty(size: int = SIZE) -> Memory:
    return Memory.empty(size, torch.device("cpu"))


def as_sent(grad: Tensor, memory: Memory, step: DGCStep) -> Tensor:
    """Return what a receiver decodes from one worker's part, [n]."""
    part = make_part(grad, memory, step)
    seen = torch.zeros(grad.numel())
    positions = slice(None) if part.positions is None else torch.from_numpy(part.positions)
    seen[positions] = torch.tensor(part.words.values)
    return seen


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("ratio", [1 / SIZE, 0.1, 1.0])
@pytest.mark.parametrize("smallest", [0, SIZE + 1])
def test_sent_entries_and_the_residual_add_up_to_all_gradients(
    precision: Precision, ratio: float, smallest: int
) -> None:
    config = dataclasses.replace(PLAIN, precision=precision, min_numel_to_compress=smallest)
    memory, sent, total = empty(), torch.zeros(SIZE), torch.zeros(SIZE)
    for step, grad in enumerate(gradients(20)):
        total += grad
        sent += as_sent(grad, memory, DGCStep(config, ratio, step, workers=2))
        assert torch.equal(sent + memory.residual, total)


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1.0, 1e6, 1e30])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize(("smallest", "count"), [(0, 50), (1001, 1000)], ids=["sparse", "whole"])
def test_no_bit_is_lost_in_one_step_at_any_magnitude(
    precision: Precision, scale: float, smallest: int, count: int
) -> None:
    grad = torch.randn(1000, generator=torch.Generator().manual_seed(1)) ** 5 * scale
    memory = empty(1000)
    config = dataclasses.replace(PLAIN, precision=precision, min_numel_to_compress=smallest)
    seen = as_sent(grad, memory, DGCStep(config, 0.05, step=0, workers=2))
    assert 0.9 * count < seen.count_nonzero() <= count  # some fifth powers are rounded to 0
    assert torch.equal(seen.double() + memory.residual.double(), grad.double())


def test_the_residual_keeps_what_signs_do_not_carry() -> None:
    grad = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    memory = empty(1000)
    seen = as_sent(grad, memory, DGCStep(dataclasses.replace(PLAIN, precision="sign"), 0.05, step=0, workers=2))
    assert len(set(seen.tolist())) == 3
    assert torch.allclose(seen + memory.residual, grad, rtol=1e-7, atol=1e-7)
    assert (seen[seen != 0].sign() == grad[seen != 0].sign()).all()


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("smallest", [0, SIZE + 1], ids=["sparse", "whole"])
def test_sending_everything_equals_sgd_with_momentum(nesterov: bool, smallest: int) -> None:
    config = DGC(
        momentum=0.5, nesterov=nesterov, masking=False, precision="fp32", min_numel_to_compress=smallest
    )  # halves of small numbers are exact
    memory, parameter, expected = empty(), torch.zeros(SIZE), torch.zeros(SIZE, requires_grad=True)
    optimizer = torch.optim.SGD([expected], lr=1.0, momentum=0.5, nesterov=nesterov)
    for step, grad in enumerate(gradients(8)):
        expected.grad = grad.clone()
        optimizer.step()
        part = make_part(grad, memory, DGCStep(config, 1.0, step, workers=1))
        received = torch.empty(SIZE)
        apply_parts([Entries(part.positions, part.words.values)], received, memory, config)
        parameter -= received
        assert torch.equal(parameter, expected.detach())


def test_unsent_entries_accumulate_velocities_and_not_gradients() -> None:
    memory, config = empty(1), DGC(momentum=0.5)
    for expected in (1.0, 2.5, 4.25):  # velocities 1, 1.5, 1.75
        assert accumulate(torch.ones(1), memory, config).item() == expected


@pytest.mark.parametrize("masking", [True, False])
def test_the_momentum_of_what_was_sent_is_masked(masking: bool) -> None:
    config = DGC(masking=masking)
    memory = Memory(torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0]))
    forget(memory, torch.tensor([1]), torch.tensor([20.0]), config)
    assert memory.residual.tolist() == [10, 0]
    assert memory.momentum.tolist() == [1, 0 if masking else 2]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "sign"])
def test_what_a_broken_step_has_sent_is_put_back_exactly(momentum: float, precision: Precision) -> None:
    config = dataclasses.replace(PLAIN, momentum=momentum, precision=precision)
    first, second = gradients(2)
    memory = empty()
    make_part(first, memory, DGCStep(config, 0.1, 0, workers=2))
    nothing_sent = Memory(memory.momentum.clone(), memory.residual.clone())
    accumulate(second, nothing_sent, config)
    make_part(second, memory, DGCStep(config, 0.1, 1, workers=2))
    assert not torch.equal(memory.residual, nothing_sent.residual)
    for _ in range(2):  # once is enough, and twice does nothing
        put_back(memory)
        assert torch.equal(memory.residual, nothing_sent.residual)
        assert torch.equal(memory.momentum, nothing_sent.momentum)


def test_a_broken_step_is_undone_for_a_tensor_that_is_sent_whole() -> None:
    config = dataclasses.replace(PLAIN, momentum=0.9, precision="fp16", min_numel_to_compress=SIZE + 1)
    first, second = gradients(2)
    memory = empty()
    make_part(first / 3, memory, DGCStep(config, 0.1, 0, workers=2))
    before = memory.residual.clone()
    part = make_part(second / 7, memory, DGCStep(config, 0.1, 1, workers=2))
    apply_parts([Entries(None, part.words.values)], second, memory, config)
    assert memory.momentum.count_nonzero() > 0
    put_back(memory)
    assert torch.equal(memory.residual, before)
    assert memory.momentum.count_nonzero() == 0


def test_gradients_that_are_clipped_together_keep_their_direction() -> None:
    grads = [torch.tensor([3.0, 0.0]), torch.tensor([4.0])]
    clip_together(grads, 2.0, workers=4)  # to 1
    torch.testing.assert_close(torch.cat(grads), torch.tensor([0.6, 0.0, 0.8]))
    clip_together(grads, 2.0, workers=1)
    torch.testing.assert_close(torch.cat(grads), torch.tensor([0.6, 0.0, 0.8]))
    part = make_part(grads[1], empty(1), DGCStep(DGC(clip=0.1, clip_norm="global"), 1.0, 0, workers=1))
    assert part.words.values[0] == pytest.approx(0.8, rel=1e-3)  # it was not clipped again


def test_the_mean_is_over_all_messages() -> None:
    grad = torch.empty(4)
    one = torch.tensor([2.0, 4.0]).numpy()
    parts = [Entries(torch.tensor([0, 1]).numpy(), one), Entries(torch.tensor([1, 3]).numpy(), one)]
    apply_parts(parts, grad, empty(4), PLAIN)
    assert grad.tolist() == [1, 3, 0, 2]
    apply_parts([*parts, Entries(torch.tensor([], dtype=torch.int64).numpy(), one[:0])], grad, empty(4), PLAIN)
    assert torch.allclose(grad, torch.tensor([2, 6, 0, 4]) / 3)


def test_other_dtypes_are_converted_on_the_way_in_and_out() -> None:
    grad, memory = torch.tensor([1.0, -3.0, 0.5, 0.0], dtype=torch.bfloat16), empty(4)
    part = make_part(grad, memory, DGCStep(PLAIN, 0.25, step=0, workers=1))
    apply_parts([Entries(part.positions, part.words.values)], grad, memory, PLAIN)
    assert grad.tolist() == [0, -3, 0, 0]
    assert memory.residual.tolist() == [1, 0, 0.5, 0]


def test_each_worker_clips_to_its_share_of_the_norm() -> None:
    grad = torch.full((16,), 3.0)  # norm 12
    assert clipped(grad, 6.0, workers=4).norm() == 3
    assert torch.equal(clipped(grad, 100.0, workers=4), grad)
    config = dataclasses.replace(PLAIN, clip=6.0)
    for smallest in (0, 17):
        config = dataclasses.replace(config, min_numel_to_compress=smallest)
        assert as_sent(grad, empty(16), DGCStep(config, 1.0, step=0, workers=4)).tolist() == [0.75] * 16


def test_the_warm_up_has_the_shares_of_the_paper() -> None:
    kept = [ratio_at(DGC(ratio=0.001, warmup_epochs=4), epoch) for epoch in range(7)]
    assert kept == pytest.approx([0.25, 0.0625, 0.015625, 0.004, 0.001, 0.001, 0.001], rel=0.02)


def test_the_warm_up_can_be_left_out_or_have_another_length() -> None:
    assert ratio_at(DGC(ratio=0.01, warmup_epochs=0), 0) == pytest.approx(0.01)
    assert [ratio_at(DGC(ratio=0.0001, warmup_epochs=1), e) for e in (0, 1)] == pytest.approx([0.01, 0.0001])


def test_at_least_one_entry_and_at_most_all_are_sent() -> None:
    assert [kept_count(numel, 0.001) for numel in (1, 1000, 1001, 5000)] == [1, 1, 2, 5]
    assert kept_count(7, 1.0) == 7


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ratio", 0), ("ratio", 1.1), ("ratio", float("nan")), ("warmup_epochs", -1), ("momentum", 1.0), ("clip", 0.0),
        ("precision", "fp8"), ("min_numel_to_compress", -1), ("sample_ratio", 0), ("lower_bound", 1.0),
        ("upper_bound", 1.0), ("max_iterations", -1),
    ],
)  # fmt: skip
def test_the_error_names_the_wrong_setting(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name}="):
        dataclasses.replace(DGC(), **{name: value})  # type: ignore[arg-type]  # one of many types


def test_every_setting_says_which_way_is_more_aggressive() -> None:
    lines = [line.strip() for line in inspect.getsource(DGC).splitlines()]
    for field in dataclasses.fields(DGC):
        place = next(i for i, line in enumerate(lines) if line.startswith(f"{field.name}: "))
        assert re.match(
            r"# .*\b(lower|higher|fewer|True|False|fp16|tensor)\b.* is more aggressive", lines[place - 1]
        ), field.name


def test_nesterov_needs_momentum() -> None:
    with pytest.raises(ValueError, match="nesterov needs a momentum"):
        DGC(momentum=0, nesterov=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_device_computes_the_same_as_the_host() -> None:
    config = DGC(precision="fp16", clip=5.0)
    on_host, on_device = empty(100_000), Memory.empty(100_000, torch.device("cuda"))
    for step in range(5):
        grad = torch.randn(100_000, generator=torch.Generator().manual_seed(step))
        this_step = DGCStep(config, 0.001, step, workers=2)
        host, device = make_part(grad, on_host, this_step), make_part(grad.cuda(), on_device, this_step)
        assert host.positions is not None
        assert device.positions is not None
        assert host.positions.tolist() == device.positions.tolist()
        received = torch.empty(100_000, device="cuda")
        apply_parts([Entries(device.positions, device.words.values)] * 2, received, on_device, config)
        assert torch.equal(received.cpu().nonzero().view(-1), torch.from_numpy(host.positions))
        assert torch.allclose(on_host.residual, on_device.residual.cpu(), rtol=1e-5, atol=1e-6)
        assert select(on_device.residual, 10, config).device.type == "cuda"
