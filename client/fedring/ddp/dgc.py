"""Deep gradient compression as a communication hook: its state and the hook.

The method is that of Lin et al. 2018, arXiv 1712.01887.

One message a bucket goes to all other workers at once, while the gradients of other buckets are computed, unless
gradients are clipped together. The state knows nothing of buckets: it is the same with any bucket_cap_mb.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.optim import Optimizer

from fedring.c10d import GradBucket
from fedring.codec.gradient import encode_gradient, largest_message
from fedring.compress.dgc import DGC, Memory, clip_together, put_back, ratio_at
from fedring.ddp.exchange import exchange
from fedring.ddp.gradients import Gradients
from fedring.ddp.parts import DGCStep, apply_parts, count_to_send, make_part, read_messages, whole_precision
from fedring.ddp.sgd import check_optimizer
from fedring.ddp.state import HookState


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """A bucket that waits for the other buckets of its step.

    Their gradients are clipped together.
    """

    grads: Gradients
    future: Future[Tensor]


class DGCState(HookState):
    """The state of deep gradient compression: residuals and momentum.

    It covers the parameters that need a gradient.

    Args:
        group: The group to exchange with; None is the default group.
        config: How gradients are compressed.
        named_parameters: As from `model.named_parameters()`.
        optimizer: The optimizer that follows, to be checked: its momentum must not act a second time.

    Attributes:
        epoch: The epoch that the warm-up is in, counted from 0.
        step: The steps taken.
    """

    kind = "dgc"
    _steps_that_count = 0

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        config: DGC,
        *,
        named_parameters: Iterable[tuple[str, Tensor]],
        optimizer: Optimizer | None = None,
    ) -> None:
        super().__init__(group, named_parameters)
        if optimizer is not None:
            check_optimizer(optimizer, config)
        self.config = config
        self.epoch = 0
        self.step = 0
        self._held: list[_Held] = []
        self._memories = {name: Memory.empty(p.numel(), p.device) for name, p in self.parameters.items()}

    @property
    def ratio(self) -> float:  # type: ignore[override]  # the only kind whose share depends on the epoch
        """The share of entries that is sent in this epoch."""
        return ratio_at(self.config, self.epoch)

    @property
    def clips_globally(self) -> bool:
        """Whether a step's gradients must be complete before any is sent."""
        return self.config.clip is not None and self.config.clip_norm == "global"

    def bind(self, named_parameters: Iterable[tuple[str, Tensor]], *, optimizer: Optimizer | None = None) -> None:
        """See HookState.bind; this also checks the model and the optimizer.

        To be called for a state that was loaded as an object. The checks are those of the constructor.

        Args:
            named_parameters: Of the model that the state was made for.
            optimizer: The optimizer that follows.

        Raises:
            ValueError: If the model or the optimizer does not fit.
        """
        super().bind(named_parameters)
        # The objects of earlier releases do not have all that a memory has now.
        self._memories = {name: Memory(kept.momentum, kept.residual) for name, kept in self._memories.items()}
        _check_sizes(self.parameters, self.owed())
        if optimizer is not None:
            check_optimizer(optimizer, self.config)

    def start_epoch(self, epoch: int) -> None:
        """See HookState.start_epoch; the warm-up lowers the share that is sent."""
        self.epoch = epoch

    def clip(self, grads: Sequence[Tensor]) -> None:
        """Clip all gradients of a step in place, by their common norm.

        Nothing happens unless the configuration bounds that norm.
        """
        if self.config.clip is not None and self.config.clip_norm == "global":
            clip_together(grads, self.config.clip, self.group.size())

    def send(self, names: Sequence[str], grads: Sequence[Tensor], *, last: bool) -> Future[list[memoryview]]:
        """Send a message with some tensors' entries to all workers.

        All workers send messages about the same tensors in the same order.

        Args:
            names: The names of the tensors.
            grads: This worker's gradients, each [n] of any float dtype; they are not changed.
            last: Whether this ends the step.

        Returns:
            A future of all workers' messages, in the order of ranks.
        """
        began = time.perf_counter()
        now = DGCStep(self.config, self.ratio, self.step, self.group.size())
        sizes = [grad.numel() for grad in grads]
        with torch.no_grad():
            parts = [make_part(grad, self._memories[name], now) for name, grad in zip(names, grads, strict=True)]
        payload = encode_gradient(parts, sizes=sizes)
        # The parts have left the residuals above; if the step fails, `undo` puts them back.
        self.step += last
        self.meter.sent(len(payload) * (now.workers - 1), began=began, last=last)
        return exchange(self.group, payload, limit=_limit(sizes, now))

    def receive(self, names: Sequence[str], grads: Sequence[Tensor], messages: Sequence[memoryview]) -> None:
        """Replace gradients by the mean of all workers' messages.

        If a worker's gradient has NaN or infinity, all become NaN on all workers, as in a mean without compression. The
        entries that were sent return to the residuals: whoever scales gradients skips such a step.

        Args:
            names: The names of the tensors.
            grads: The tensors, each [n] of any float dtype, which are overwritten.
            messages: All workers' messages about them, in the order of ranks.

        Raises:
            CodecError: If a message is not valid; the text names its rank.
        """
        arrived = time.perf_counter()
        decoded = read_messages(messages, [grad.numel() for grad in grads])
        with torch.no_grad():
            if decoded is None:
                for name, grad in zip(names, grads, strict=True):
                    put_back(self._memories[name])
                    grad.fill_(torch.nan)
            else:
                for name, grad, *parts in zip(names, grads, *decoded, strict=True):
                    apply_parts(parts, grad, self._memories[name], self.config)
            if any(grad.is_cuda for grad in grads):  # those who wait for the future may use another stream
                torch.cuda.current_stream().synchronize()
        self.meter.received(arrived=arrived)

    def hold(self, bucket: GradBucket, grads: Gradients) -> Future[Tensor]:
        """Hold a bucket until the last one of its step comes.

        Then all are clipped together and exchanged.

        Returns:
            A future of the bucket's buffer, which has its value once the step's last bucket was held.
        """
        buffer = grads.buffer
        held = _Held(grads, Future(devices=[buffer.device] if buffer.is_cuda else None))
        if bucket.index() == 0:
            self._held.clear()  # of a step that failed
        self._held.append(held)
        if bucket.is_last():
            step, self._held = self._held, []
            self.clip([grad for one in step for grad in one.grads.flat()])
            flights = [self.send(one.grads.names, one.grads.flat(), last=one is held) for one in step]
            for one, messages in zip(step, flights, strict=True):
                self.receive(one.grads.names, one.grads.flat(), messages.wait())
                one.future.set_result(one.grads.buffer)
        return held.future

    def owed(self) -> dict[str, Tensor]:
        """See HookState.owed: the residuals."""
        return {name: memory.residual for name, memory in self._memories.items()}

    def end_step(self) -> None:
        """See HookState.end_step; sent entries are not put back any more."""
        self._steps_that_count = self.step
        for memory in self._memories.values():
            memory.taken = None

    def undo(self) -> None:
        """See HookState.undo; entries that were sent return to the residuals.

        There they stay together with the rest of the broken step's gradient, which cannot be told from earlier ones any
        more. When the step is repeated with the same parameters, it stands for the new gradient.
        """
        for memory in self._memories.values():
            memory.repeats |= memory.taken is not None and memory.taken.indices is not None
            put_back(memory)

    def shared(self) -> dict[str, Tensor]:
        """See HookState.shared: the momentum of the tensors that are sent whole."""
        whole = {name: self._memories[name] for name in self._sent_whole()}
        return {name: (memory.taken or memory).momentum.clone() for name, memory in whole.items()}

    def regroup(self, shared: dict[str, Tensor], *, steps: int) -> None:
        """See HookState.regroup."""
        super().regroup(shared, steps=steps)
        if steps != self._steps_that_count:  # the others have repeated the step that broke here
            for memory in self._memories.values():
                memory.repeats = False
        self.step = steps
        for name, momentum in shared.items():
            self._memories[name].momentum.copy_(momentum)

    def rescale(self, old_world: int, new_world: int) -> None:
        """See HookState.rescale; the momentum of whole tensors stays.

        Tensors that are sent whole have a momentum that is a mean already.
        """
        whole = self._sent_whole()
        for name, memory in self._memories.items():
            memory.residual.mul_(new_world / old_world)
            if name not in whole:
                memory.momentum.mul_(new_world / old_world)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See HookState.load_state_dict; older checkpoints of this kind do not name it."""
        super().load_state_dict({"kind": self.kind, **state})

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_held": []}

    def _contents(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "step": self.step,
            "momentum": {name: memory.momentum for name, memory in self._memories.items()},
            "residual": self.owed(),
        }

    def _load(self, state: dict[str, Any]) -> None:
        for kind in ("momentum", "residual"):
            _check_sizes(self.parameters, state[kind])
        for name, memory in self._memories.items():
            memory.taken, memory.repeats = None, False
            memory.momentum.copy_(state["momentum"][name])
            memory.residual.copy_(state["residual"][name])
        self.epoch, self.step = state["epoch"], state["step"]
        self._steps_that_count = self.step

    def _sent_whole(self) -> list[str]:
        now = DGCStep(self.config, self.ratio, self.step, 1)
        return [name for name, m in self._memories.items() if count_to_send(m.residual.numel(), now) is None]


def dgc_hook(state: DGCState, bucket: GradBucket) -> Future[Tensor]:
    """Send the most important entries of a bucket's gradients, with momentum correction.

    Args:
        state: This worker's state.
        bucket: The bucket that DistributedDataParallel has filled. Nothing of it is kept once the future has its value.

    Returns:
        A future of the bucket's buffer, which then holds the mean of all workers' entries, or NaN if a worker's
        gradient has NaN or infinity.
    """
    grads = state.names.of(bucket)
    # The common norm is known only when all gradients of the step are there.
    if state.clips_globally:
        return state.hold(bucket, grads)
    messages = state.send(grads.names, grads.flat(), last=bucket.is_last())

    def receive(arrived: Future[list[memoryview]]) -> Tensor:
        state.receive(grads.names, grads.flat(), arrived.value())
        return grads.buffer

    return messages.then(receive)


def _check_sizes(parameters: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    got = {name: tensor.numel() for name, tensor in tensors.items()}
    wanted = {name: p.numel() for name, p in parameters.items()}
    if got != wanted:
        name = next(name for name in (*wanted, *got) if got.get(name) != wanted.get(name))
        raise ValueError(f"the dgc state has {got.get(name, 0)} entries of {name}, not {wanted.get(name, 0)}")


def _limit(sizes: Sequence[int], step: DGCStep) -> int:
    """Return the largest size of a message about the tensors, in bytes."""
    sparse = [(size, count) for size in sizes if (count := count_to_send(size, step)) is not None]
    whole = [(size, None) for size in sizes if count_to_send(size, step) is None]
    return largest_message(sparse, step.config.precision) + largest_message(whole, whole_precision(step.config))
