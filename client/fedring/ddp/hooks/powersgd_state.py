"""The state of PowerSGD: options, errors and factors."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fedring.c10d import GradBucket
from fedring.compress.correction import is_zero
from fedring.compress.lowrank import as_matrix, worth_factoring
from fedring.ddp.state import HookState, checked

log = logging.getLogger(__name__)

_LARGEST_SEED = 1_000_000_000
_FACTOR, _RANDOM = "factor of ", "random numbers"  # names of what workers share


class PowerSGDState(HookState):
    """The state of powerSGD_hook and batched_powerSGD_hook.

    Names, defaults and random numbers are torch's.

    With `named_parameters`, errors and factors are kept by name, otherwise by the index of buckets, as in torch. All
    other arguments are those of torch's PowerSGDState.

    Attributes:
        rng: Random numbers as they were at the start of this step; equal on all workers.
        error_dict: The errors that earlier messages left in this worker's matrices, [n] by name.
        q_memory_dict: Right factors [columns, rank] by name; equal on all workers.
        iter: The steps taken.
    """

    kind = "powersgd"

    def __init__(  # the parameters are torch's
        self,
        process_group: dist.ProcessGroup | None,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1_000,
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        orthogonalization_epsilon: float = 0,
        random_seed: int = 0,
        compression_stats_logging_frequency: int = 10_000,
        batch_tensors_with_same_shape: bool = False,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    ) -> None:
        super().__init__(process_group, named_parameters)
        if (use_error_feedback or warm_start) and start_powerSGD_iter <= 1:
            raise ValueError(
                "start_powerSGD_iter must be above 1 if use_error_feedback or warm_start is on: DDP makes other "
                "buckets after the first step"
            )
        if matrix_approximation_rank < 1:
            raise ValueError(f"matrix_approximation_rank must be at least 1, not {matrix_approximation_rank}")
        self.matrix_approximation_rank = matrix_approximation_rank
        self.start_powerSGD_iter = start_powerSGD_iter
        self.min_compression_rate = min_compression_rate
        self.use_error_feedback = use_error_feedback
        self.warm_start = warm_start
        self.orthogonalization_epsilon = orthogonalization_epsilon
        self.batch_tensors_with_same_shape = batch_tensors_with_same_shape
        self.compression_stats_logging_frequency = max(1, compression_stats_logging_frequency)
        self.random_seed = random_seed
        self.rng = np.random.RandomState(random_seed)
        self.error_dict: dict[str, Tensor] = {}
        self.q_memory_dict: dict[str, Tensor] = {}
        self.iter = 0
        self.total_numel_before_compression = 0
        self.total_numel_after_compression = 0
        self.next_stats_report = 0
        self._drawing = np.random.RandomState(random_seed)
        self._resting: dict[str, Tensor] = {}  # the errors of which this step sends nothing, by name

    @property
    def compresses(self) -> bool:
        """Whether this step is compressed; the first `start_powerSGD_iter` are not."""
        return self.iter >= self.start_powerSGD_iter

    def begin(self, bucket: GradBucket) -> None:
        """Prepare for a bucket.

        With the first one of a step, the random numbers that a failed step drew are drawn again.
        """
        if bucket.index() == 0:
            self._resting = {}
            self._drawing.set_state(self.rng.get_state(legacy=False))

    def end(self, bucket: GradBucket) -> None:
        """Note that a bucket was sent; the last one ends the step."""
        if not bucket.is_last():
            return
        if self.compresses and self.iter >= self.next_stats_report:
            rate, before, after = self.compression_stats()
            log.info("PowerSGD at step %d: %d entries sent as %d, rate %.1f", self.iter, before, after, rate)
            self.next_stats_report = self.iter + self.compression_stats_logging_frequency
        if self.compresses and self.total_numel_before_compression:
            self.ratio = self.total_numel_after_compression / self.total_numel_before_compression
        self.rng.set_state(self._drawing.get_state(legacy=False))
        self.iter += 1

    def generator(self) -> torch.Generator:
        """Return the next generator of random numbers.

        It is equal on all workers, and different each time.
        """
        return torch.Generator().manual_seed(int(self._drawing.randint(_LARGEST_SEED)))

    @property
    def draws_by_name(self) -> bool:
        """Whether each parameter has its own random numbers.

        Then they do not depend on buckets.

        With a warm start they are drawn once only, and in the same way as in torch's hook.
        """
        return self.names.bound and not self.warm_start

    def generator_of(self, name: str) -> torch.Generator:
        """Return a parameter's generator of random numbers for this step.

        It is equal on all workers.
        """
        return torch.Generator().manual_seed(crc32(f"{self.random_seed} {self.iter} {name}".encode()))

    def count(self, before: int, after: int) -> None:
        """Count that `after` entries are sent in the place of `before`."""
        self.total_numel_before_compression += before
        self.total_numel_after_compression += after

    def compression_stats(self) -> tuple[float, int, int]:
        """Return the compression rate, and the entries before and after."""
        before, after = self.total_numel_before_compression, self.total_numel_after_compression
        return before / after if after else 0.0, before, after

    def with_error(self, name: str, grad: Tensor) -> Tensor:
        """Return `grad` [n] plus the error of earlier steps.

        It is a new tensor [n] of at least float32. A gradient of zeros gets nothing added.
        """
        error = self.error_dict.get(name)
        if not self.use_error_feedback or error is None or error.numel() != grad.numel():
            return grad.to(torch.promote_types(grad.dtype, torch.float32), copy=True)
        # As with all error feedback: see `fedring.compress.correction`.
        if is_zero(grad):
            self._resting[name] = error
            return torch.zeros_like(error)
        return grad + error

    def keep_error(self, name: str, target: Tensor, sent: Tensor) -> None:
        """Keep the part of `target` [n] that `sent` [n] leaves out.

        The next step adds it.
        """
        if self.use_error_feedback:
            rest, resting = target - sent, self._resting.get(name)
            self.error_dict[name] = rest if resting is None else rest + resting

    def keep_factor(self, key: str, factor: Tensor) -> None:
        """Keep a factor [columns, rank] for the next step.

        A factor of zeros is dropped, since no step would ever change it.
        """
        if bool(factor.any()):
            self.q_memory_dict[key] = factor
        else:
            self.q_memory_dict.pop(key, None)

    def factor_in(self, shared: Mapping[str, Tensor], name: str) -> Tensor | None:
        """Return a right factor [columns, rank] in the result of `shared`.

        It is None if factors are not kept from step to step.
        """
        return shared.get(_FACTOR + name)

    def owed(self) -> dict[str, Tensor]:
        """See HookState.owed: the errors."""
        return dict(self.error_dict)

    def rescale(self, old_world: int, new_world: int) -> None:
        """See HookState.rescale."""
        self.error_dict = {name: error * (new_world / old_world) for name, error in self.error_dict.items()}

    def shared(self) -> dict[str, Tensor]:
        """See HookState.shared: right factors, and random numbers.

        The factor of a matrix is zeros until there is one.

        Factors of whole buckets are not among them, since DDP makes other buckets in every new group.
        """
        counted = self._counted or self._contents()
        shared = {_RANDOM: torch.cat([counted["rng"], torch.tensor([counted["rng_position"]], device="cpu")])}
        for name, parameter in self.parameters.items():
            rows, columns = as_matrix(parameter.shape)
            rank = min(rows, columns, self.matrix_approximation_rank)
            if self.warm_start and worth_factoring(rows, columns, rank=rank, min_rate=self.min_compression_rate):
                dtype = torch.promote_types(parameter.dtype, torch.float32)
                place = torch.zeros(columns, rank, dtype=dtype, device=parameter.device)
                shared[_FACTOR + name] = place.copy_(counted["q"].get(name, place))
        return shared

    def regroup(self, shared: dict[str, Tensor], *, steps: int) -> None:
        """See HookState.regroup."""
        super().regroup(shared, steps=steps)
        self.iter = steps
        self._set_random(shared[_RANDOM][:-1], int(shared[_RANDOM][-1]))
        self.q_memory_dict = {}
        for name, factor in shared.items():
            if name.startswith(_FACTOR):
                self.keep_factor(name.removeprefix(_FACTOR), factor.clone())

    def _contents(self) -> dict[str, Any]:
        twister = self.rng.get_state(legacy=False)["state"]
        return {
            "iter": self.iter,
            "next_stats_report": self.next_stats_report,
            "numel_before": self.total_numel_before_compression,
            "numel_after": self.total_numel_after_compression,
            "rng": torch.from_numpy(twister["key"].astype(np.int64)),
            "rng_position": int(twister["pos"]),
            "error": dict(self.error_dict),
            "q": dict(self.q_memory_dict),
        }

    def _load(self, state: dict[str, Any]) -> None:
        self.error_dict = checked(self, state["error"])
        self.q_memory_dict = {name: tensor.clone() for name, tensor in state["q"].items()}
        self.iter, self.next_stats_report = state["iter"], state["next_stats_report"]
        self.total_numel_before_compression = state["numel_before"]
        self.total_numel_after_compression = state["numel_after"]
        self._set_random(state["rng"], state["rng_position"])

    def _set_random(self, words: Tensor, position: int) -> None:
        self.rng.set_state(("MT19937", words.numpy().astype(np.uint32), position, 0, 0.0))
