"""A rank of a group, with torch.distributed's names, timeout and life cycle."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn, Self

import torch
import torch.distributed as dist
from torch import Tensor

from fedring.c10d import Store
from fedring.ring.engine.operation import Kind
from fedring.ring.engine.program import Program
from fedring.ring.errors import NotSupported, RingError
from fedring.ring.torch.arguments import seconds_of
from fedring.ring.torch.coalescing import CoalescingBlock
from fedring.ring.torch.compiler import opaque
from fedring.ring.torch.profiling import begin_record
from fedring.ring.torch.work import RingWork
from fedring.ring.torch.world import World

WIRE_DTYPES = {"same": None, "fp16": torch.float16, "bf16": torch.bfloat16}
_ProcessGroup: Any = dist.ProcessGroup  # its stub declares overloads that no method written in Python can match


@opaque
class Member(_ProcessGroup):  # type: ignore[misc]  # see _ProcessGroup
    """A rank of a group.

    Args:
        world: The world whose ranks form the group.
        store: The store that torch made the group with.
        ranks: The group's ranks in the world; their places in it are their ranks in the group.
        name: The group's name, equal on all ranks.
        timeout: How long a collective may take, by default.

    Attributes:
        ring: This rank's side of the group, of which torch knows nothing.
        place: This rank in the group, and the number of ranks.
        wire: The dtype in which allreduces send float32 values; None = as they are.
        block: The block that coalesces operations, while there is one.
    """

    _device_types = (torch.device("cpu"), torch.device("cuda"))  # as the backend is registered
    supports_splitting = supports_shrinking = supports_coalescing = supports_time_estimate = False

    def __init__(self, world: World, store: Store, ranks: Sequence[int], *, name: str, timeout: timedelta) -> None:
        self.world = world
        self.ring = world.enter(name, ranks)
        super().__init__(self.ring.rank, self.ring.size)
        self.place = self.ring.rank, self.ring.size
        self.wire: torch.dtype | None = None
        self._store = store
        self._name, self._description = name, "undefined"
        self._timeout = timeout
        self.block = CoalescingBlock(self.ring)

    def getBackendName(self) -> str:  # torch's C++ code asks for it
        """Return the backend's name, which DDP logs."""
        return "fedring"

    name = _get_backend_name = getBackendName

    @property
    def group_name(self) -> str:
        """The group's name, equal on all ranks."""
        return self._name

    @property
    def group_desc(self) -> str:
        """The user's name for the group."""
        return self._description

    def get_group_store(self) -> Store:
        """Return the store that torch made the group with."""
        return self._store

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def _get_backend(self, device: torch.device) -> Self:
        return self

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return False: the backend has no tensor memory of its own.

        FSDP asks.
        """
        return False

    def _has_hooks(self) -> bool:
        return False

    def split_group(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: torch's own method would crash the process.

        Raises:
            NotSupported: Always.
        """
        raise NotSupported("groups of the backend fedring cannot be split: use torch.distributed.new_group")

    def merge_remote_group(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: torch's own method would crash the process.

        Raises:
            NotSupported: Always.
        """
        raise NotSupported("groups of the backend fedring cannot be merged: form a new group of all ranks")

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long collectives that start from now on may take."""
        self._timeout = timeout

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Leave the group.

        With the last group of a world, leave the peers in order.
        """
        self.world.leave(self.ring)

    def abort(self) -> None:
        """Fail the generation on every rank, and leave the group."""
        self.ring.fail(RingError(f"rank {self.ring.rank} has aborted the group", rank=self.ring.rank))
        self.shutdown()

    def abort_because(self, why: str) -> None:
        """As `abort`, with a reason that the errors of all ranks tell."""
        self.ring.fail(RingError(f"rank {self.ring.rank} has aborted the group: {why}", rank=self.ring.rank))
        self.shutdown()

    def _start_coalescing(self, device: torch.device) -> None:
        self.block.begin()

    def _end_coalescing(self, device: torch.device) -> RingWork:
        return self.block.end()

    def seconds(self, opts: Any = None, timeout: timedelta | None = None) -> float:
        """Return how long a collective may take, in seconds, given torch's arguments."""
        return seconds_of(opts, timeout, self._timeout)

    def start(
        self,
        what: str,
        program: Program,
        *,
        results: list[Tensor],
        seconds: float,
        finish: Callable[[], None] | None = None,
        kind: Kind = Kind.OTHER,
    ) -> RingWork:
        """Start a program, and return its work.

        Args:
            what: The operation's description, equal on all ranks; part of the protocol.
            program: This rank's program.
            results: The tensors that hold the received values.
            seconds: How long the operation may take.
            finish: Called once after it.
            kind: The operation's purpose.
        """
        ending = begin_record(what, results)
        operation = self.ring.start(what, program, kind=kind, timeout=seconds, ending=ending)
        return self.block.add(RingWork(self.ring, [operation], results, finish=finish))
