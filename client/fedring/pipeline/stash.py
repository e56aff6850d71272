"""Weight stashing: a backward uses the very weights that its forward used (Narayanan et al. 2019, PipeDream, sec. 3.3).

A version is a list of leaves over the parameters' storage. Before an update whose old version is still wanted, the
parameters move to new storage, and the old one stays as it was: what is kept twice is weights, never optimizer state.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from fedring.pipeline.errors import PipelineError


class WeightStashing:
    """An optimizer of torch whose older weights can still be used; `bound` versions exist at most.

    With `compute_dtype` the versions are copies in it, and the optimizer's own parameters are the masters; the
    gradients that come in are `loss_scale` times the true ones.
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
            raise ValueError(f"a bound of {bound} and a loss scale of {loss_scale}: both must be positive")
        self.optimizer = optimizer
        self.parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        self.bound = bound
        self.loss_scale = loss_scale
        self.compute_dtype = compute_dtype
        self.version = 0
        self.skipped = 0  # updates that were left out because a gradient had overflowed
        self.most_kept = 1
        self._kept = {0: self._leaves()}

    @property
    def versions(self) -> list[int]:
        """The versions that exist, oldest first."""
        return sorted(self._kept)

    def weights(self, version: int | None = None) -> Sequence[Tensor]:
        """The parameters of a version, in the optimizer's order; by default the newest."""
        wanted = self.version if version is None else version
        if wanted not in self._kept:
            raise PipelineError(f"the weights of version {wanted} are gone: {self.versions} are kept")
        return self._kept[wanted]

    def add_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """The gradients, one a parameter and each of its shape, are added to those of the next update."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            if gradient is None:
                continue
            true = gradient.to(parameter.dtype)
            if self.loss_scale != 1:
                true = true / self.loss_scale
            if parameter.grad is None:
                parameter.grad = true.clone() if true is gradient else true  # autograd may hand out one tensor twice
            else:
                parameter.grad.add_(true)

    def step(self, *, keep: Collection[int] = ()) -> int:
        """The new version, made of the newest and the gradients; of the others, those in `keep` stay."""
        wanted = set(keep) & set(self._kept)
        if len(wanted) >= self.bound:
            raise PipelineError(f"versions {sorted(wanted)} and a new one are more than the bound of {self.bound}")
        if self._overflowed():
            self.skipped += 1
        else:
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
        """The version no longer exists, unless it is the newest."""
        if version != self.version:
            self._kept.pop(version, None)

    def reload(self) -> None:
        """The only version is what the parameters hold now, after something else has written them."""
        self._kept = {self.version: self._leaves()}

    def _leaves(self) -> list[Tensor]:
        # Not detach(): a leaf's count of writes is to be its own, or a step on new storage would spoil the old leaves.
        return [p.data.to(self.compute_dtype or p.dtype).requires_grad_() for p in self.parameters]

    def _overflowed(self) -> bool:
        """Whether a gradient of a scaled loss is not finite; without scaling nobody looks."""
        if self.loss_scale == 1:
            return False
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        return not all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
