"""Deep gradient compression for training loops without DistributedDataParallel."""

from torch import Tensor, zeros_like

from fedring.ddp.dgc import DGCState

_BUCKET_BYTES = 25 << 20


class DGCStepper:
    """Exchanges gradients between backward pass and optimizer step.

    Several buckets are on their way at a time.

    Args:
        state: The state of this worker.
        bucket_bytes: About the size of the gradients that go into one message; equal on all workers.
    """

    def __init__(self, state: DGCState, *, bucket_bytes: int = _BUCKET_BYTES) -> None:
        self.state = state
        self._buckets = _cut(state.parameters, bucket_bytes)

    def exchange(self) -> None:
        """Replace every parameter's `grad` by the exchanged gradient.

        A missing one counts as zeros.
        """
        buckets = []
        for names in self._buckets:
            tensors = [_grad(self.state.parameters[name]) for name in names]
            buckets.append((names, tensors, [tensor.reshape(-1) for tensor in tensors]))  # copies, if not contiguous
        self.state.clip([grad for _, _, grads in buckets for grad in grads])
        flights = [self.state.send(names, grads, last=names is self._buckets[-1]) for names, _, grads in buckets]
        for (names, tensors, grads), messages in zip(buckets, flights, strict=True):
            self.state.receive(names, grads, messages.wait())
            for tensor, grad in zip(tensors, grads, strict=True):
                if not tensor.is_contiguous():
                    tensor.copy_(grad.view_as(tensor))


def _grad(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        parameter.grad = zeros_like(parameter)
    return parameter.grad.detach()


def _cut(parameters: dict[str, Tensor], most_bytes: int) -> list[list[str]]:
    """Return the names in their order, in buckets of about `most_bytes`."""
    buckets: list[list[str]] = [[]]
    room = most_bytes
    for name, parameter in parameters.items():
        if room < parameter.nbytes and buckets[-1]:
            buckets.append([])
            room = most_bytes
        buckets[-1].append(name)
        room -= parameter.nbytes
    return buckets
