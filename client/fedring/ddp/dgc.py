"""Deep gradient compression as a communication hook of DistributedDataParallel."""

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from fedring.ddp.state import DGCState, Held


def dgc_hook(state: DGCState, bucket: GradBucket) -> Future[Tensor]:
    """A future of the bucket's buffer, which then holds what all workers have sent of these gradients.

    One message a bucket goes out at once, while the gradients of other buckets are computed, unless they are clipped
    together. Nothing of the bucket is kept once the future has its value: its storage may serve another step.
    """
    parameters = bucket.parameters()
    names = [state.name_of(parameter) for parameter in parameters]
    buffer = bucket.buffer()
    grads = torch.split(buffer, [parameter.numel() for parameter in parameters])
    if state.clips_globally:
        return _hold(state, bucket, Held(names, buffer, grads, _future(buffer)))
    messages = state.send(names, grads, last=bucket.is_last())

    def receive(arrived: Future[list[memoryview]]) -> Tensor:
        state.receive(names, grads, arrived.value())
        return buffer

    return messages.then(receive)


def _hold(state: DGCState, bucket: GradBucket, held: Held) -> Future[Tensor]:
    """As dgc_hook; all buckets are sent when the last has come, and answered before this returns."""
    if bucket.index() == 0:
        state.held.clear()  # of a step that failed
    state.held.append(held)
    if bucket.is_last():
        step, state.held = state.held, []
        state.clip([grad for one in step for grad in one.grads])
        flights = [state.send(one.names, one.grads, last=one is held) for one in step]
        for one, messages in zip(step, flights, strict=True):
            state.receive(one.names, one.grads, messages.wait())
            one.future.set_result(one.buffer)
    return held.future


def _future(buffer: Tensor) -> Future[Tensor]:
    return Future(devices=[buffer.device] if buffer.is_cuda else None)
