"""Deep gradient compression as a communication hook of DistributedDataParallel."""

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from fedring.ddp.state import DGCState


def dgc_hook(state: DGCState, bucket: GradBucket) -> Future[Tensor]:
    """A future of the bucket's buffer, which then holds what all workers have sent of these gradients.

    One message a bucket goes out at once, while the gradients of other buckets are computed. Nothing of the bucket is
    kept once the future has its value: its storage may serve another step.
    """
    parameters = bucket.parameters()
    names = [state.name_of(parameter) for parameter in parameters]
    buffer = bucket.buffer()
    grads = torch.split(buffer, [parameter.numel() for parameter in parameters])
    messages = state.send(names, grads, last=bucket.is_last())

    def receive(arrived: Future[list[memoryview]]) -> Tensor:
        state.receive(names, grads, arrived.value())
        return buffer

    return messages.then(receive)
