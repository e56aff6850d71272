"""A rank of a group as torch.distributed wants to know it: its names, its timeout, its beginning and end."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from fedring.ring import arguments
from fedring.ring.errors import RingError
from fedring.ring.options import RingOptions
from fedring.ring.program import Program
from fedring.ring.staging import Staged
from fedring.ring.work import RingWork, together
from fedring.ring.world import World

_WIRE = {"same": None, "fp16": torch.float16, "bf16": torch.bfloat16}
_ProcessGroup: Any = dist.ProcessGroup  # its stub declares overloads that no method written in Python can match


class Member(_ProcessGroup):  # type: ignore[misc]  # see _ProcessGroup
    """A rank of a group of a world; `ring` is the side of it that torch knows nothing of."""

    supports_splitting = supports_coalescing = supports_time_estimate = False

    def __init__(self, world: World, store: Store, ranks: Sequence[int], *, name: str, timeout: timedelta) -> None:
        self.world = world
        self.ring = world.enter(name, ranks)
        super().__init__(self.ring.rank, self.ring.size)
        self.place = self.ring.rank, self.ring.size
        self.wire: torch.dtype | None = None
        self._store = store
        self._name, self._description = name, "undefined"
        self._timeout = timeout
        self._coalesced: list[RingWork] | None = None

    def use(self, options: RingOptions) -> None:
        """The group follows the options that each group may have for itself."""
        self.wire = _WIRE[options.wire_dtype]

    def getBackendName(self) -> str:  # torch's C++ code asks for it
        """What DDP logs."""
        return "fedring"

    name = _get_backend_name = getBackendName

    @property
    def group_name(self) -> str:
        """Equal on all ranks."""
        return self._name

    @property
    def group_desc(self) -> str:
        """What the user calls the group."""
        return self._description

    def get_group_store(self) -> Store:
        """The store of torch's that the group was made with."""
        return self._store

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def _get_backend(self, device: torch.device) -> Self:
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        """What starts from now on may take this long."""
        self._timeout = timeout

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """The group is no more; the last one of a world leaves it in order."""
        self.world.leave(self.ring)

    def abort(self) -> None:
        """The generation has failed, on every rank; the group is no more."""
        self.ring.fail(RingError(f"rank {self.ring.rank} has aborted the group"))
        self.shutdown()

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> RingWork:
        works, self._coalesced = self._coalesced or [], None
        return together(self.ring, works)

    def limit(self, opts: Any = None, timeout: timedelta | None = None) -> float:
        """How long a collective may take, in seconds."""
        return arguments.seconds(opts, timeout, self._timeout)

    def start(
        self,
        what: str,
        program: Program,
        *,
        results: list[Tensor],
        limit: float,
        finish: Callable[[], None] | None = None,
    ) -> RingWork:
        """The program runs; `finish` is called once after it."""
        operation = self.ring.start(what, program, timeout=limit)
        return self.kept(RingWork(self.ring, [operation], results, finish=finish))

    def kept(self, work: RingWork) -> RingWork:
        """`work`, which a block that coalesces will wait for."""
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def check_count(self, what: str, tensors: Sequence[Any]) -> None:
        """There is one for each rank."""
        if len(tensors) != self.ring.size:
            raise ValueError(f"there are {len(tensors)} {what} for {self.ring.size} ranks")


def storing(staged: Sequence[Staged]) -> Callable[[], None] | None:
    """What stores the values in the tensors; None if they are there already."""
    apart = [one for one in staged if one.apart]

    def store() -> None:
        for one in apart:
            one.store()

    return store if apart else None
