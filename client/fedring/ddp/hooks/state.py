"""What the states of all hooks have in common: a group, names, checkpoints, and a life beyond the group.

A state that lasts while groups come and go is told of every step that counts with `end_step`. When a group has failed,
`shared` and then `regroup` make it one of the next group's, with `undo` before if nobody completed the step that broke.
"""

import logging
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fedring.ddp.hooks.gradients import Names
from fedring.ddp.hooks.turns import Turns
from fedring.ddp.profile import Profile

log = logging.getLogger(__name__)

_VERSION = 1
_NOT_SAVED = ("process_group", "names", "turns", "_whole")


class HookState:
    """The state of one hook on one worker; subclasses say what they keep."""

    kind = ""
    ratio = 1.0  # share of a gradient's entries that is sent

    def __init__(
        self, process_group: dist.ProcessGroup | None, named_parameters: Iterable[tuple[str, Tensor]] | None
    ) -> None:
        self.process_group = process_group  # None is the default group
        self.names = Names(named_parameters)
        self.turns = Turns()
        self._whole: dict[str, Any] = {}  # the contents after the newest step that counts

    @property
    def group(self) -> dist.ProcessGroup:
        """The group to exchange with."""
        group = self.process_group or dist.group.WORLD
        if group is None:
            raise ValueError("a hook needs a process group: call torch.distributed.init_process_group first")
        return group

    @property
    def profile(self) -> Profile:
        """The sums over all steps so far; what is decompressed counts as compressed."""
        return self.turns.profile

    @property
    def residual_norm(self) -> float:
        """The L2 norm of what is owed."""
        norms = [torch.linalg.vector_norm(tensor) for tensor in self._owed()]
        return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0

    def bind(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """The state is kept by these names from now on, so that it outlives its buckets."""
        self.names = Names(named_parameters)

    def state_dict(self) -> dict[str, Any]:
        """Tensors, which are the state's own, and plain values; each worker has another."""
        self._check_bound()
        return {"version": _VERSION, "kind": self.kind, "workers": self.group.size(), **self._contents()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """This is the state that `state` was taken from, of as many workers as there are now."""
        self._check_bound()
        if (state["version"], state["kind"]) != (_VERSION, self.kind):
            raise ValueError(
                f"a {state['kind']} state of version {state['version']} cannot be read as {self.kind}, {_VERSION}"
            )
        self._load(state)
        if state["workers"] != self.group.size():
            self.rescale(state["workers"], self.group.size())

    def rescale(self, old_world: int, new_world: int) -> None:
        """What is owed counts in a mean over `new_world` workers as it would have in one over `old_world`."""
        raise NotImplementedError

    def start_epoch(self, epoch: int) -> None:
        """No epoch differs from another."""

    def end_step(self) -> None:
        """The step counts. This costs nothing: steps replace tensors, and never write into them."""
        self._whole = self._contents()

    def undo(self) -> None:
        """The state is as it was after the newest step that counts."""
        if self._whole:
            self._load(self._whole)

    def shared(self) -> dict[str, Tensor]:
        """What must be equal on all workers, as it was after the newest step that counts; copies.

        Their names and shapes depend on nothing but parameters and options.
        """
        return {}

    def regroup(self, shared: dict[str, Tensor], *, steps: int) -> None:
        """The state goes on after `steps` steps of the default group, whose workers all hold `shared`."""
        self.process_group = None

    def __getstate__(self) -> dict[str, Any]:
        log.warning("NOTE: Process group is not serializable and excluded from a saved state.")
        return {name: value for name, value in vars(self).items() if name not in _NOT_SAVED} | {
            "_was_bound": self.names.bound
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        log.warning(
            "NOTE: Process group will be set to the default group. If a different group is desired, please set "
            "`process_group` after the state is loaded."
        )
        bound = state.pop("_was_bound")
        vars(self).update(state)
        self.process_group = dist.group.WORLD
        self.names = Names(() if bound else None)
        self.turns = Turns()
        self._whole = {}

    def _owed(self) -> list[Tensor]:
        raise NotImplementedError

    def _contents(self) -> dict[str, Any]:
        raise NotImplementedError

    def _load(self, state: dict[str, Any]) -> None:
        raise NotImplementedError

    def _check_bound(self) -> None:
        if not self.names.bound:
            raise ValueError(
                f"a {self.kind} state without names is kept by the index of buckets, which is of no use in another "
                "training: make it with named_parameters=model.named_parameters()"
            )

    def _checked(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copies of `tensors`, of which each belongs to a parameter and has its number of entries, on its device."""
        copies = {}
        for name, tensor in tensors.items():
            parameter = self.names.parameters.get(name)
            if parameter is None or parameter.numel() != tensor.numel():
                wanted = 0 if parameter is None else parameter.numel()
                raise ValueError(f"the {self.kind} state has {tensor.numel()} entries of {name}, not {wanted}")
            copies[name] = tensor.detach().to(parameter.device, copy=True)
        return copies
