"""What one worker remembers between compressed steps, by the names of its parameters."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.optim import Optimizer

from fedring.codec import CodecError
from fedring.codec.gradient import Entries, decode_gradient, encode_gradient, largest_message
from fedring.compress.dgc import DGC, Memory, clip_together, put_back, ratio_at
from fedring.ddp.exchange import exchange
from fedring.ddp.parts import Round, apply_parts, count_to_send, make_part, whole_precision
from fedring.ddp.profile import Meter, Profile
from fedring.ddp.sgd import check_optimizer

_VERSION = 1


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A bucket's gradients, which wait for those of all others."""

    names: Sequence[str]
    buffer: Tensor  # [n]
    grads: Sequence[Tensor]  # parts of it
    future: Future[Tensor]


class DGCState:
    """The state of deep gradient compression over `group`, for the parameters that need a gradient.

    It knows nothing of buckets: it is the same whatever bucket_cap_mb, and moves to another number of workers.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        config: DGC,
        *,
        named_parameters: Iterable[tuple[str, Tensor]],
        optimizer: Optimizer | None = None,
    ) -> None:
        if optimizer is not None:
            check_optimizer(optimizer, config)
        self.group = group or dist.group.WORLD  # may be set anew when workers form another group
        self.config = config
        self.parameters = {name: tensor for name, tensor in named_parameters if tensor.requires_grad}
        self.epoch = 0
        self.step = 0
        self.meter = Meter()
        self.held: list[Held] = []  # of a step whose gradients are clipped together
        self._names = {id(tensor): name for name, tensor in self.parameters.items()}
        self._memories = {name: Memory.empty(p.numel(), p.device) for name, p in self.parameters.items()}

    @property
    def profile(self) -> Profile:
        """The sums over all steps so far."""
        return self.meter.total

    @property
    def ratio(self) -> float:
        """The share of entries sent in this epoch."""
        return ratio_at(self.config, self.epoch)

    @property
    def residual_norm(self) -> float:
        """The L2 norm of what is owed."""
        norms = [torch.linalg.vector_norm(memory.residual) for memory in self._memories.values()]
        return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0

    @property
    def clips_globally(self) -> bool:
        """Whether nothing can be sent before all of a step's gradients are there."""
        return self.config.clip is not None and self.config.clip_norm == "global"

    def start_epoch(self, epoch: int) -> None:
        """The warm-up is in `epoch`, counted from 0; all workers call this between the same two steps."""
        self.epoch = epoch

    def name_of(self, parameter: Tensor) -> str:
        """The name of `parameter`, by identity."""
        try:
            return self._names[id(parameter)]
        except KeyError:
            shape = tuple(parameter.shape)
            raise ValueError(f"a parameter of shape {shape} is not among the named_parameters of DGCState") from None

    def clip(self, grads: Sequence[Tensor]) -> None:
        """`grads`, all of a step, are clipped, if it is their common norm that must be."""
        if self.config.clip is not None and self.config.clip_norm == "global":
            clip_together(grads, self.config.clip, self._workers())

    def send(self, names: Sequence[str], grads: Sequence[Tensor], *, last: bool) -> Future[list[memoryview]]:
        """Messages about `grads`, each flat, are on their way; `last` ends the step, and all workers send alike."""
        began = time.perf_counter()
        this = Round(self.config, self.ratio, self.step, self._workers())
        sizes = [grad.numel() for grad in grads]
        with torch.no_grad():
            parts = [make_part(grad, self._memories[name], this) for name, grad in zip(names, grads, strict=True)]
        payload = encode_gradient(parts, sizes=sizes)
        self.step += last
        self.meter.sent(len(payload) * (this.workers - 1), began=began, last=last)
        return exchange(self._group(), payload, limit=_limit(sizes, this))

    def receive(self, names: Sequence[str], grads: Sequence[Tensor], messages: Sequence[memoryview]) -> None:
        """`grads`, each flat, hold what all workers' `messages`, in rank order, make of them."""
        arrived = time.perf_counter()
        sizes = [grad.numel() for grad in grads]
        decoded = [_decode(message, sizes, rank) for rank, message in enumerate(messages)]
        with torch.no_grad():
            for name, grad, *parts in zip(names, grads, *decoded, strict=True):
                apply_parts(parts, grad, self._memories[name], self.config)
            if any(grad.is_cuda for grad in grads):  # who waits for the future may use another stream
                torch.cuda.current_stream().synchronize()
        self.meter.received(arrived=arrived)

    def end_step(self) -> None:
        """The step counts; how a state lives on when its group has failed, hooks/state.py tells."""
        for memory in self._memories.values():
            memory.taken = None

    def undo(self) -> None:
        """What was sent since the newest step that counts is owed again."""
        for memory in self._memories.values():
            put_back(memory)

    def shared(self) -> dict[str, Tensor]:
        """What must be equal on all workers, as it was after the newest step that counts; copies."""
        whole = {name: self._memories[name] for name in self._sent_whole()}
        return {name: (memory.taken or memory).momentum.clone() for name, memory in whole.items()}

    def regroup(self, shared: dict[str, Tensor], *, steps: int) -> None:
        """The state goes on after `steps` steps of the default group, whose workers all hold `shared`."""
        self.group = dist.group.WORLD
        self.step = steps
        for name, momentum in shared.items():
            self._memories[name].momentum.copy_(momentum)
        meter = Meter()  # messages of a step that broke are never answered
        meter.total.add(self.profile)
        self.meter = meter

    def rescale(self, old_world: int, new_world: int) -> None:
        """What is owed counts in a mean over `new_world` workers as it would have in one over `old_world`."""
        shared = self._sent_whole()
        for name, memory in self._memories.items():
            memory.residual.mul_(new_world / old_world)
            if name not in shared:
                memory.momentum.mul_(new_world / old_world)

    def state_dict(self) -> dict[str, Any]:
        """Tensors, which are the state's own, and plain values; each worker has another."""
        return {
            "version": _VERSION,
            "workers": self._workers(),
            "epoch": self.epoch,
            "step": self.step,
            "momentum": {name: memory.momentum for name, memory in self._memories.items()},
            "residual": {name: memory.residual for name, memory in self._memories.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """This is the state that `state` was taken from, scaled if the number of workers is another."""
        if state["version"] != _VERSION:
            raise ValueError(f"a DGC state of version {state['version']} cannot be read; this is version {_VERSION}")
        for kind in ("momentum", "residual"):
            self._check_sizes(state[kind])
        for name, memory in self._memories.items():
            memory.momentum.copy_(state["momentum"][name])
            memory.residual.copy_(state["residual"][name])
        self.epoch, self.step = state["epoch"], state["step"]
        if state["workers"] != self._workers():
            self.rescale(state["workers"], self._workers())

    def _sent_whole(self) -> list[str]:
        this = Round(self.config, self.ratio, self.step, 1)
        return [name for name, p in self.parameters.items() if count_to_send(p.numel(), this) is None]

    def _check_sizes(self, tensors: dict[str, Tensor]) -> None:
        got = {name: tensor.numel() for name, tensor in tensors.items()}
        wanted = {name: p.numel() for name, p in self.parameters.items()}
        if got != wanted:
            name = next(name for name in (*wanted, *got) if got.get(name) != wanted.get(name))
            raise ValueError(f"the DGC state has {got.get(name, 0)} entries of {name}, not {wanted.get(name, 0)}")

    def _group(self) -> dist.ProcessGroup:
        if self.group is None:
            raise ValueError("DGCState needs a process group: call torch.distributed.init_process_group first")
        return self.group

    def _workers(self) -> int:
        return self._group().size()


def _limit(sizes: Sequence[int], this: Round) -> int:
    """No worker's message about tensors of `sizes` is larger."""
    sparse = [(size, count) for size in sizes if (count := count_to_send(size, this)) is not None]
    whole = [(size, None) for size in sizes if count_to_send(size, this) is None]
    return largest_message(sparse, this.config.precision) + largest_message(whole, whole_precision(this.config))


def _decode(message: memoryview, sizes: Sequence[int], rank: int) -> list[Entries]:
    try:
        return decode_gradient(message, sizes=sizes)
    except CodecError as error:
        raise CodecError(error.reason, f"from rank {rank}: {error.detail}") from error
