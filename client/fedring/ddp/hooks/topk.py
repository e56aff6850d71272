"""The largest entries of each tensor, and feedback for all others.

Unlike DGC there is no momentum correction and no warm-up: any optimizer may follow.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from fedring.codec.gradient import Entries, Part, decode_gradient, encode_gradient, largest_message
from fedring.codec.precision import Precision, to_words
from fedring.compress.correction import Feedback
from fedring.compress.dgc import DGC, kept_count
from fedring.compress.dgc_select import select
from fedring.ddp.exchange import exchange
from fedring.ddp.hooks.corrected import CorrectedState
from fedring.ddp.hooks.gradients import Gradients
from fedring.ddp.hooks.turns import Steps

_SELECTION = DGC()  # how a threshold is found


class TopKState(CorrectedState):
    """The state of topk_hook: the share of the entries that is sent, and what was left out."""

    kind = "topk"

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        *,
        ratio: float = 0.01,
        precision: Precision = "fp16",
        feedback: Feedback = "ef",
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    ) -> None:
        super().__init__(process_group, feedback=feedback, named_parameters=named_parameters)
        if not 0 < ratio <= 1:
            raise ValueError(f"ratio must be above 0 and at most 1, not {ratio}")
        self.ratio = ratio
        self.precision: Precision = precision

    def steps(self, grads: Gradients) -> Steps:
        """As CorrectedState.steps; tensors of fewer entries than DGC compresses are sent whole."""
        sizes, targets = grads.sizes(), self.targets(grads)
        counts = [kept_count(n, self.ratio) if n >= _SELECTION.min_numel_to_compress else None for n in sizes]
        parts = [self._part(target, count) for target, count in zip(targets, counts, strict=True)]
        payload = encode_gradient(parts, sizes=sizes)
        flight = exchange(self.group, payload, limit=self._limit(sizes, counts))
        messages: Sequence[memoryview] = yield flight
        decoded = [decode_gradient(message, sizes=sizes) for message in messages]
        mine = decoded[self.group.rank()]
        self.settle(grads, targets, [_dense([entries], grad) for entries, grad in zip(mine, targets, strict=True)])
        of_tensors = zip(*decoded, strict=True)
        means = [_dense(all_, grad).div_(len(decoded)) for all_, grad in zip(of_tensors, targets, strict=True)]
        return self.store(grads, means)

    def _part(self, target: Tensor, count: int | None) -> Part:
        if count is None:
            return Part(None, to_words(target.cpu().numpy(), self.precision))
        indices = select(target, count, _SELECTION)
        return Part(indices.cpu().numpy(), to_words(target[indices].cpu().numpy(), self.precision))

    def _limit(self, sizes: Sequence[int], counts: Sequence[int | None]) -> int:
        return largest_message(list(zip(sizes, counts, strict=True)), self.precision)


def topk_hook(state: TopKState, bucket: GradBucket) -> Future[Tensor]:
    """A future of the bucket's buffer, which then holds the mean of the entries that the workers have sent.

    A gradient with NaN or infinity is refused by all workers, with an error that is raised in backward.
    """
    return state.turns.start(bucket, state.steps(state.names.of(bucket)))


def _dense(messages: Iterable[Entries], like: Tensor) -> Tensor:
    """The sum of what `messages` say of one tensor, [n] float32 as `like`; equal messages make equal bits."""
    total = torch.zeros_like(like)
    for entries in messages:
        values = torch.tensor(entries.values, device=total.device)
        if entries.positions is None:
            total.add_(values)
        else:
            total.index_add_(0, torch.from_numpy(entries.positions).to(total.device), values)
    return total
