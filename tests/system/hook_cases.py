"""Every hook on a small model; test_hooks.py runs this on real ranks, each in its own process."""

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from fedring.compress.dgc import DGC
from fedring.ddp import hooks
from fedring.ddp.sgd import DGCSGD
from fedring.ddp.state import HookState

START = 2  # first step that PowerSGD compresses
STEPS = 6
MEASURED = 4  # steps: the last one has residuals of compressed gradients, and factors to start from
BUCKETS = {"one": 25.0, "many": 0.0005}  # MiB


class Case(NamedTuple):
    """A hook, the function that makes its state, and the largest relative distance of its result from the mean."""

    hook: Any
    make: Callable[[nn.Module], Any] = lambda model: None
    bound: float = 1.0


def _power(model: nn.Module, **options: Any) -> hooks.PowerSGDState:
    options = {"matrix_approximation_rank": 2, "start_powerSGD_iter": START} | options
    return hooks.PowerSGDState(None, **options, named_parameters=model.named_parameters())


def _int8(model: nn.Module, **options: Any) -> hooks.Int8State:
    return hooks.Int8State(None, chunk=64, **options, named_parameters=model.named_parameters())


def _topk(model: nn.Module, **options: Any) -> hooks.TopKState:
    return hooks.TopKState(None, ratio=0.1, **options, named_parameters=model.named_parameters())


def _dgc(model: nn.Module) -> hooks.DGCState:
    config = DGC(ratio=0.1, warmup_epochs=0, momentum=0.0, precision="fp32")
    return hooks.DGCState(None, config, named_parameters=model.named_parameters())


CASES = {
    "allreduce": Case(hooks.allreduce_hook, bound=1e-6),
    "fp16": Case(hooks.fp16_compress_hook, bound=2e-3),
    "bf16": Case(hooks.bf16_compress_hook, bound=2e-2),
    "fp16(allreduce)": Case(hooks.fp16_compress_wrapper(hooks.allreduce_hook), bound=2e-3),
    "bf16(allreduce)": Case(hooks.bf16_compress_wrapper(hooks.allreduce_hook), bound=2e-2),
    "powersgd": Case(hooks.powerSGD_hook, _power),
    "powersgd in batches": Case(hooks.powerSGD_hook, lambda model: _power(model, batch_tensors_with_same_shape=True)),
    "powersgd cold": Case(hooks.powerSGD_hook, lambda model: _power(model, warm_start=False)),
    "batched powersgd": Case(hooks.batched_powerSGD_hook, _power),
    "fp16(powersgd)": Case(hooks.fp16_compress_wrapper(hooks.powerSGD_hook), _power),
    "bf16(batched powersgd)": Case(hooks.bf16_compress_wrapper(hooks.batched_powerSGD_hook), _power, 1.02),
    "int8": Case(hooks.int8_hook, _int8, 2e-2),
    "int8 without feedback": Case(hooks.int8_hook, lambda model: _int8(model, feedback="none"), 2e-2),
    "int8 ef21": Case(hooks.int8_hook, lambda model: _int8(model, feedback="ef21"), 2e-2),
    "bf16(int8)": Case(hooks.bf16_compress_wrapper(hooks.int8_hook), _int8, 3e-2),
    "topk": Case(hooks.topk_hook, _topk),
    "topk ef21": Case(hooks.topk_hook, lambda model: _topk(model, feedback="ef21"), 2.0),
    "fp16(topk)": Case(hooks.fp16_compress_wrapper(hooks.topk_hook), _topk),
    "dgc": Case(hooks.dgc_hook, _dgc),
}


class Net(nn.Module):
    """Two matrices of one shape, one of another, and vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 12))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits [batch, 12] of inputs [batch, 24]."""
        logits: Tensor = self.body(inputs)
        return logits


class Training:
    """A model with a hook, which records the gradients that it was asked to send."""

    def __init__(self, case: Case, bucket_mb: float) -> None:
        torch.manual_seed(7)
        self.model = Net()
        self.state = case.make(self.model)
        self.asked: dict[str, Tensor] = {}
        self.buckets = 0
        self._hook = case.hook
        self._names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=bucket_mb)
        self.ddp.register_comm_hook(self.state, self._watched)
        kind = DGCSGD if isinstance(self.state, hooks.DGCState) else torch.optim.SGD
        self.optimizer = kind(self.model.parameters(), lr=0.1)

    def step(self, number: int) -> None:
        """Train one step."""
        generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
        inputs, classes = torch.randn(8, 24, generator=generator), torch.randint(0, 12, (8,), generator=generator)
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.ddp(inputs), classes).backward()  # type: ignore[no-untyped-call]  # torch's
        self.optimizer.step()

    def asked_to_send(self) -> Tensor:
        """Return this worker's gradients, flat."""
        return torch.cat([self.asked[name] for name, _ in self.model.named_parameters()])

    def result(self) -> Tensor:
        """Return the gradients that the optimizer has used, flat."""
        grads = [parameter.grad for parameter in self.model.parameters()]
        return torch.cat([grad.flatten() for grad in grads if grad is not None])

    def residual(self) -> Tensor:
        """Return this worker's residual, flat; with EF21, its estimate."""
        return torch.cat([self._residual_of(name, parameter) for name, parameter in self.model.named_parameters()])

    def parameters(self) -> Tensor:
        """Return the model's parameters, flat."""
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])

    def _residual_of(self, name: str, parameter: Tensor) -> Tensor:
        state, none = self.state, torch.zeros(parameter.numel())
        if isinstance(state, hooks.PowerSGDState):
            return state.error_dict.get(name, none).clone()
        if isinstance(state, hooks.DGCState):
            return state.owed()[name].clone()
        if isinstance(state, HookState) and name in state.kept and state.feedback != "none":  # type: ignore[attr-defined]
            return state.kept[name].own.clone()  # type: ignore[attr-defined,no-any-return]
        return none

    def _watched(self, state: Any, bucket: GradBucket) -> Future[Tensor]:
        for parameter, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
            self.asked[self._names[id(parameter)]] = grad.detach().clone().flatten()
        self.buckets = bucket.index() + 1
        future: Future[Tensor] = self._hook(state, bucket)
        return future


def mean(tensor: Tensor) -> Tensor:
    """Return the mean over all ranks, in float64."""
    total = tensor.to(torch.float64, copy=True)
    dist.all_reduce(total)
    return total / dist.get_world_size()


def matrix(rank: int, size: int) -> dict[str, dict[str, Any]]:
    """Train with each hook, in one bucket and in many; return results by hook and buckets.

    Returns:
        `digest` names the gradients of all steps. `off` is the largest distance, over the steps, of the result from the
        mean of gradients and residuals; `lost` is the largest part of that mean that is neither in the result nor in
        the residuals. Both are relative. `buckets` is the number of buckets, and `sent` the bytes of a step.
    """
    return {
        f"{name}, {buckets}": _measure(case, BUCKETS[buckets]) for name, case in CASES.items() for buckets in BUCKETS
    }


def _measure(case: Case, bucket_mb: float) -> dict[str, Any]:
    training = Training(case, bucket_mb)
    digest, off, lost = hashlib.sha256(), 0.0, 0.0
    estimates = getattr(training.state, "feedback", "") == "ef21"
    for number in range(MEASURED):
        before = torch.zeros_like(training.residual()) if estimates else training.residual()
        training.step(number)
        digest.update(training.result().numpy().tobytes())
        wanted, result = mean(training.asked_to_send() + before), training.result()
        kept = mean(training.residual())
        off = max(off, float((result - wanted).norm() / wanted.norm()))
        gap = result - kept if estimates else result + kept - wanted
        lost = max(lost, float(gap.norm() / wanted.norm()))
    sent = training.state.profile.means()["bytes_sent"] if isinstance(training.state, HookState) else 0
    return {"digest": digest.hexdigest(), "off": off, "lost": lost, "buckets": training.buckets, "sent": sent}
