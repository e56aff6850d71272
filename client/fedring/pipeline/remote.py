"""Owners behind a process group: a coordinator gives orders, and each owner's process carries them out.

An order and its answer are a length and then JSON. An optimizer travels by its name in torch.optim: what
comes from the network is never code.
"""

import json
import threading
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from fedring.pipeline.errors import PipelineError
from fedring.pipeline.owners import LocalOwner, RemoteParameter

_TAG = 1 << 20  # apart from those of a pipeline's lanes
_MOST = 1 << 24  # bytes of an order
_ORDERS = frozenset({"create", "lock", "prepare", "commit", "abort"})


class RemoteOwner:
    """The owner that rank `rank` of the group serves; to one coordinator, whose threads may all use this object."""

    def __init__(self, rank: int, group: dist.ProcessGroup | None = None) -> None:
        self._rank, self._group = rank, group
        self._talking, self._stepping = threading.Lock(), threading.Lock()
        self.name = f"rank {rank}"
        self._parameters: list[str] = self._order("names")

    def references(self) -> list[RemoteParameter]:
        """All parameters, for a DistributedOptimizer."""
        return [RemoteParameter(self, name) for name in self._parameters]

    def create(self, optimizer_class: type[torch.optim.Optimizer], names: Sequence[str], options: Any) -> int:
        """The number of a new optimizer, built at the owner."""
        if getattr(torch.optim, optimizer_class.__name__, None) is not optimizer_class:
            raise PipelineError(f"{optimizer_class.__name__} is none of torch.optim's: only those travel by name")
        return int(self._order("create", optimizer_class.__name__, list(names), dict(options)))

    def lock(self) -> None:
        """No other step runs on this owner until commit() or abort()."""
        self._stepping.acquire()  # here, since an owner that waited there could hear no other order
        try:
            self._order("lock")
        except BaseException:
            self._stepping.release()
            raise

    def prepare(self, optimizer: int, context: int) -> None:
        """The step is done there, and can still be undone."""
        self._order("prepare", optimizer, context)

    def commit(self, optimizer: int, context: int) -> None:
        """The step holds."""
        self._end("commit", optimizer, context)

    def abort(self, optimizer: int, context: int) -> None:
        """Nothing has changed there."""
        self._end("abort", optimizer, context)

    def dismiss(self) -> None:
        """The owner's serve() has returned."""
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
    """The coordinator's orders are carried out until it dismisses; its errors go back to it."""
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
        except Exception as error:  # noqa: BLE001  # an optimizer may raise anything, and the coordinator is to hear of it
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
    if not 0 < length.item() <= _MOST:
        raise PipelineError(f"an order of {length.item()} bytes")
    data = torch.empty(int(length.item()), dtype=torch.uint8)
    dist.recv(data, group=group, group_src=rank, tag=_TAG)
    return json.loads(data.numpy().tobytes())
