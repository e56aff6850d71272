"""Ranks that call each other, in one process."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from fedring import remote
from fedring.ring import RingProcessGroup
from tests.ring_groups import ring_groups

TRUSTED = ["tests.remote_functions"]

Modules = Callable[[int], Mapping[str, nn.Module]]


def nothing(rank: int) -> Mapping[str, nn.Module]:
    """Return no modules."""
    return {}


@contextmanager
def serving(size: int, modules: Modules = nothing, **options: Any) -> Iterator[list[remote.Owners]]:
    """Let `size` ranks serve; `modules` returns those of a rank. They end together."""
    with ring_groups(size) as groups, serving_on(groups, modules, **options) as owners:
        yield owners


@contextmanager
def serving_on(
    groups: Sequence[RingProcessGroup], modules: Modules = nothing, **options: Any
) -> Iterator[list[remote.Owners]]:
    """Let the ranks of a group serve."""
    with ThreadPoolExecutor(len(groups)) as pool, ExitStack() as stack:
        given = {"trusted": TRUSTED, **options}
        blocks = [remote.serve(modules(rank), group=group, **given) for rank, group in enumerate(groups)]
        entered = [block.__enter__() for block in blocks]
        stack.callback(lambda: list(pool.map(lambda block: block.__exit__(None, None, None), blocks)))
        yield entered
