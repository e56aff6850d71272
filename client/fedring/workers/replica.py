"""What one worker of a group holds: model, optimizer and progress; and how it becomes equal to its peers'.

Nothing that a peer sends is unpickled: the layout of the optimizer's state travels as JSON, its tensors as they are.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from blake3 import blake3
from torch import Tensor, nn

from fedring.train.errors import TrainError
from fedring.train.state import tensors_of

State = dict[str, Any]  # what an optimizer keeps of one parameter
_MOST_LAYOUT = 64 << 20


@dataclass(slots=True)
class Progress:
    """How far a worker has come."""

    steps: int = 0  # of the job
    round_steps: int = 0
    epoch: int = 0  # of the round
    taken: int = 0  # samples of the epoch, by all workers


@dataclass(slots=True, eq=False)
class Replica:
    """One worker's copy of what all workers of a job hold in common."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    progress: Progress = field(default_factory=Progress)
    shared: dict[str, Tensor] = field(default_factory=dict)  # other state that must be equal, by name

    def begin_round(self) -> None:
        """The round's first step is the next one."""
        self.progress = Progress(self.progress.steps)

    def digest(self) -> bytes:
        """BLAKE3 of the parameters, 32 bytes: equal on all workers after every step."""
        return digest_of(parameter for parameter in self.model.parameters())

    def tensors(self) -> Iterator[Tensor]:
        """What the model and the shared state consist of."""
        yield from (tensor for _, tensor in tensors_of(self.model))
        yield from (self.shared[name] for name in sorted(self.shared))


@torch.no_grad()
def synchronize(replica: Replica) -> int:
    """Afterwards all workers hold what the one with most steps, or the first of those, held; its rank.

    Where all hold the same already, a hash is all that is sent.
    """
    progress = replica.progress
    mine = [progress.steps, *_words(digest_of(replica.tensors()))]
    everyone = _gather(mine)
    steps = [row[0] for row in everyone]
    source = steps.index(max(steps))
    if any(row != everyone[0] for row in everyone):
        replica.progress = _share_progress(progress, source)
        for tensor in replica.tensors():
            broadcast(tensor, source)
        _share_optimizer(replica.optimizer, source)
    return source


def all_equal(replica: Replica) -> bool:
    """Whether all workers hold the same parameters."""
    return equal_on_all(replica.digest())


def equal_on_all(digest: bytes, group: dist.ProcessGroup | None = None) -> bool:
    """Whether all workers of the group have this digest of 32 bytes."""
    rows = _gather(_words(digest), group)
    return all(row == rows[0] for row in rows)


@torch.no_grad()
def share_buffers(model: nn.Module) -> None:
    """Afterwards all workers hold rank 0's buffers; one broadcast for all of a kind, as they are many and small."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for buffer in model.buffers():
        kinds.setdefault((buffer.dtype, buffer.device), []).append(buffer)
    for buffers in kinds.values():
        flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
        broadcast(flat, 0)
        for buffer, values in zip(buffers, torch.split(flat, [b.numel() for b in buffers]), strict=True):
            buffer.copy_(values.view_as(buffer))


def _share_progress(progress: Progress, source: int) -> Progress:
    values = torch.tensor([progress.steps, progress.round_steps, progress.epoch, progress.taken])
    broadcast(values, source)
    return Progress(*(int(value) for value in values))


def _share_optimizer(optimizer: torch.optim.Optimizer, source: int) -> None:
    """Afterwards all workers hold the state of the source's optimizer."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states = share_states(parameters, [optimizer.state.get(p, {}) for p in parameters], source)
    for parameter, state in zip(parameters, states, strict=True):
        optimizer.state[parameter] = state


def share_states(parameters: Sequence[Tensor], states: Sequence[State], source: int) -> list[State]:
    """The source's `states` of an optimizer, one a parameter, on all workers."""
    if dist.get_rank() == source:
        layout = [_layout(state) for state in states]
        _share_text(json.dumps(layout), source)
        shared = list(states)
    else:
        layout = json.loads(_share_text("", source))
        pairs = zip(parameters, layout, strict=True)
        shared = [{key: _made(entry, parameter) for key, entry in entries.items()} for parameter, entries in pairs]
    for state, entries in zip(shared, layout, strict=True):
        for key, entry in entries.items():
            if "shape" in entry:
                broadcast(state[key], source)
    return shared


def _layout(state: State) -> dict[str, dict[str, Any]]:
    """What one parameter's optimizer state consists of, as JSON can say it."""
    layout: dict[str, dict[str, Any]] = {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            layout[key] = {
                "shape": list(value.shape),
                "dtype": str(value.dtype).removeprefix("torch."),
                "cpu": value.device.type == "cpu",
            }
        elif value is None or isinstance(value, bool | int | float | str):
            layout[key] = {"value": value}
        else:
            raise TrainError("bad_optimizer", f"An optimizer's state holds a {type(value).__name__}: use another one.")
    return layout


def _made(entry: dict[str, Any], parameter: Tensor) -> Any:
    """What the entry of a layout stands for; of a tensor, the place for its values."""
    if "shape" not in entry:
        return entry["value"]
    dtype = getattr(torch, entry["dtype"], None)
    if not isinstance(dtype, torch.dtype) or torch.Size(entry["shape"]).numel() > max(parameter.numel(), 1):
        raise TrainError("bad_optimizer", f"A peer's optimizer holds {entry} for a parameter of {parameter.numel()}.")
    return torch.zeros(entry["shape"], dtype=dtype, device="cpu" if entry["cpu"] else parameter.device)


def _share_text(text: str, source: int) -> str:
    """The source's `text`, on all workers."""
    data = bytearray(text.encode())
    length = torch.tensor([len(data)])
    broadcast(length, source)
    if not 0 < int(length) <= _MOST_LAYOUT:
        raise TrainError("bad_optimizer", f"A peer's optimizer has a layout of {int(length)} bytes.")
    held = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(int(length), dtype=torch.uint8)
    broadcast(held, source)
    return held.numpy().tobytes().decode()


def broadcast(tensor: Tensor, source: int) -> None:
    """Afterwards `tensor` holds the source's values."""
    dense = tensor.detach().cpu().contiguous()
    if dense.numel():
        dist.broadcast(dense, source)
    if dense.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(dense)


def _gather(values: list[int], group: dist.ProcessGroup | None = None) -> list[list[int]]:
    """Every worker's `values`, by rank."""
    mine = torch.tensor(values)
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, mine, group=group)
    return [row.tolist() for row in rows]


@torch.no_grad()
def digest_of(tensors: Iterable[Tensor]) -> bytes:
    """BLAKE3 of the tensors' values, 32 bytes."""
    digest = blake3()
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().view(-1)
        digest.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    return digest.digest()


def _words(digest: bytes) -> list[int]:
    """32 bytes as four int64."""
    return [int.from_bytes(digest[at : at + 8], "little", signed=True) for at in range(0, 32, 8)]
