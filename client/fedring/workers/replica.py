"""A worker's copy of model, optimizer and progress.

The copies of all workers are made equal here.

Nothing that a peer sends is unpickled. The layout of the optimizer's state travels as JSON, and its tensors as bytes.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from blake3 import blake3
from torch import Tensor, nn

from fedring.train.errors import SeamError, TrainError
from fedring.train.tensors.state import dtype_of, tensors_of
from fedring.untrusted import parse_json
from fedring.workers.optimizer_groups import (
    Groups,
    check_tables,
    group_tensors,
    group_values,
    is_plain,
    put_groups,
    put_tensors,
    read_groups,
)

State = dict[str, Any]  # an optimizer's state of one parameter
_MAX_LAYOUT_BYTES = 64 << 20
_MOST_STEPS = 1 << 48
_MOST_STATES = 16  # tensors or values for one parameter: no optimizer of torch.optim has more than 8


@dataclass(slots=True)
class Progress:
    """The progress of a worker."""

    steps: int = 0  # of the job that are done
    round_steps: int = 0  # of the round that are done
    epoch: int = 0  # of the round, from 0
    taken: int = 0  # samples of the epoch that all workers together have taken


@dataclass(slots=True, eq=False)
class Replica:
    """One worker's copy of the state that all workers share.

    The client keeps it from round to round.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    progress: Progress = field(default_factory=Progress)
    shared: dict[str, Tensor] = field(default_factory=dict)  # other state that must be equal on all workers, by name
    _first_groups: Groups = field(init=False)  # of the new optimizer

    def __post_init__(self) -> None:
        self._first_groups = group_values(self.optimizer)

    @property
    def groups(self) -> Groups:
        """The values in the optimizer's groups of parameters.

        They are [] if it has changed nothing there. Only then workers of 1.0.0 understand the layout of its state.
        """
        now = group_values(self.optimizer)
        return now if now != self._first_groups else []

    def begin_round(self) -> None:
        """Reset the round's steps, epochs and samples to 0.

        The job's steps go on.
        """
        self.progress = Progress(self.progress.steps)

    def digest(self) -> bytes:
        """Return the BLAKE3 of the parameters, 32 bytes.

        It is equal on all workers after every step.
        """
        return digest_of(parameter for parameter in self.model.parameters())

    def full_digest(self) -> bytes:
        """Return the BLAKE3 of all tensors that workers make equal, 32 bytes."""
        return digest_of(chain(self.tensors(), _states_of(self.optimizer)))

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors of the model and of the shared state.

        The order is the same on all workers.
        """
        yield from (tensor for _, tensor in tensors_of(self.model))
        yield from (self.shared[name] for name in sorted(self.shared))


@torch.no_grad()
def synchronize(replica: Replica) -> int:
    """Make all workers equal to the one with the most steps.

    All workers of the default group become equal.

    Model, shared state, optimizer and progress are taken over, all of them or nothing: meanwhile, a worker needs host
    memory for both models. If all workers are equal already, they exchange hashes and nothing else. Every worker of
    the group must call this.

    Returns:
        The rank that the others took over from: of those with the most steps, the lowest.

    Raises:
        TrainError: With the reason bad_optimizer, if the state of an optimizer cannot be sent, or does not fit, or
            bad_peer, if the progress of the worker with the most steps cannot be.
    """
    progress = replica.progress
    mine = [progress.steps, *_words(replica.full_digest())]
    everyone = gather(mine)
    steps = [row[0] for row in everyone]
    source = steps.index(max(steps))
    # All workers see the same rows, so all of them take part in the broadcasts, or none does.
    if any(row != everyone[0] for row in everyone):
        progress = _share_progress(progress, source, steps=steps[source])
        values = [_received(tensor, source) for tensor in replica.tensors()]
        states, tensors, groups = _share_optimizer(replica, source)
        # Only now, when all of it is here. A worker with a part of another's state would pass that on as its own, if
        # the group fails and the next one takes it for the most advanced.
        if dist.get_rank() != source:
            for tensor, value in zip(replica.tensors(), values, strict=True):
                tensor.detach().copy_(value)
            replica.optimizer.state.update(states)
            put_groups(replica.optimizer, groups)
            put_tensors(replica.optimizer, tensors)
            replica.progress = progress
    return source


def _states_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield the tensors of an optimizer's state and of its groups.

    The order is the same on all workers.
    """
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        state = optimizer.state.get(parameter, {})
        yield from (state[key] for key in sorted(state) if isinstance(state[key], Tensor))
    for tensors in group_tensors(optimizer):
        yield from (tensors[key] for key in sorted(tensors))


def all_equal(replica: Replica) -> bool:
    """Compare the parameters of all workers, and return whether they are equal."""
    return equal_on_all(replica.digest())


def equal_on_all(digest: bytes, group: dist.ProcessGroup | None = None) -> bool:
    """Return whether a digest is the same on all workers.

    Args:
        digest: This worker's digest, 32 bytes.
        group: The workers; None is the default group.
    """
    rows = gather(_words(digest), group)
    return all(row == rows[0] for row in rows)


@torch.no_grad()
def share_buffers(model: nn.Module) -> None:
    """Give all workers rank 0's buffers.

    Buffers are many and small, so those of one dtype and device travel in one broadcast.
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for buffer in model.buffers():
        kinds.setdefault((buffer.dtype, buffer.device), []).append(buffer)
    for buffers in kinds.values():
        flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
        _broadcast(flat, 0)
        for buffer, values in zip(buffers, torch.split(flat, [b.numel() for b in buffers]), strict=True):
            buffer.copy_(values.view_as(buffer))


def _share_progress(progress: Progress, source: int, *, steps: int) -> Progress:
    """Send the source's progress to all others, and return it.

    They keep it for the rest of the job, and delete their checkpoints of later steps.
    """
    values = torch.tensor([progress.steps, progress.round_steps, progress.epoch, progress.taken])
    _broadcast(values, source)
    told = values.tolist()
    if told[0] != steps or min(told) < 0 or max(told) >= _MOST_STEPS:
        raise TrainError("bad_peer", f"The worker of rank {source} tells {told} as its progress after {steps} steps.")
    return Progress(*told)


def _share_optimizer(replica: Replica, source: int) -> tuple[dict[Tensor, State], list[State], Groups]:
    """Send an optimizer's state to all other workers.

    They are those of the default group.

    Args:
        replica: Its optimizer has the parameters in the same order on all workers; new tensors are made on their
            devices.
        source: The rank that has the state.

    Returns:
        The source's states by parameter, and the tensors of its groups of parameters, its own objects at the source
        and copies elsewhere, and the plain values of the groups.

    Raises:
        TrainError: With the reason bad_optimizer, if a state holds something that cannot be sent, or a peer sent a
            layout that does not fit the parameters.
    """
    optimizer = replica.optimizer
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if dist.get_rank() == source:
        shared, groups = [*(optimizer.state.get(p, {}) for p in parameters), *group_tensors(optimizer)], replica.groups
        layout = [_layout(state) for state in shared]
        told = {"groups": groups, "tensors": layout[len(parameters) :]}
        rest = {key: value for key, value in told.items() if value}
        _share_text(json.dumps(layout[: len(parameters)] + ([rest] if rest else [])), source)
    else:
        layout, shared, groups = read_layout(_share_text("", source), parameters, groups=len(optimizer.param_groups))
    # All workers have the same layout now, so all take part in the same broadcasts in the same order.
    for state, entries in zip(shared, layout, strict=True):
        for key, entry in entries.items():
            if "shape" in entry:
                _broadcast(state[key], source)
    return dict(zip(parameters, shared, strict=False)), shared[len(parameters) :], groups


def read_layout(
    text: str, parameters: Sequence[Tensor], *, groups: int = 1
) -> tuple[list[dict[str, dict[str, Any]]], list[State], Groups]:
    """Parse a peer's layout of an optimizer's state, and allocate its tensors.

    Args:
        text: One entry for each parameter, and one with the values of the groups of parameters if there are any:
            `groups`, the plain ones, and `tensors`.
        parameters: The parameters.
        groups: The number of groups.

    Returns:
        The layout, the states, whose tensors hold zeros, and the plain values of the groups. The tensors of the groups,
        if there are any, are the last entries of layout and states.

    Raises:
        TrainError: With the reason bad_optimizer, if it does not fit the parameters.
    """
    try:
        layout, rest, owners = parse_json(text), {}, list(parameters)
        if len(layout) == len(parameters) + 1:
            layout, rest = layout[:-1], layout[-1]
            if not rest.keys() & {"groups", "tensors"}:
                raise ValueError(f"the values of groups of parameters are {rest!r:.100}")
        told = read_groups(rest["groups"], groups) if "groups" in rest else []
        if "tensors" in rest:
            check_tables(rest["tensors"], groups, of=dict)
            layout = [*layout, *rest["tensors"]]
            owners += [max(parameters, key=torch.numel)] * groups  # which bounds their sizes
        if (largest := max((len(entries) for entries in layout), default=0)) > _MOST_STATES:
            raise ValueError(f"{largest} values for one parameter")
        pairs = zip(owners, layout, strict=True)
        states = [{key: _made(entry, of) for key, entry in entries.items()} for of, entries in pairs]
        if not all(isinstance(value, Tensor) for state in states[len(parameters) :] for value in state.values()):
            raise ValueError("a tensor of a group of parameters is a plain value")
        return layout, states, told
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError, SeamError) as error:
        raise TrainError(
            "bad_optimizer", f"The layout of a peer's optimizer state cannot be used: {error!r:.200}."
        ) from error


def _layout(state: State) -> dict[str, dict[str, Any]]:
    """Describe one parameter's optimizer state in values that JSON can hold."""
    layout: dict[str, dict[str, Any]] = {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            layout[key] = {
                "shape": list(value.shape),
                "dtype": str(value.dtype).removeprefix("torch."),
                "cpu": value.device.type == "cpu",
            }
        elif is_plain(value):
            layout[key] = {"value": value}
        else:
            raise TrainError(
                "bad_optimizer",
                f"The optimizer's state {key!r} is a {type(value).__name__}, which workers cannot send to each other: "
                "use an optimizer whose state holds tensors and plain values.",
            )
    return layout


def _made(entry: dict[str, Any], parameter: Tensor) -> Any:
    """Return the value that an entry of a layout describes.

    For a tensor, it is an empty one, into which the values will be received.
    """
    if "shape" not in entry:
        return entry["value"]
    dtype = dtype_of(str(entry["dtype"]))
    if min(entry["shape"], default=0) < 0 or torch.Size(entry["shape"]).numel() > max(parameter.numel(), 1):
        raise TrainError(
            "bad_optimizer",
            f"A peer's optimizer has the state {entry} for a parameter of {parameter.numel()} values: use the same "
            "optimizer on all clients.",
        )
    return torch.zeros(entry["shape"], dtype=dtype, device="cpu" if entry["cpu"] else parameter.device)


def _share_text(text: str, source: int) -> str:
    """Send a text from the source to all others, and return it."""
    data = bytearray(text.encode())
    length = torch.tensor([len(data)])
    _broadcast(length, source)
    if not 0 < int(length) <= _MAX_LAYOUT_BYTES:
        raise TrainError(
            "bad_optimizer",
            f"The layout of a peer's optimizer state has {int(length)} bytes; it must have 1 to {_MAX_LAYOUT_BYTES}.",
        )
    held = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(int(length), dtype=torch.uint8)
    _broadcast(held, source)
    return held.numpy().tobytes().decode("utf-8", "replace")


def _received(tensor: Tensor, source: int) -> Tensor:
    """Return the source's values of a tensor, in host memory.

    The tensor itself stays as it is, and is returned by the source.
    """
    if dist.get_rank() == source:
        _broadcast(tensor, source)
        return tensor
    values = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    _broadcast(values, source)
    return values


def _broadcast(tensor: Tensor, source: int) -> None:
    """Copy the source's values into `tensor` on all workers.

    The workers are those of the default group. Any dtype and device will do.
    """
    dense = tensor.detach().cpu().contiguous()
    if dense.numel():
        dist.broadcast(dense, source)
    if dense.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(dense)


def gather(values: list[int], group: dist.ProcessGroup | None = None) -> list[list[int]]:
    """Return the `values` of every worker, by rank."""
    mine = torch.tensor(values)
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, mine, group=group)
    return [row.tolist() for row in rows]


@torch.no_grad()
def digest_of(tensors: Iterable[Tensor]) -> bytes:
    """Return the BLAKE3 of the tensors' values, 32 bytes.

    Shapes and names do not count.
    """
    digest = blake3()
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().view(-1)
        digest.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    return digest.digest()


def _words(digest: bytes) -> list[int]:
    """Return 32 bytes as four int64 values, which a collective can exchange."""
    return [int.from_bytes(digest[at : at + 8], "little", signed=True) for at in range(0, 32, 8)]
