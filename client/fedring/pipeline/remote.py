"""Owners in other processes: a coordinator sends orders over a process group, and each owner's process follows them.

An order and its answer are a length, [1] int64, and then JSON. An optimizer travels as its name in torch.optim, so
nothing that comes from the network is ever run as code.
"""

import json
import threading
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from fedring.pipeline.errors import PipelineError
from fedring.pipeline.owners import LocalOwner, RemoteParameter

_TAG = 1 << 20  # above all tags of a pipeline's lanes
_MAX_ORDER_BYTES = 1 << 24
_ORDERS = frozenset({"create", "lock", "prepare", "commit", "abort"})


class RemoteOwner:
    """The owner that another rank of the group serves. It has one coordinator, whose threads may share this object."""

    def __init__(self, rank: int, group: dist.ProcessGroup | None = None) -> None:
        self._rank, self._group = rank, group
        self._talking, self._stepping = threading.Lock(), threading.Lock()
        self.name = f"rank {rank}"
        self._parameters: list[str] = self._order("names")

    def references(self) -> list[RemoteParameter]:
        """Return all parameters, for a DistributedOptimizer."""
        return [RemoteParameter(self, name) for name in self._parameters]

    def create(self, optimizer_class: type[torch.optim.Optimizer], names: Sequence[str], options: Any) -> int:
        """Build an optimizer at the owner, and return its number.

        Raises:
            PipelineError: If the class is not in torch.optim, or the owner cannot build it.
        """
        if getattr(torch.optim, optimizer_class.__name__, None) is not optimizer_class:
            raise PipelineError(f"{optimizer_class.__name__} is not in torch.optim: use one of torch's own optimizers")
        return int(self._order("create", optimizer_class.__name__, list(names), dict(options)))

    def lock(self) -> None:
        """Wait for other steps, and keep them out until commit() or abort()."""
        self._stepping.acquire()  # in this process, because an owner that waits for a lock can follow no other order
        try:
            self._order("lock")
        except BaseException:
            self._stepping.release()
            raise

    def prepare(self, optimizer: int, context: int) -> None:
        """Let the owner do the step, so that it can still be undone."""
        self._order("prepare", optimizer, context)

    def commit(self, optimizer: int, context: int) -> None:
        """Let the owner keep the step, and let other steps run."""
        self._end("commit", optimizer, context)

    def abort(self, optimizer: int, context: int) -> None:
        """Let the owner undo the step, and let other steps run."""
        self._end("abort", optimizer, context)

    def dismiss(self) -> None:
        """End serve() at the owner."""
        self._order("dismiss")

    def _end(self, word: str, optimizer: int, context: int) -> None:
        try:
            self._order(word, optimizer, context)
        finally:
            self._stepping.release()

    def _order(self, word: str, *arguments: Any) -> Any:
        with self._talking:
            _send([word, *arguments], self._rank, self._group)
            answer = _receive(self._rank, self._group)
        if "error" in answer:
            raise PipelineError(f"rank {self._rank}: {answer['error']}")
        return answer.get("value")


def serve(owner: LocalOwner, coordinator: int, group: dist.ProcessGroup | None = None) -> None:
    """Follow the coordinator's orders until it calls dismiss(); errors are sent back to it.

    Args:
        owner: The owner of this process's parameters.
        coordinator: The rank that gives orders.
        group: The process group; None means the default group.
    """
    while True:
        word, *arguments = _receive(coordinator, group)
        answer: dict[str, Any] = {}
        try:
            if word == "names":
                answer["value"] = [parameter.name for parameter in owner.references()]
            elif word in _ORDERS:
                answer["value"] = getattr(owner, word)(*_typed(word, arguments))
            elif word != "dismiss":
                raise PipelineError(f"there is no order {word!r}")
        except Exception as error:  # noqa: BLE001  # an optimizer may raise anything, and the coordinator must know
            answer = {"error": f"{type(error).__name__}: {error}"}
        _send(answer, coordinator, group)
        if word == "dismiss":
            return


def _typed(word: str, arguments: list[Any]) -> list[Any]:
    if word != "create":
        return arguments
    name, names, options = arguments
    kind = getattr(torch.optim, name, None)
    if not isinstance(kind, type) or not issubclass(kind, torch.optim.Optimizer):
        raise PipelineError(f"torch.optim has no optimizer {name!r}")
    return [kind, names, options]


def _send(value: Any, rank: int, group: dist.ProcessGroup | None) -> None:
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    for part in (torch.tensor([data.numel()]), data):
        dist.send(part, group=group, group_dst=rank, tag=_TAG)


def _receive(rank: int, group: dist.ProcessGroup | None) -> Any:
    length = torch.empty(1, dtype=torch.int64)
    dist.recv(length, group=group, group_src=rank, tag=_TAG)
    if not 0 < length.item() <= _MAX_ORDER_BYTES:
        raise PipelineError(f"an order has {length.item()} bytes; it must have 1 to {_MAX_ORDER_BYTES}")
    data = torch.empty(int(length.item()), dtype=torch.uint8)
    dist.recv(data, group=group, group_src=rank, tag=_TAG)
    return json.loads(data.numpy().tobytes())
