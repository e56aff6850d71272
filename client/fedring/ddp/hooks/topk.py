"""The largest entries of each tensor, with error feedback for all others.

Unlike in DGC there is no momentum correction and no warm-up: any optimizer may follow.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from fedring.c10d import GradBucket
from fedring.codec.gradient import Entries, Part, encode_gradient, largest_message
from fedring.codec.precision import Precision, to_words
from fedring.compress.correction import Feedback
from fedring.compress.dgc import DGC, kept_count
from fedring.compress.dgc_select import select
from fedring.ddp.exchange import exchange
from fedring.ddp.gradients import Gradients
from fedring.ddp.hooks.corrected import CorrectedState
from fedring.ddp.parts import add_entries, read_messages
from fedring.ddp.turns import Collective, Steps
from fedring.train.names.hooks import choose_hook

_SELECTION = DGC()  # how a threshold is found


class TopKState(CorrectedState):
    """The state of topk_hook: the entries that were left out.

    Args:
        process_group: The group to exchange with; None is the default group.
        ratio: The share of the entries that is sent, above 0 and at most 1.
        precision: Of the values in messages.
        feedback: The kind of error feedback for the other entries (`fedring.compress.correction`).
        named_parameters: As from `model.named_parameters()`; without them the state is kept by the index of buckets.
    """

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
        choose_hook("topk", {"ratio": ratio, "precision": precision})
        self.ratio = ratio
        self.precision: Precision = precision

    def steps(self, grads: Gradients) -> Steps:
        """See CorrectedState.steps; tensors of fewer entries than DGC compresses are sent whole."""
        group, sizes, targets = self.group, grads.sizes(), self.targets(grads)
        counts = [kept_count(n, self.ratio) if n >= _SELECTION.min_numel_to_compress else None for n in sizes]
        parts = [self._part(target, count) for target, count in zip(targets, counts, strict=True)]
        payload = encode_gradient(parts, sizes=sizes)
        limit = largest_message(list(zip(sizes, counts, strict=True)), self.precision)
        future = exchange(group, payload, limit=limit)
        names = tuple(grads.names)
        self.pending[names] = lambda _: self._settle_own(names, targets, read_messages([payload], sizes), 0)
        messages: Sequence[memoryview] = yield Collective(future, len(payload) * (group.size() - 1))
        decoded = read_messages(messages, sizes)
        del self.pending[names]
        self._settle_own(names, targets, decoded, group.rank())
        if decoded is None:
            return grads.buffer.fill_(torch.nan)
        sums = [
            add_entries(parts, torch.zeros_like(target))
            for parts, target in zip(zip(*decoded, strict=True), targets, strict=True)
        ]
        return self.store(grads, [total.div_(len(decoded)) for total in sums])

    def _settle_own(
        self, names: Sequence[str], targets: Sequence[Tensor], decoded: Sequence[Sequence[Entries]] | None, rank: int
    ) -> None:
        """Keep the part that this worker's message has left out.

        It is that of `rank`. A step that is not finite, `decoded` None, leaves the memory as it was: whoever scales
        gradients skips it.
        """
        if decoded is not None:
            parts = zip(decoded[rank], targets, strict=True)
            self.settle(names, targets, [add_entries([part], torch.zeros_like(target)) for part, target in parts])

    def _part(self, target: Tensor, count: int | None) -> Part:
        if count is None:
            return Part(None, to_words(target.cpu().numpy(), self.precision))
        indices = select(target, count, _SELECTION)
        return Part(indices.cpu().numpy(), to_words(target[indices].cpu().numpy(), self.precision))


def topk_hook(state: TopKState, bucket: GradBucket) -> Future[Tensor]:
    """Send the largest entries of each tensor of a bucket.

    Args:
        state: This worker's state.
        bucket: The bucket that DistributedDataParallel has filled.

    Returns:
        A future of the bucket's buffer, which then holds the mean of the entries that the workers have sent, or NaN if
        a worker's gradient has NaN or infinity.
    """
    return state.turns.start(bucket, state.steps(state.names.of(bucket)))
