"""The contract of hook states.

Every hook's state has a group, names and a meter, and outlives its group.

A script makes a state, registers it together with its hook, and saves it with `state_dict`. A job's state outlives
groups of workers: `end_step` tells it of each step that counts. When a group has failed, `shared` and then `regroup`
move the state to the next group, after `undo` of the step that broke, or `complete` if another worker completed it.
"""

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fedring.ddp.gradients import Names
from fedring.ddp.profile import Meter, Profile
from fedring.ddp.turns import Turns

log = logging.getLogger(__name__)

_VERSION = 1
_NOT_SAVED = ("process_group", "names", "meter", "turns", "pending", "_counted")


class HookState:
    """The state of one communication hook on one worker.

    Each kind of hook has a subclass.

    Attributes:
        kind: The kind of the hook, as its checkpoints name it.
        ratio: The share of a gradient's entries that is sent.
        process_group: The group to exchange with; None is the default group.
        names: The parameters and their names.
        meter: The meter of the hook's steps.
        turns: The buckets of a step, for hooks of several collectives.
        pending: For buckets that have left, by their names: what `complete` does if the others' messages do not come.
    """

    kind = ""
    ratio = 1.0

    def __init__(
        self, process_group: dist.ProcessGroup | None, named_parameters: Iterable[tuple[str, Tensor]] | None
    ) -> None:
        self.process_group = process_group
        self.names = Names(named_parameters)
        self.meter = Meter()
        self.turns = Turns(self.meter)
        self.pending: dict[tuple[str, ...], Callable[[dict[str, Tensor]], None]] = {}
        self._counted: dict[str, Any] = {}  # the contents after the newest step that counts

    @property
    def group(self) -> dist.ProcessGroup:
        """The group to exchange with; it can be set."""
        group = self.process_group or dist.group.WORLD
        if group is None:
            raise ValueError("a hook needs a process group: call torch.distributed.init_process_group first")
        return group

    @group.setter
    def group(self, group: dist.ProcessGroup | None) -> None:
        self.process_group = group

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The parameters that need a gradient, by name; empty without names."""
        return self.names.parameters

    @property
    def profile(self) -> Profile:
        """The sums over all steps so far."""
        return self.meter.total

    @property
    def residual_norm(self) -> float:
        """The L2 norm of all owed gradients."""
        norms = [torch.linalg.vector_norm(tensor) for tensor in self.owed().values()]
        return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0

    def owed(self) -> dict[str, Tensor]:
        """Return the unsent rest of this worker's gradients.

        They are the state's own tensors, [numel] by name.
        """
        return {}

    def bind(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Keep the state by these names from now on.

        Then it does not depend on buckets.

        Args:
            named_parameters: As from `model.named_parameters()`.
        """
        self.names = Names(named_parameters)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint; each worker has its own.

        Returns:
            Plain values and tensors, which are the state's own and not copies.

        Raises:
            ValueError: If the state was made without names, or if there is no process group.
        """
        _check_bound(self)
        return {"version": _VERSION, "kind": self.kind, "workers": self.group.size(), **self._contents()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from a checkpoint.

        It is scaled if the number of workers is another now.

        Args:
            state: The result of `state_dict`.

        Raises:
            ValueError: If it is of another kind, version or model, or if this state was made without names.
        """
        _check_bound(self)
        if (state["version"], state["kind"]) != (_VERSION, self.kind):
            raise ValueError(
                f"a {state['kind']} state of version {state['version']} cannot be read as {self.kind} of version "
                f"{_VERSION}"
            )
        self._load(state)
        if state["workers"] != self.group.size():
            self.rescale(state["workers"], self.group.size())

    def rescale(self, old_world: int, new_world: int) -> None:
        """Scale owed gradients to another number of workers.

        In a mean over `new_world` workers they count as they would have in one over `old_world`.
        """

    def start_epoch(self, epoch: int) -> None:
        """Begin an epoch, counted from 0.

        All workers call this between the same two steps.
        """

    def end_step(self) -> None:
        """Note that the step counts.

        This costs nothing, as steps replace tensors and do not write into them.
        """
        self._counted = self._contents()
        self.pending.clear()

    def undo(self) -> None:
        """Go back to the newest step that counts."""
        if self._counted:
            self._load(self._counted)
        self.pending.clear()

    def complete(self, shared: dict[str, Tensor]) -> None:
        """Complete the step that broke here, as another worker has done.

        That worker got all that this one sent, so it is owed no more.

        Args:
            shared: The state that all workers share after the step, as from `shared`.
        """
        with torch.no_grad():
            for settle in self.pending.values():
                settle(shared)
        self.pending.clear()

    def shared(self) -> dict[str, Tensor]:
        """Return copies of the state that all workers share.

        It is the state after the newest step that counts.

        Names and shapes depend on nothing but the parameters and the options of the state.
        """
        return {}

    def regroup(self, shared: dict[str, Tensor], *, steps: int) -> None:
        """Move to the default group.

        Args:
            shared: The state that all of its workers share, as from `shared`.
            steps: The steps that they have taken.
        """
        self.process_group = None
        self.meter.forget_step()

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
        values = dict(state)
        was_bound = values.pop("_was_bound")
        vars(self).update(values)
        self.process_group = dist.group.WORLD
        self.names = Names(() if was_bound else None)
        self.meter = Meter()
        self.turns = Turns(self.meter)
        self.pending = {}
        self._counted = {}

    def _contents(self) -> dict[str, Any]:
        """Return plain values and tensors for `_load`."""
        return {}

    def _load(self, state: dict[str, Any]) -> None:
        """Restore the contents that `_contents` returned."""


def _check_bound(state: HookState) -> None:
    if not state.names.bound:
        raise ValueError(
            f"a {state.kind} state without names is kept by the index of buckets, which is of no use in another "
            "training: make it with named_parameters=model.named_parameters()"
        )


def checked(state: HookState, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of `tensors` on the devices of the state's parameters.

    Raises:
        ValueError: If one has not the size of its parameter.
    """
    copies = {}
    for name, tensor in tensors.items():
        parameter = state.parameters.get(name)
        if parameter is None or parameter.numel() != tensor.numel():
            wanted = 0 if parameter is None else parameter.numel()
            raise ValueError(f"the {state.kind} state has {tensor.numel()} entries of {name}, not {wanted}")
        copies[name] = tensor.detach().to(parameter.device, copy=True)
    return copies
