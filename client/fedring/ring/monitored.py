"""A barrier whose rank 0 says who has not come, in the words of torch's monitored_barrier."""

from fedring.ring import collectives
from fedring.ring.errors import CollectiveTimeout, RingError
from fedring.ring.group import Group
from fedring.ring.operation import Operation

_LATER = 5.0  # seconds after which rank 0 is overdue, if it has not said so itself


def monitored_barrier(group: Group, seconds: float, *, name_all: bool) -> None:
    """All ranks have come here; else rank 0's error names the first that has not within `seconds`, or all of them.

    As every error it ends the generation, on every rank.
    """
    leads = group.rank == 0
    program = collectives.monitored_barrier(group.rank, group.size)
    operation = group.start("monitored_barrier", program, timeout=seconds + _LATER * leads)
    try:
        if not operation.wait(seconds if leads else None):
            raise _missing(group, operation, seconds, name_all=name_all)
    except RingError as error:
        group.fail(error)  # if nothing has failed before
        raise _told(group, error) from error


def _missing(group: Group, operation: Operation, seconds: float, *, name_all: bool) -> CollectiveTimeout:
    first = operation.waiting_for
    after = f"monitoredBarrier after {1000 * seconds:.0f} ms"
    if first is None or seconds <= 0:
        return CollectiveTimeout(f"Rank 0 timed out in {after}", rank=0)
    missing = operation.unheard(range(first, group.size)) if name_all else [first]
    names = f"Ranks {', '.join(map(str, missing))}" if name_all else f"Rank {first}"
    return CollectiveTimeout(f"{names} failed to pass {after}", rank=first)


def _told(group: Group, error: RingError) -> RingError:
    """The error as this rank sees it."""
    if group.rank:
        reached = f"Rank {group.rank} successfully reached monitoredBarrier, but received errors while waiting for"
        return type(error)(f"{reached} send/recv from rank 0: {error}", rank=error.rank)
    if error.rank and "monitoredBarrier" not in str(error):
        return type(error)(f"Rank {error.rank} failed to pass monitoredBarrier: {error}", rank=error.rank)
    return error
