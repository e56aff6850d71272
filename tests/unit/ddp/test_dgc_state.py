"""The state of deep gradient compression, and loops without DistributedDataParallel, in a real group of one worker."""

import dataclasses
import io
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore

from fedring.codec.precision import Precision
from fedring.ddp import DGC, DGCSGD, DGCState, DGCStepper, Profile, StepLog, exchange
from fedring.ddp.profile import Meter

CONFIG = DGC(ratio=0.01, warmup_epochs=0, min_numel_to_compress=100)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    """Return a group of only this process."""
    dist.init_process_group("gloo", store=FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 20))


def state_of(net: nn.Module, group: dist.ProcessGroup) -> DGCState:
    return DGCState(group, CONFIG, named_parameters=net.named_parameters())


def step(net: nn.Module, stepper: DGCStepper, seed: int) -> list[torch.Tensor]:
    """Exchange the gradients of a random batch, and return them."""
    net.zero_grad()
    net(torch.randn(8, 40, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
    stepper.exchange()
    return [p.grad.clone() for p in net.parameters() if p.grad is not None]


def test_few_entries_of_large_tensors_are_sent_and_all_of_small_ones(group: dist.ProcessGroup) -> None:
    net = model()
    grads = step(net, DGCStepper(state_of(net, group)), 0)
    assert [int(grad.count_nonzero()) for grad in grads] == [12, 30, 6, 20]


def test_training_continues_from_a_saved_state_bit_for_bit(group: dist.ProcessGroup) -> None:
    net, again = model(), model()
    straight = DGCStepper(state_of(net, group))
    for seed in range(3):
        step(net, straight, seed)
    file = io.BytesIO()
    torch.save(straight.state.state_dict(), file)
    file.seek(0)
    restored = DGCStepper(state_of(again, group), bucket_bytes=1000)  # another division into buckets
    restored.state.load_state_dict(torch.load(file, weights_only=True))
    assert restored.state.step == 3
    for seed in range(3, 6):
        assert all(map(torch.equal, step(net, straight, seed), step(again, restored, seed)))


def test_training_continues_from_a_pickled_state_bit_for_bit(
    group: dist.ProcessGroup, caplog: pytest.LogCaptureFixture
) -> None:
    straight, again = model(), model()
    state = state_of(straight, group)
    stepper, optimizer = DGCStepper(state), DGCSGD(straight.parameters(), lr=0.1)

    def train(net: nn.Module, stepper: DGCStepper, optimizer: DGCSGD, seeds: range) -> None:
        for seed in seeds:
            step(net, stepper, seed)
            optimizer.step()

    state.start_epoch(2)
    train(straight, stepper, optimizer, range(3))
    restored = pickle.loads(pickle.dumps(state))  # noqa: S301  # of our own making
    assert "not serializable and excluded" in caplog.text
    assert "set to the default group" in caplog.text
    again.load_state_dict(straight.state_dict())
    with pytest.raises(ValueError, match=r"bind\(model\.named_parameters\(\)\)"):
        restored.names.name_of(again[0].weight)  # type: ignore[index]  # a Sequential
    optimizer_again = DGCSGD(again.parameters(), lr=0.1)
    optimizer_again.load_state_dict(optimizer.state_dict())
    restored.process_group = group
    restored.bind(again.named_parameters(), optimizer=optimizer_again)
    assert (restored.step, restored.epoch, restored.config) == (3, 2, CONFIG)
    train(straight, stepper, optimizer, range(3, 6))
    train(again, DGCStepper(restored), optimizer_again, range(3, 6))
    assert all(map(torch.equal, straight.parameters(), again.parameters()))


def test_an_object_of_an_earlier_release_can_be_loaded(group: dist.ProcessGroup) -> None:
    net = model()
    state = state_of(net, group)
    step(net, DGCStepper(state), 0)
    saved = state.__getstate__()
    saved.pop("_steps_that_count", None)
    for memory in saved["_memories"].values():
        del memory.repeats
    restored = DGCState.__new__(DGCState)
    restored.__setstate__(saved)
    restored.bind(net.named_parameters())
    assert all(grad.any() for grad in step(net, DGCStepper(restored), 1))


def test_a_pickled_state_can_only_be_bound_to_its_model_and_a_fitting_optimizer(group: dist.ProcessGroup) -> None:
    net = model()
    restored = pickle.loads(pickle.dumps(state_of(net, group)))  # noqa: S301  # of our own making
    with pytest.raises(ValueError, match=r"1200 entries of 0\.weight, not 12"):
        restored.bind(nn.Sequential(nn.Linear(4, 3)).named_parameters())
    with pytest.raises(ValueError, match="momentum would act twice"):
        restored.bind(net.named_parameters(), optimizer=torch.optim.SGD(net.parameters(), 0.1, momentum=0.9))


def test_a_restored_state_continues_the_warm_up(group: dist.ProcessGroup) -> None:
    state = DGCState(group, DGC(ratio=0.001, warmup_epochs=4), named_parameters=model().named_parameters())
    state.start_epoch(2)
    restored = DGCState(group, DGC(ratio=0.001, warmup_epochs=4), named_parameters=model().named_parameters())
    restored.load_state_dict(state.state_dict())
    assert restored.ratio == state.ratio == pytest.approx(0.0158, rel=0.01)


def test_the_state_of_another_model_is_refused_with_the_first_difference(group: dist.ProcessGroup) -> None:
    state = state_of(model(), group)
    other = DGCState(group, CONFIG, named_parameters=nn.Sequential(nn.Linear(40, 30)).named_parameters())
    with pytest.raises(ValueError, match=r"0 entries of 1\.weight, not 600"):
        state.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match=r"600 entries of 1\.weight, not 0"):
        other.load_state_dict(state.state_dict())
    with pytest.raises(ValueError, match="version 99"):
        state.load_state_dict({**state.state_dict(), "version": 99})


def test_a_state_names_its_kind_and_reads_older_checkpoints_that_do_not(group: dist.ProcessGroup) -> None:
    state = state_of(model(), group)
    saved = state.state_dict()
    with pytest.raises(ValueError, match="a topk state of version 1 cannot be read as dgc"):
        state.load_state_dict({**saved, "kind": "topk"})
    assert saved.pop("kind") == "dgc"
    state.load_state_dict({**saved, "step": 7})
    assert state.step == 7


def test_residuals_are_scaled_to_another_number_of_workers(group: dist.ProcessGroup) -> None:
    net = model()
    state = state_of(net, group)
    step(net, DGCStepper(state), 0)
    before = {kind: {n: t.clone() for n, t in state.state_dict()[kind].items()} for kind in ("momentum", "residual")}
    state.rescale(4, 2)
    after = state.state_dict()
    for name, residual in before["residual"].items():
        assert torch.equal(after["residual"][name] / 2, residual / 4)
    assert torch.equal(after["momentum"]["0.weight"] / 2, before["momentum"]["0.weight"] / 4)
    assert torch.equal(after["momentum"]["0.bias"], before["momentum"]["0.bias"])  # a mean already


def test_a_state_from_another_number_of_workers_is_scaled(group: dist.ProcessGroup) -> None:
    net = model()
    state = state_of(net, group)
    step(net, DGCStepper(state), 0)
    saved = {**state.state_dict(), "workers": 2}
    restored = state_of(model(), group)
    restored.load_state_dict(saved)
    assert torch.equal(restored.state_dict()["residual"]["0.weight"], saved["residual"]["0.weight"] / 2)


def test_workers_share_the_momentum_of_tensors_that_are_sent_whole(group: dist.ProcessGroup) -> None:
    state = state_of(model(), group)
    shared = state.shared()
    assert list(shared) == ["0.bias", "1.bias"]
    shared["0.bias"].fill_(3)  # as a broadcast does
    state.regroup(shared, steps=7)
    assert state.state_dict()["momentum"]["0.bias"].eq(3).all()
    assert state.step == 7


def test_what_was_sent_in_a_step_that_counts_is_never_put_back(group: dist.ProcessGroup) -> None:
    net = model()
    state = state_of(net, group)
    step(net, DGCStepper(state), 0)
    after = {name: tensor.clone() for name, tensor in state.state_dict()["residual"].items()}
    state.end_step()
    state.undo()
    assert all(torch.equal(after[name], tensor) for name, tensor in state.state_dict()["residual"].items())
    step(net, DGCStepper(state), 1)
    assert not torch.equal(state.shared()["0.bias"], state.state_dict()["momentum"]["0.bias"])
    state.undo()
    assert torch.equal(state.shared()["0.bias"], state.state_dict()["momentum"]["0.bias"])
    assert state.state_dict()["residual"]["0.weight"].count_nonzero() == 1200


@pytest.mark.parametrize("tries", [1, 2])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_step_that_broke_off_and_is_repeated_counts_once(
    group: dist.ProcessGroup, momentum: float, tries: int
) -> None:
    net, config = model(), dataclasses.replace(CONFIG, momentum=momentum)
    straight, broken = (DGCState(group, config, named_parameters=net.named_parameters()) for _ in range(2))
    for state in (straight, broken):
        step(net, DGCStepper(state), 0)
        state.end_step()
    for _ in range(tries):
        step(net, DGCStepper(broken), 1)
        broken.undo()
        broken.regroup(broken.shared(), steps=1)
        broken.end_step()
        broken.undo()  # the group breaks off before anything is sent
        broken.regroup(broken.shared(), steps=1)
        broken.end_step()
    for seed in (1, 2):
        results = [step(net, DGCStepper(state), seed) for state in (straight, broken)]
        assert all(map(torch.equal, *results))
    for kind in ("momentum", "residual"):
        one, other = straight.state_dict()[kind], broken.state_dict()[kind]
        assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_a_worker_that_missed_a_group_adds_the_gradient_of_its_next_step(group: dist.ProcessGroup) -> None:
    net = model()
    state = state_of(net, group)
    step(net, DGCStepper(state), 0)
    state.undo()
    state.regroup(state.shared(), steps=3)  # the others have repeated the step, and taken two more
    state.end_step()
    before = state.state_dict()["momentum"]["0.weight"].clone()
    step(net, DGCStepper(state), 3)
    assert (state.state_dict()["momentum"]["0.weight"] != before).sum() > 1000


def test_global_clipping_scales_the_whole_gradient(group: dist.ProcessGroup) -> None:
    net = model()
    everything = DGC(ratio=1.0, warmup_epochs=0, momentum=0, precision="fp32", clip=0.1, clip_norm="global")
    plain = step(net, DGCStepper(DGCState(group, everything, named_parameters=net.named_parameters())), 0)
    free = dataclasses.replace(everything, clip=None)
    whole = step(net, DGCStepper(DGCState(group, free, named_parameters=net.named_parameters())), 0)
    norm = float(torch.cat([grad.flatten() for grad in whole]).norm())
    assert norm > 0.1
    for ours, theirs in zip(plain, whole, strict=True):
        torch.testing.assert_close(ours, theirs * (0.1 / norm))


def test_statistics_come_once_in_so_many_steps(group: dist.ProcessGroup, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    net = model()
    state = state_of(net, group)
    stepper = DGCStepper(state)
    step(net, stepper, 0)
    statistics = StepLog(state, every=3)  # without what was before
    windows = []
    for seed in range(7):
        step(net, stepper, seed)
        windows.append(statistics.step())
    assert [window is not None for window in windows] == [False, False, True, False, False, True, False]
    assert [window.steps for window in windows if window] == [3, 3]
    assert [record.getMessage().partition(", means: ")[0] for record in caplog.records] == [
        "steps 1 to 3",
        "steps 4 to 6",
    ]
    with pytest.raises(ValueError, match="every must be at least 1, not 0"):
        StepLog(state, every=0)


def test_statistics_let_what_was_sent_go(group: dist.ProcessGroup) -> None:
    net = model()
    state = state_of(net, group)
    step(net, DGCStepper(state), 0)
    StepLog(state).step()
    residual = state.state_dict()["residual"]["0.weight"].clone()
    state.undo()
    assert torch.equal(state.state_dict()["residual"]["0.weight"], residual)


def test_frozen_parameters_and_missing_gradients_are_allowed(group: dist.ProcessGroup) -> None:
    net = model()
    net[0].weight.requires_grad_(False)  # type: ignore[index]  # a Sequential
    state = state_of(net, group)
    assert "0.weight" not in state.parameters
    DGCStepper(state).exchange()
    assert all(p.grad is not None and not p.grad.any() for p in state.parameters.values())


def test_gradients_in_another_memory_format_are_exchanged(group: dist.ProcessGroup) -> None:
    net = nn.Conv2d(3, 4, 3)
    net.weight.grad = torch.arange(108.0).view(4, 3, 3, 3).contiguous(memory_format=torch.channels_last)
    net.bias = None
    state = DGCState(group, CONFIG, named_parameters=[("weight", net.weight)])
    DGCStepper(state).exchange()
    assert net.weight.grad.flatten().nonzero().view(-1).tolist() == [106, 107]


def test_a_parameter_that_was_not_named_is_refused(group: dist.ProcessGroup) -> None:
    with pytest.raises(ValueError, match=r"\(2, 3\) is not among"):
        state_of(model(), group).names.name_of(torch.zeros(2, 3))


def test_an_optimizer_with_momentum_is_refused_at_once(group: dist.ProcessGroup) -> None:
    net = model()
    with pytest.raises(ValueError, match="momentum would act twice"):
        DGCState(
            group,
            CONFIG,
            named_parameters=net.named_parameters(),
            optimizer=torch.optim.SGD(net.parameters(), 0.1, momentum=0.9),
        )


def test_without_a_group_the_error_says_what_to_call() -> None:
    state = DGCState(None, CONFIG, named_parameters=model().named_parameters())
    with pytest.raises(ValueError, match="init_process_group"):
        state.state_dict()


@pytest.mark.parametrize("precision", ["fp32", "fp16", "sign"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", ["0.weight", "0.bias", "all"])
def test_a_step_that_is_not_finite_comes_back_as_nan_and_spoils_no_later_one(
    group: dist.ProcessGroup, place: str, bad: float, precision: Precision
) -> None:
    net, config = model(), dataclasses.replace(CONFIG, precision=precision)
    state = DGCState(group, config, named_parameters=net.named_parameters())
    stepper = DGCStepper(state)
    step(net, stepper, 0)
    before = {kind: {n: t.clone() for n, t in state.state_dict()[kind].items()} for kind in ("momentum", "residual")}
    for name, parameter in net.named_parameters():
        parameter.grad = torch.zeros_like(parameter)
        if place in (name, "all"):
            parameter.grad.view(-1)[3] = bad
    stepper.exchange()
    assert all(p.grad is not None and p.grad.isnan().all() for p in net.parameters())  # of one bucket
    after = state.state_dict()
    for kind, tensors in before.items():
        for name, tensor in tensors.items():
            assert torch.equal(after[kind][name], tensor) or place not in (name, "all")
    assert all(grad.isfinite().all() for grad in step(net, stepper, 1))
    assert state.step == 3


def test_a_message_above_the_limit_is_not_sent(group: dist.ProcessGroup) -> None:
    assert exchange(group, b"four", limit=4).wait() == [b"four"]
    with pytest.raises(ValueError, match="5 bytes is larger than the limit"):
        exchange(group, b"fives", limit=4)


def test_the_profile_counts_steps_and_not_buckets(group: dist.ProcessGroup) -> None:
    net = model()
    state = state_of(net, group)
    stepper = DGCStepper(state, bucket_bytes=1000)
    for seed in range(3):
        step(net, stepper, seed)
    assert state.step == state.profile.steps == 3
    assert state.profile.compress_seconds > 0
    assert state.profile.decompress_seconds > 0
    assert state.profile.bytes_sent == 0  # there is nobody else


def test_a_wait_is_time_without_computing_and_decompressing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1.0, 2.0, 4.0, 9.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    meter = Meter()
    meter.sent(10, began=0.5, last=False)  # compressed in 0.5
    meter.sent(20, began=1.5, last=True)  # 0.5; from 2.0 on there is nothing else to do
    meter.received(arrived=3.0)  # waited 1.0, decompressed 1.0
    meter.received(arrived=8.0)  # waited 4.0, decompressed 1.0
    assert meter.total == Profile(1, 30, 5.0, 5.0, 1.0, 2.0)
    assert meter.end_window() == meter.total
    assert meter.end_window() == Profile()


def test_waits_in_the_compressing_thread_do_not_count_as_compression(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1.0, 2.0, 5.0, 6.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    meter = Meter()
    with meter.working(), meter.waiting(bytes_sent=7):  # from 1.0 to 6.0, of which it waits from 2.0 to 5.0
        pass
    meter.end_step()
    assert meter.total == Profile(1, 7, 3.0, 3.0, 2.0, 0.0)


def test_a_plain_hook_waits_from_its_last_bucket_to_the_end_of_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter([1.0, 2.0, 4.5])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    meter = Meter()
    meter.end_step()
    assert meter.total == Profile()  # nothing was exchanged
    meter.last_bucket_left()
    meter.forget_step()  # it failed
    meter.last_bucket_left()
    meter.end_step()
    assert meter.total == Profile(1, 0, 2.5, 2.5)


def test_means_are_per_step() -> None:
    total = Profile()
    assert total.means() == {}
    total.add(Profile(1, 100, 1.0, 1.0, 0.5, 0.25))
    total.add(Profile(1, 300, 3.0, 3.0, 0.5, 0.25))
    assert total.longest_wait_seconds == 3
    assert total.means() == {
        "bytes_sent": 200,
        "wait_seconds": 2,
        "compress_seconds": 0.5,
        "decompress_seconds": 0.25,
    }
