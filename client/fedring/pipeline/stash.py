"""Weight stashing: a backward uses the same weights as its forward.

The method is that of PipeDream (Narayanan et al. 2019, section 3.3).

A version is a list of leaf tensors over the parameters' storage. Before an update, if the old version is still needed,
the parameters move to new storage and the old storage stays as it is. So only weights are kept twice, never the state
of the optimizer. If there is never a second version, as with synchronous schedules, the parameters are the version.
"""

from collections.abc import Collection, Sequence
from functools import partial

import torch
from torch import Tensor

from fedring.pipeline.errors import PipelineError


class WeightStashing:
    """An optimizer of torch whose older weights can still be used.

    Attributes:
        optimizer: The optimizer.
        parameters: Its parameters, in its order.
        bound: The largest number of versions that may exist.
        compute_dtype: The dtype of the versions if they are copies; the optimizer's parameters keep their own.
        loss_scale: The divisor of gradients as they are added.
        is_plain: Whether the only version is the parameters themselves, and autograd adds their gradients.
        version: The number of the newest version.
        skipped: The number of updates that were skipped because a scaled gradient had overflowed.
        most_kept: The largest number of versions that existed.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        bound: int = 1,
        compute_dtype: torch.dtype | None = None,
        loss_scale: float = 1.0,
    ) -> None:
        if bound < 1 or loss_scale <= 0:
            raise ValueError(f"bound={bound} and loss_scale={loss_scale} must be positive")
        self.optimizer = optimizer
        self.parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        self.bound = bound
        self.loss_scale = loss_scale
        self.compute_dtype = compute_dtype
        # A step has no micro-batch in flight then, whose backward would miss the weights as they were.
        self.is_plain = bound == 1 and compute_dtype is None and loss_scale == 1
        self.version = 0
        self.skipped = 0
        self.most_kept = 1
        self._kept = {0: self._leaves()}

    @property
    def versions(self) -> list[int]:
        """The versions that exist, oldest first."""
        return sorted(self._kept)

    def weights(self, version: int | None = None) -> Sequence[Tensor]:
        """Return the weights of a version; None means the newest.

        They are in the order of the optimizer.

        Raises:
            PipelineError: If the version no longer exists.
        """
        wanted = self.version if version is None else version
        if wanted not in self._kept:
            raise PipelineError(f"the weights of version {wanted} no longer exist: only {self.versions} are kept")
        return self._kept[wanted]

    def step(self, *, keep: Collection[int] = ()) -> int:
        """Step the optimizer, and return the new version.

        It uses the gradients so far.

        If a scaled gradient has overflowed, the new version has the values of the old one.

        Args:
            keep: Older versions that stay; all others are dropped.

        Raises:
            PipelineError: If there would be more versions than `bound`.
        """
        wanted = set(keep) & set(self._kept)
        if len(wanted) >= self.bound:
            raise PipelineError(f"versions {sorted(wanted)} and a new one are more than bound={self.bound} versions")
        if self._overflowed():
            self.skipped += 1
        else:
            # Micro-batches in flight still use the old storage, so the optimizer must write into new storage. With a
            # compute dtype, versions are copies anyhow.
            if self.version in wanted and self.compute_dtype is None:
                for parameter in self.parameters:
                    if parameter.grad is not None:
                        parameter.data = parameter.data.clone()
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.version += 1
        self._kept = {version: self._kept[version] for version in wanted}
        self._kept[self.version] = self._leaves()
        self.most_kept = max(self.most_kept, len(self._kept))
        return self.version

    def drop(self, version: int) -> None:
        """Drop a version, unless it is the newest."""
        if version != self.version:
            self._kept.pop(version, None)

    def reload(self) -> None:
        """Drop all older versions and read the parameters again.

        Other code has changed them.
        """
        self._kept = {self.version: self._leaves()}

    def _leaves(self) -> list[Tensor]:
        if self.is_plain:
            return self.parameters
        # A leaf from detach() would share autograd's version counter with its parameter, and a later step would make it
        # unusable for backwards. A leaf from `data` has its own counter.
        leaves = [p.data.to(self.compute_dtype or p.dtype).requires_grad_(p.requires_grad) for p in self.parameters]
        for parameter, leaf in zip(self.parameters, leaves, strict=True):
            if leaf.requires_grad:  # a frozen parameter gets no gradient, so that the optimizer leaves it as it is
                leaf.register_post_accumulate_grad_hook(partial(_take, parameter, self.loss_scale))  # type: ignore[no-untyped-call]  # torch's
        return leaves

    def _overflowed(self) -> bool:
        """Return whether a gradient of a scaled loss is not finite.

        Without scaling, gradients are not checked.
        """
        if self.loss_scale == 1:
            return False
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        return not all(bool(torch.isfinite(gradient).all()) for gradient in gradients)


def _take(parameter: Tensor, loss_scale: float, leaf: Tensor) -> None:
    """Move a gradient from a version's weight to the parameter.

    A backward has left it there.
    """
    gradient, leaf.grad = leaf.grad, None
    if gradient is None:
        return
    true = gradient.to(parameter.dtype)
    if loss_scale != 1:
        true = true / loss_scale
    if parameter.grad is None:
        parameter.grad = true
    else:
        parameter.grad.add_(true)
